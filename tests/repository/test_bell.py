"""The bell misses nobody who follows its rule."""

from __future__ import annotations

import trio
import trio.testing

from neptrio.repository.bell import OFTEN, REMEMBERED, Bell


def test_a_ring_between_looking_and_waiting_is_not_missed() -> None:
    async def main() -> None:
        bell = Bell()
        seen = bell.rings
        bell.ring()
        with trio.fail_after(60):
            await bell.wait(seen)
        with trio.move_on_after(0) as late:
            await bell.wait(bell.rings)
        assert late.cancelled_caught, "nobody has rung since"

    trio.run(main)


def test_a_ring_wakes_everybody_who_waits() -> None:
    async def main() -> None:
        bell, woken = Bell(), []

        async def waiter(name: int) -> None:
            await bell.wait(bell.rings)
            woken.append(name)

        async with trio.open_nursery() as nursery:
            for name in range(3):
                nursery.start_soon(waiter, name)
            await trio.testing.wait_all_tasks_blocked()
            assert woken == []
            bell.ring()
        assert sorted(woken) == [0, 1, 2]

    trio.run(main)


def test_it_remembers_for_whom_it_rang() -> None:
    bell = Bell()
    assert bell.names_since(0) == set()
    for name in ("a", "b", "a", "c"):
        bell.ring(name)
    assert [bell.names_since(seen) for seen in range(5)] == [
        {"a", "b", "c"},
        {"a", "b", "c"},
        {"a", "c"},
        {"c"},
        set(),
    ]
    for _ in range(REMEMBERED - 1):
        bell.ring("d")
    assert bell.names_since(3) == {"c", "d"}
    assert bell.names_since(2) is None, "one ring more than it remembers"


def test_who_checks_changes_is_called_before_there_are_many() -> None:
    looks: list[set[str] | None] = []
    seen = 0

    def look() -> None:
        nonlocal seen
        looks.append(bell.names_since(seen))
        seen = bell.rings

    bell = Bell(look)
    for number in range(2 * OFTEN):
        bell.ring(str(number))
    assert [len(names or ()) for names in looks] == [OFTEN, OFTEN]
