"""A model on demand that is put away for another one before the request for which it was loaded runs again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import trio

from neptrio.errors import Unavailable
from neptrio.transport.rest.control_routes import ControlRoutes
from neptrio.transport.rest.openai import HttpOpenAi

MAPPING: Any = object()


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
        return SimpleNamespace(openai=MAPPING)


async def stays() -> dict[str, str]:
    """The client stays."""
    await trio.sleep_forever()
    raise AssertionError


def test_openai_waits_until_it_is_there() -> None:
    model = Thrashing()
    services: Any = SimpleNamespace(admission=model, request_limits=SimpleNamespace(on=False))
    asked = HttpOpenAi(services, None, None, SimpleNamespace(), "")  # type: ignore[arg-type]
    assert trio.run(asked._mapping, "m", stays) is MAPPING


def test_so_does_a_question_about_it() -> None:
    model = Thrashing()
    routes = SimpleNamespace(_verbs=SimpleNamespace(metadata=SimpleNamespace(absent=model.present)))
    asked: Any = SimpleNamespace(model="m", version="")
    trio.run(ControlRoutes._present, routes, asked, stays)  # type: ignore[arg-type]
    assert model.loads == 2
