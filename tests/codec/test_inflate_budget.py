"""The budget of inflated bytes: taken before they are made, waited for in order, never deadlocked."""

from __future__ import annotations

import gzip
import threading

import pytest
import trio
import trio.testing

from neptrio.codec.inflate import STEP_BYTES, Inflater, TooLong, Undecodable
from neptrio.codec.inflate_budget import InflateBudget
from neptrio.errors import Unavailable
from neptrio.loop.workers import Workers
from tests.support.waiting import until_trio

MIB = 1 << 20


def bomb(mib: int) -> Inflater:
    return Inflater(31, gzip.compress(bytes(mib * MIB), 1), 64 * MIB)


class Held(Inflater):
    """Its steps wait until they are let go; `begun` counts them."""

    def __init__(self, mib: int) -> None:
        super().__init__(31, gzip.compress(bytes(mib * MIB), 1), 64 * MIB)
        self.begun = 0
        self.go = threading.Semaphore(0)

    def step(self, most: int = STEP_BYTES, calls: int = 1 << 20) -> bool:
        self.begun += 1
        assert self.go.acquire(timeout=60)
        return super().step(most, calls)


def test_bytes_are_counted_before_they_are_made_and_given_back_by_their_owner() -> None:
    async def main() -> None:
        budget = InflateBudget(Workers(2), 100 * MIB)
        made = Held(3)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(budget.inflate, made)
            for step in range(3):
                await until_trio(lambda step=step: made.begun == step + 1, "a step")  # type: ignore[misc]
                assert budget.held == (step + 1) * MIB
                made.go.release()
            made.go.release()  # the member's end
        assert budget.held == 3 * MIB
        budget.release(3 * MIB)
        assert budget.held == 0

    trio.run(main)


def test_whoever_finds_none_left_waits_for_an_answer() -> None:
    async def main() -> None:
        budget = InflateBudget(Workers(2), 10 * MIB)
        assert len(await budget.inflate(bomb(8))) == 8 * MIB
        done = trio.Event()

        async def second() -> None:
            assert len(await budget.inflate(bomb(5))) == 5 * MIB
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(second)
            await until_trio(lambda: budget.held == 10 * MIB, "it has what there is")
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert not done.is_set() and budget.held == 10 * MIB
            budget.release(8 * MIB)
            await done.wait()
        assert budget.held == 5 * MIB

    trio.run(main)


def test_bodies_that_hold_everything_together_all_get_through() -> None:
    """Each alone is larger than the budget: the first passes over the limit, then the next."""

    async def main() -> None:
        budget = InflateBudget(Workers(3), 4 * MIB)
        highest = 0

        async def one() -> None:
            nonlocal highest
            content = await budget.inflate(bomb(6))
            highest = max(highest, budget.held)
            budget.release(len(content))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(one)
        assert budget.held == 0
        assert highest <= (4 + 6 + 1) * MIB

    trio.run(main)


def test_whoever_is_cancelled_holds_nothing_and_works_no_further() -> None:
    async def main() -> None:
        workers = Workers(2)
        budget = InflateBudget(workers, 100 * MIB)
        made = Held(5)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(budget.inflate, made)
                await until_trio(lambda: made.begun == 1, "the first step")
                scope.cancel()
        assert budget.held == 0
        made.go.release(10)
        await until_trio(lambda: workers.statistics().busy == 0, "the thread has ended its step")
        assert made.begun == 1

    trio.run(main)


def test_failures_hold_nothing() -> None:
    async def main() -> None:
        budget = InflateBudget(Workers(2), 100 * MIB)
        with pytest.raises(TooLong):
            await budget.inflate(Inflater(31, gzip.compress(bytes(3 * MIB)), 2 * MIB))
        with pytest.raises(Undecodable):
            await budget.inflate(Inflater(31, gzip.compress(bytes(3 * MIB))[:-9], 20 * MIB))
        assert budget.held == 0

    trio.run(main)


def test_after_stop_nothing_is_inflated() -> None:
    async def main() -> None:
        budget = InflateBudget(Workers(2), 4 * MIB)
        await budget.inflate(bomb(4))  # nothing is left
        refused = 0

        async def one() -> None:
            nonlocal refused
            with pytest.raises(Unavailable, match="shutting down"):
                await budget.inflate(bomb(2))
            refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(one)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert refused == 0
            budget.stop()
        assert refused == 10
        assert budget.held == 4 * MIB

    trio.run(main)
