"""Who of the loads that wait for room looks, and what is promised to whom (repository.room_line)."""

from __future__ import annotations

from contextlib import ExitStack

import trio
import trio.testing

from neptrio.repository.room_line import FIRST, MODELS_EACH, PATIENCE_SECONDS, RETRY_SECONDS, RoomLine, Waiter

HOST = -1


def in_line(line: RoomLine, count: int, stack: ExitStack) -> list[Waiter]:
    return [
        stack.enter_context(line.waiting(f"m{number}", {HOST: 10 + number}, lambda what: None))
        for number in range(count)
    ]


def test_the_first_look_and_are_more_where_looking_takes_long() -> None:
    async def main() -> None:
        line = RoomLine()
        with ExitStack() as stack:
            waiters = in_line(line, 50, stack)
            assert line.first == waiters[:FIRST]
            line.loaded(10 * MODELS_EACH)
            assert line.first == waiters[:10]
            line.loaded(1)
            assert line.first == waiters[:FIRST]
            assert line.needed(2) == {HOST: 21}
        assert line.first == []

    trio.run(main)


def test_who_has_waited_is_promised_what_it_needs_before_all_that_come_later() -> None:
    async def main() -> None:
        line = RoomLine()
        with ExitStack() as stack:
            waiters = in_line(line, FIRST + 1, stack)
            assert line.promised_before(None) == {}
            await trio.sleep_until(trio.current_time() + PATIENCE_SECONDS)
            for waiter in waiters:
                await line.pause(waiter)
            assert line.promised_before(waiters[0]) == {}
            assert line.promised_before(waiters[2]) == {HOST: 21}
            everybody = sum(10 + number for number in range(FIRST + 1))
            assert line.promised_before(None) == {HOST: everybody}
            own = waiters[FIRST].needs[HOST]
            assert line.promised_before(waiters[FIRST]) == {HOST: everybody - own}, "to all others"
        assert not any(line.promised_before(None).values())

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_the_first_are_woken_and_the_others_look_rarely() -> None:
    async def main() -> None:
        line = RoomLine()
        with ExitStack() as stack:
            waiters = in_line(line, 10 * FIRST, stack)

            async def paused(waiter: Waiter) -> float:
                began = trio.current_time()
                await line.pause(waiter)
                return round(trio.current_time() - began, 6)

            assert await paused(waiters[0]) == RETRY_SECONDS
            assert await paused(waiters[-1]) >= 9 * RETRY_SECONDS
            line.wake()
            assert await paused(waiters[0]) == 0
            assert await paused(waiters[0]) == RETRY_SECONDS, "once"
            assert await paused(waiters[-1]) >= 9 * RETRY_SECONDS, "it is not among the first"

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))


def test_who_becomes_one_of_the_first_looks_at_once() -> None:
    async def main() -> None:
        line = RoomLine()
        with ExitStack() as rest, ExitStack() as gone:
            in_line(line, FIRST, gone)
            (last,) = in_line(line, 1, rest)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(line.pause, last)
                await trio.testing.wait_all_tasks_blocked()
                began = trio.current_time()
                gone.close()
            assert trio.current_time() == began

    trio.run(main, clock=trio.testing.MockClock())
