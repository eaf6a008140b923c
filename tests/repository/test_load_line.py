"""Which load is next (repository.load_line)."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from neptrio.repository.load_line import (
    DEAR_SECONDS,
    LAST,
    NO_PRIORITY,
    Entry,
    LoadLine,
    Places,
    Rank,
    next_of,
    places,
)
from neptrio.settings import Settings

ONE, TWO = Places(1, 1, 1), Places(2, 2, 2)


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
    while (found := next_of(waiting, [], ONE, ranks.__getitem__)) is not None:
        order.append(found.name)
        waiting.remove(found)
    assert order == ["high", "old", "new", "nobody"]


def test_loads_that_take_long_leave_a_place() -> None:
    def rank(name: str) -> Rank:
        return NO_PRIORITY, 0

    dear, cheap = entries("a", "b", dear=True), entries("c")
    assert next_of(dear, [], TWO, rank) is dear[0]
    assert next_of(dear[1:], dear[:1], TWO, rank) is None
    assert next_of(dear[1:] + cheap, dear[:1], TWO, rank) is cheap[0]
    assert next_of(cheap, [*dear[:1], *entries("d")], TWO, rank) is None
    assert next_of(dear, [], ONE, rank) is dear[0], "with one place there is none to leave"


def test_short_loads_leave_a_core_to_who_is_served() -> None:
    def rank(name: str) -> Rank:
        return NO_PRIORITY, 0

    places = Places(2, 1, 4)
    short, dear = entries("a", "b"), entries("c", dear=True)
    assert next_of(short, [], places, rank) is short[0]
    assert next_of(short[1:], short[:1], places, rank) is None
    assert next_of(short[1:] + dear, short[:1], places, rank) is dear[0], (
        "one that takes long has a place beside them"
    )
    assert next_of(short, dear, places, rank) is short[0]


def test_loads_that_turned_out_to_take_long_hold_up_no_short_one_and_none_that_was_expected_to() -> None:
    def rank(name: str) -> Rank:
        return NO_PRIORITY, 0

    places = Places(2, 1, 4)
    short, dear, late = entries("a", "b"), entries("c", dear=True), entries("d", "e", "f", "g")
    for entry in late:
        entry.late = True
    assert next_of(dear + short, late[:1], places, rank) is dear[0], "they do not count as expected ones"
    assert next_of(dear + short, late[:2], places, rank) is short[0], "beyond the places, where none is short"
    assert next_of(short, [*late[:2], *short[1:]], places, rank) is None
    assert next_of(short, late, places, rank) is None, "there is an end"
    assert next_of(short, late[:2], TWO, rank) is None, "the operator's number holds"


def test_a_load_that_turns_out_to_take_long_holds_nobody_up() -> None:
    line = LoadLine(Places(2, 1, 4), lambda name: (NO_PRIORITY, 0))
    begun: dict[str, float] = {}
    all_begun = trio.Event()

    async def load(name: str) -> None:
        async with line.turn(name, False, len(begun)):
            begun[name] = trio.current_time() - start
            if name == "last":
                all_begun.set()
            elif name.startswith("long"):
                await all_begun.wait()

    async def main() -> None:
        nonlocal start
        start = trio.current_time()
        async with trio.open_nursery() as nursery:
            for name in ("long", "longer", "short", "last"):
                nursery.start_soon(load, name)
                await trio.testing.wait_all_tasks_blocked()

    start = 0.0
    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert (
        begun["long"] == 0
        and DEAR_SECONDS <= begun["longer"] <= begun["short"] <= begun["last"] < 4 * DEAR_SECONDS
    )


def test_turns_are_given_up_and_who_leaves_the_line_takes_none() -> None:
    priorities = {"a": 3, "b": 2, "c": 1, "d": 4}
    line = LoadLine(ONE, lambda name: (priorities[name], 0))
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
    line = LoadLine(ONE, lambda name: (NO_PRIORITY, 0))
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
        (1, 4, 0, Places(2, 1, 4)),
        (2, 4, 0, Places(2, 1, 4)),
        (3, 4, 0, Places(3, 2, 4)),
        (64, 4, 0, Places(4, 4, 4)),
        (64, 8, 0, Places(8, 8, 8)),
        (2, 1, 0, Places(1, 1, 1)),
        (2, 4, 9, Places(9, 9, 9)),
        (64, 4, 1, Places(1, 1, 1)),
    ],
)
def test_loads_that_compute_do_not_take_all_cores_twice(
    monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, flag: int, expected: Places
) -> None:
    monkeypatch.setattr("neptrio.repository.load_line.usable_cores", lambda: cores)
    assert places(Settings(model_load_thread_count=threads, loads_at_once=flag)) == expected
