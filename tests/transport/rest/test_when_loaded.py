"""A model on demand that is put away for another one before the request for which it was loaded runs again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from neptrio.errors import NotFound, Unavailable
from neptrio.transport.rest.disconnect import when_loaded
from neptrio.transport.rest.openai import HttpOpenAi


class Thrashing:
    """A model that has to be loaded twice: it is put away at once after the first time."""

    def __init__(self) -> None:
        self.loads = 0

    def present(self, name: str, version: str) -> Callable[[], Awaitable[None]] | None:
        return None if self.loads == 2 else self.load

    async def load(self) -> None:
        self.loads += 1

    def lookup(self, name: str, version: str) -> Any:
        if self.loads < 2:
            raise Unavailable("put away")
        return SimpleNamespace(openai=None)


async def stays() -> dict[str, str]:
    """The client stays."""
    await trio.sleep_forever()
    raise AssertionError


def test_openai_waits_until_it_is_there() -> None:
    model = Thrashing()
    services: Any = SimpleNamespace(admission=model, request_limits=SimpleNamespace(on=False), held=None)
    asked = HttpOpenAi(services, None, None, SimpleNamespace(), "")  # type: ignore[arg-type]
    with pytest.raises(
        NotFound, match="not configured for OpenAI's API"
    ):  # which only one that is there can say
        trio.run(asked.embeddings, {"model": "m", "input": "a"}, stays)


def test_whoever_waits_waits_again() -> None:
    model = Thrashing()
    trio.run(when_loaded, stays, model.present, "m", "")
    assert model.loads == 2
