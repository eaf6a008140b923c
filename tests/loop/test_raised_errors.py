"""An error that a function raises on another thread keeps nothing that it has met, whether or not somebody takes it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from neptrio.loop import threads
from tests.support.waiting import until


class Body:
    """What a frame refers to when the error comes through it."""


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail(known: list[weakref.ref[Body]]) -> None:
    body = Body()
    known.append(weakref.ref(body))
    raise ValueError("no luck")


def test_raised_for_a_task() -> None:
    known: list[weakref.ref[Body]] = []

    async def main() -> None:
        with pytest.raises(ValueError, match="no luck"):
            await threads.run(fail, known)

    trio.run(main)
    until(lambda: known[0]() is None, "the body is freed")


def test_raised_by_the_loop_for_a_thread() -> None:
    known: list[weakref.ref[Body]] = []

    def ask() -> None:
        with pytest.raises(ValueError, match="no luck"):
            threads.on_loop(fail, known)

    async def main() -> None:
        await threads.run(ask)

    trio.run(main)
    until(lambda: known[0]() is None, "the body is freed")


@pytest.mark.parametrize("late", [False, True])
def test_raised_when_nobody_waits_any_more(late: bool) -> None:
    """Before the task has gone, or afterwards."""
    known: list[weakref.ref[Body]] = []
    begun, go_on = threading.Event(), threading.Event()

    def wait_and_fail() -> None:
        begun.set()
        go_on.wait()
        fail(known)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: threads.run(wait_and_fail, abandon_on_cancel=True))
            await trio.testing.wait_all_tasks_blocked()
            until(begun.is_set)
            if not late:
                go_on.set()
                until(lambda: known, "the error is on its way")  # which the loop cannot hear of meanwhile
            nursery.cancel_scope.cancel()
        go_on.set()

    trio.run(main)
    until(lambda: known and known[0]() is None, "the body is freed")
