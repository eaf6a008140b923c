"""Control calls whose modules cannot be imported at once."""

from __future__ import annotations

import logging
import os
from importlib import metadata
from typing import Any

import pytest
import trio

from neptrio.transport.grpc import handler_import
from tests.support.no_descriptors import no_descriptors


class Said(logging.Handler):
    """Tells when something was logged."""

    def __init__(self) -> None:
        super().__init__()
        self.event = trio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


@pytest.mark.parametrize("installed", [True, False])
def test_a_package_that_seems_to_be_missing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, installed: bool
) -> None:
    """Without descriptors Python finds no package, and remembers that. One that is really missing ends the server."""
    name = "trio" if installed else "no-such-package"
    monkeypatch.setattr(handler_import, "RETRY_S", 0)
    monkeypatch.setattr(handler_import, "all_handlers", lambda *_: {b"/": metadata.version(name)})
    metadata.MetadataPathFinder().invalidate_caches()
    none: Any = None
    found: list[Any] = []

    async def load() -> None:
        try:
            found.append(await handler_import.imported(none, none))
        except ImportError as error:
            found.append(error)

    async def main() -> None:
        said = Said()
        logging.getLogger("neptrio.grpc").addHandler(said)
        try:
            async with trio.open_nursery() as nursery:
                with no_descriptors(os.getpid()):
                    nursery.start_soon(load)
                    for _ in range(2 * handler_import.LASTING):  # however long that lasts
                        await said.event.wait()
                        said.event = trio.Event()
                    assert found == []
        finally:
            logging.getLogger("neptrio.grpc").removeHandler(said)

    with caplog.at_level(logging.WARNING, "neptrio.grpc"):
        trio.run(main)
    assert f"their modules cannot be read: No package metadata was found for {name}" in caplog.text
    if installed:
        assert found == [{b"/": metadata.version("trio")}]
    else:
        (error,) = found
        assert isinstance(error, ImportError)
