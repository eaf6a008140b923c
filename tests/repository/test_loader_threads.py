"""How many loader threads run when loads were given up (repository.model_builder)."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import trio
import trio.testing

from neptrio.observe.memory import MemoryProbe
from neptrio.repository.model_builder import ModelBuilder
from neptrio.settings import Settings


def builder(threads: int) -> ModelBuilder:
    loop: Any = SimpleNamespace(poller=SimpleNamespace(giving_way=nullcontext))
    nothing: Any = None
    settings = Settings(model_load_thread_count=threads)
    return ModelBuilder(settings, nothing, loop, nothing, nothing, MemoryProbe(lambda: 0))


class Work:
    """Work of a loader thread that ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)


async def leave_behind(made: ModelBuilder, told: list[int]) -> Work:
    """Begins work and gives it up."""
    work = Work()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.on_thread, work, lambda late: None, None, told.append)
            await trio.to_thread.run_sync(work.begun.wait)
            scope.cancel()
    return work


def test_threads_that_were_left_behind_count_but_for_one() -> None:
    async def main() -> None:
        made, told = builder(2), list[int]()
        first = await leave_behind(made, told)
        assert (told, made.left_behind) == ([1], 1)
        one, other = Work(), Work()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.on_thread, one, lambda late: None)
            await trio.to_thread.run_sync(one.begun.wait)
            nursery.start_soon(made.on_thread, other, lambda late: None)
            await trio.testing.wait_all_tasks_blocked()
            assert not other.begun.is_set(), "two run already"
            first.may_end.set()
            await trio.to_thread.run_sync(other.begun.wait)
            assert (told, made.left_behind) == ([1, -1], 0)
            one.may_end.set()
            other.may_end.set()
        behind = [await leave_behind(made, told) for _ in range(3)]
        one = Work()
        one.may_end.set()
        await made.on_thread(one, lambda late: None)  # though more hang than there are threads
        for work in behind:
            work.may_end.set()
        with trio.fail_after(60):
            while made.left_behind:
                await trio.lowlevel.checkpoint()

    trio.run(main)
