"""How many loader threads run when loads were given up (repository.loader_threads)."""

from __future__ import annotations

import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from neptrio.errors import TritonError
from neptrio.repository.loader_threads import LoaderThreads
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model


def loader_threads(count: int) -> LoaderThreads:
    loop: Any = SimpleNamespace(poller=SimpleNamespace(giving_way=nullcontext))
    return LoaderThreads(count, loop)


class Work:
    """Work of a loader thread that ends when it may."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(60)


async def leave_behind(made: LoaderThreads, told: list[int]) -> Work:
    """Begins work and gives it up."""
    work = Work()
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run, work, lambda late: None, None, told.append)
            await trio.to_thread.run_sync(work.begun.wait)
            scope.cancel()
    return work


def test_threads_that_were_left_behind_count_but_for_one() -> None:
    async def main() -> None:
        made, told = loader_threads(2), list[int]()
        first = await leave_behind(made, told)
        assert (told, made.left_behind) == ([1], 1)
        one, other = Work(), Work()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.run, one, lambda late: None)
            await trio.to_thread.run_sync(one.begun.wait)
            nursery.start_soon(made.run, other, lambda late: None)
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
        await made.run(one, lambda late: None)  # though more hang than there are threads
        for work in behind:
            work.may_end.set()
        with trio.fail_after(60):
            while made.left_behind:
                await trio.lowlevel.checkpoint()

    trio.run(main)


def test_work_that_is_given_up_at_any_moment_gives_its_place_back() -> None:
    async def main() -> None:
        made, told = loader_threads(1), list[int]()
        for moment in range(8):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(made.run, lambda: None, lambda late: None, None, told.append)
                    for _ in range(moment):
                        await trio.lowlevel.checkpoint()
                    scope.cancel()
            with trio.fail_after(60):
                while made.left_behind:
                    await trio.lowlevel.checkpoint()
                assert await made.run(lambda: "done", lambda late: None) == "done"
        assert sum(told) == 0

    trio.run(main)


@pytest.mark.slow
def test_a_load_that_is_unloaded_at_any_moment_leaves_no_thread_behind(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    with EmbeddedServer(tmp_path, model_control_mode="explicit") as server:
        repository = server.server.repository

        async def given_up(moment: int) -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(refused)
                for _ in range(moment):
                    await trio.lowlevel.checkpoint()
                await repository.unload("m", False)

        async def refused() -> None:
            with suppress(TritonError):
                await repository.load("m", {})

        for moment in range(100):
            server.run(given_up, moment)
        server.until(lambda: repository.left_behind == 0, "all threads have ended")
