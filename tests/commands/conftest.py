"""What the tests of `neptrio trace` share: a traced server and files that it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.traced import Traced, traced_server


@pytest.fixture(scope="package")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    """A server whose requests can be traced."""
    with traced_server(tmp_path_factory.mktemp("traced")) as server:
        yield server


@pytest.fixture(scope="package")
def every_kind(traced: Traced) -> Path:
    """A file with one request of every kind, timestamps and tensors."""
    path = traced.folder / "every_kind.json"
    with traced.tracing(path, "TIMESTAMPS", "TENSORS"):
        traced.everything()
    return path
