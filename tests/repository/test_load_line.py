"""Which load is next (repository.load_line)."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neptrio.repository.load_line import LAST, NO_PRIORITY, Entry, LoadLine, Rank, next_of, places
from neptrio.settings import Settings


def entries(*names: str, dear: bool = False) -> list[Entry]:
    return [Entry(name, dear, number) for number, name in enumerate(names)]


def test_priority_comes_before_waiting_time_and_both_before_who_came_first() -> None:
    ranks: dict[str, Rank] = {
        "nobody": (LAST, 0),
        "old": (NO_PRIORITY, 5),
        "new": (NO_PRIORITY, 9),
        "high": (1, 20),
    }
    waiting = entries(*ranks)
    order = []
    while (found := next_of(waiting, [], 1, ranks.__getitem__)) is not None:
        order.append(found.name)
        waiting.remove(found)
    assert order == ["high", "old", "new", "nobody"]


def test_loads_that_take_long_leave_a_place() -> None:
    def rank(name: str) -> Rank:
        return NO_PRIORITY, 0

    dear, cheap = entries("a", "b", dear=True), entries("c")
    assert next_of(dear, [], 2, rank) is dear[0]
    assert next_of(dear[1:], dear[:1], 2, rank) is None
    assert next_of(dear[1:] + cheap, dear[:1], 2, rank) is cheap[0]
    assert next_of(cheap, [*dear[:1], *entries("d")], 2, rank) is None
    assert next_of(dear, [], 1, rank) is dear[0], "with one place there is none to leave"


def test_turns_are_given_up_and_who_leaves_the_line_takes_none() -> None:
    priorities = {"a": 3, "b": 2, "c": 1, "d": 4}
    line = LoadLine(1, lambda name: (priorities[name], 0))
    order: list[str] = []

    async def load(name: str) -> None:
        async with line.turn(name, False, 0):
            order.append(name)
            await trio.testing.wait_all_tasks_blocked()

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load, "a")
            await trio.testing.wait_all_tasks_blocked(0.001)
            for name in ("b", "d"):
                nursery.start_soon(load, name)
            with trio.CancelScope() as scope:
                scope.cancel()
                await load("c")
        assert sorted(order) == ["a", "b", "d"] and order.index("b") < order.index("d")

    trio.run(main)


def test_who_waits_for_something_else_has_no_place_meanwhile() -> None:
    line = LoadLine(1, lambda name: (NO_PRIORITY, 0))
    order: list[str] = []
    room = trio.Event()

    async def waits(fails: bool) -> None:
        async with line.turn("waits", False, 0) as aside:
            async with aside():
                await room.wait()
                order.append("room")
                if fails:
                    raise ValueError("there is none")
            order.append("waits")

    async def other() -> None:
        async with line.turn("other", False, 1):
            order.append("other")
            room.set()
            await trio.testing.wait_all_tasks_blocked()
            order.append("end")

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(waits, False)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(other)
        assert order == ["other", "room", "end", "waits"]
        with pytest.raises(ValueError, match="there is none"):
            await waits(True)
        async with line.turn("after", False, 2):  # what failed aside has left the line
            pass

    trio.run(main)


@pytest.mark.parametrize(
    ("cores", "threads", "flag", "expected"),
    [
        (1, 4, 0, 2),
        (2, 4, 0, 2),
        (3, 4, 0, 3),
        (64, 4, 0, 4),
        (64, 8, 0, 8),
        (2, 1, 0, 1),
        (2, 4, 9, 9),
        (64, 4, 1, 1),
    ],
)
def test_loads_that_compute_do_not_take_all_cores_twice(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, flag: int, expected: int
) -> None:
    monkeypatch.setattr("neptrio.repository.load_line.usable_cores", lambda: cores)
    assert places(Settings(model_load_thread_count=threads, loads_at_once=flag)) == expected
