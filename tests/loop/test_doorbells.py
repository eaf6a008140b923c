"""Doorbells of models' processes: heard on the trio thread, never read, and none keeps the others from being heard."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
import trio
import trio.testing

from neptrio.loop.doorbells import Doorbells
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.timers import Timers

LIMIT_S = 60.0


@pytest.fixture(params=["hook", "task"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    if name == "task":
        monkeypatch.setenv("NEPTRIO_POLLER", "task")
    return name


@pytest.fixture
def bells() -> Iterator[list[int]]:
    made = [os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(3)]
    yield made
    for bell in made:
        os.close(bell)


class Heard:
    """Counts the calls of each bell's callback, and the threads that made them."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.threads: set[int] = set()
        self.news = trio.Event()

    def of(self, number: int, more: Callable[[], bool] = lambda: False) -> Callable[[], bool]:
        def callback() -> bool:
            self.calls.append(number)
            self.threads.add(threading.get_ident())
            self.news.set()
            return more()

        return callback

    async def until(self, count: int) -> None:
        while len(self.calls) < count:
            await self.news.wait()
            self.news = trio.Event()


def run(main: Callable[[Doorbells, Poller], object]) -> None:
    async def serve() -> None:
        loop_pass = LoopPass()
        timers = Timers(loop_pass)
        poller = Poller(loop_pass, timers)
        doorbells = Doorbells(poller)
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                await nursery.start(loop_pass.run)
                await nursery.start(timers.run)
                await nursery.start(poller.run)
                await main(doorbells, poller)  # type: ignore[misc]
                nursery.cancel_scope.cancel()

    trio.run(serve)


def test_each_ring_is_heard_on_the_trio_thread(mode: str, bells: list[int]) -> None:
    heard = Heard()

    async def main(doorbells: Doorbells, poller: Poller) -> None:
        await trio.to_thread.run_sync(doorbells.register, bells[0], heard.of(0))
        doorbells.register(bells[1], heard.of(1))
        for count in range(1, 6):
            os.eventfd_write(bells[count % 2], 1)
            await heard.until(count)
        assert heard.calls == [1, 0, 1, 0, 1]
        assert heard.threads == {threading.get_ident()}
        assert [os.eventfd_read(bell) for bell in bells[:2]] == [2, 3]  # nobody has read them
        doorbells.unregister(bells[0])
        os.eventfd_write(bells[0], 1)
        os.eventfd_write(bells[1], 1)
        await heard.until(6)
        await trio.testing.wait_all_tasks_blocked()
        assert heard.calls[5:] == [1]

    run(main)


def test_a_ring_from_before_the_loop_runs_is_heard(mode: str, bells: list[int]) -> None:
    heard = Heard()

    async def serve() -> None:
        loop_pass = LoopPass()
        timers = Timers(loop_pass)
        poller = Poller(loop_pass, timers)
        doorbells = Doorbells(poller)
        doorbells.register(bells[0], heard.of(0))
        os.eventfd_write(bells[0], 1)
        with trio.fail_after(LIMIT_S):
            async with trio.open_nursery() as nursery:
                await nursery.start(loop_pass.run)
                await nursery.start(timers.run)
                await nursery.start(poller.run)
                await heard.until(1)
                nursery.cancel_scope.cancel()

    trio.run(serve)


def test_who_has_more_to_do_is_called_again_behind_the_others(mode: str, bells: list[int]) -> None:
    heard = Heard()
    left = [3]

    def more() -> bool:
        left[0] -= 1
        if left[0] == 2:
            os.eventfd_write(bells[1], 1)  # what rings meanwhile is not starved
        return left[0] > 0

    async def main(doorbells: Doorbells, poller: Poller) -> None:
        doorbells.register(bells[0], heard.of(0, more))
        doorbells.register(bells[1], heard.of(1))
        os.eventfd_write(bells[0], 1)
        await heard.until(4)
        assert sorted(heard.calls) == [0, 0, 0, 1] and heard.calls.index(1) < 3

    run(main)


def test_answers_of_others_are_sent_before_long_work_goes_on(mode: str, bells: list[int]) -> None:
    order: list[str] = []

    class Connection:
        def flush(self) -> None:
            order.append("sent")

    async def main(doorbells: Doorbells, poller: Poller) -> None:
        done = trio.Event()

        def long() -> bool:
            order.append("long")
            if len(order) == 1:
                os.eventfd_write(bells[1], 1)
                return True
            done.set()
            return False

        def short() -> bool:
            order.append("short")
            poller._loop_pass.want_flush(Connection())
            return False

        doorbells.register(bells[0], long)
        doorbells.register(bells[1], short)
        os.eventfd_write(bells[0], 1)
        await done.wait()
        assert order == ["long", "short", "sent", "long"]

    run(main)


def test_one_that_fails_stays_and_the_others_are_heard(
    mode: str, bells: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    heard = Heard()

    def fails() -> bool:
        raise RuntimeError("broken message")

    async def main(doorbells: Doorbells, poller: Poller) -> None:
        doorbells.register(bells[0], heard.of(0, fails))
        doorbells.register(bells[1], heard.of(1))
        for _ in range(2):
            before = len(heard.calls)
            os.eventfd_write(bells[0], 1)
            os.eventfd_write(bells[1], 1)
            await heard.until(before + 2)
        assert sorted(heard.calls) == [0, 0, 1, 1]

    run(main)
    assert caplog.text.count("could not be used") == 2
