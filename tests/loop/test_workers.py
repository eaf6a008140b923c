"""The workers' threads: bounded, fair between connections, and free again when a waiter leaves."""

from __future__ import annotations

import threading

import trio
from trio.testing import wait_all_tasks_blocked

from neptrio.loop.workers import Workers


def test_no_more_than_its_threads() -> None:
    async def main() -> None:
        workers = Workers(2)
        doors = threading.Event()
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(workers.run, doors.wait)
            await wait_all_tasks_blocked()
            assert workers.statistics().busy == 2 and workers.statistics().waiting == 3
            doors.set()
        found = workers.statistics()
        assert (found.busy, found.waiting) == (0, 0)

    trio.run(main)


def test_forty_busy_connections_and_one_that_comes_seldom() -> None:
    """Each of forty has three steps to do. One that comes later is served before any second step of theirs."""

    async def main() -> None:
        workers = Workers(1)
        served: list[str] = []
        doors = threading.Event()

        async def ask(name: str, whose: object) -> None:
            def step() -> None:
                doors.wait()
                served.append(name)

            await workers.run(step, whose)

        heavy = [object() for _ in range(40)]
        async with trio.open_nursery() as nursery:
            for i, one in enumerate(heavy):
                for turn in range(3):
                    nursery.start_soon(ask, f"{i}.{turn}", one)
            await wait_all_tasks_blocked()
            nursery.start_soon(ask, "seldom", object())
            await wait_all_tasks_blocked()
            doors.set()
        assert len(served) == 121
        before = [name.partition(".")[0] for name in served[: served.index("seldom")]]
        assert len(set(before)) == len(before)

    trio.run(main)


def test_a_waiter_that_leaves_takes_no_turn() -> None:
    async def main() -> None:
        workers = Workers(1)
        doors = threading.Event()
        served: list[str] = []

        async def ask(name: str) -> None:
            await workers.run(lambda: served.append(name))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(workers.run, doors.wait)
            await wait_all_tasks_blocked()
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as leaving:
                    leaving.start_soon(ask, "left")
                    await wait_all_tasks_blocked()
                    scope.cancel()
            assert workers.statistics().waiting == 0
            nursery.start_soon(ask, "stayed")
            await wait_all_tasks_blocked()
            doors.set()
        assert served == ["stayed"] and workers.statistics().busy == 0

    trio.run(main)


def test_a_step_that_nobody_awaits_keeps_its_thread() -> None:
    async def main() -> None:
        workers = Workers(1)
        doors, begun = threading.Event(), threading.Event()

        def step() -> None:
            begun.set()
            doors.wait()

        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(workers.run, step)
                await trio.to_thread.run_sync(begun.wait)
                scope.cancel()
        assert workers.statistics().busy == 1
        doors.set()
        await workers.run(lambda: None)
        assert workers.statistics().busy == 0

    trio.run(main)
