"""The notifier misses nobody who follows its rule."""

from __future__ import annotations

import trio
import trio.testing

from neptrio.repository.notifier import OFTEN, REMEMBERED, Notifier


def test_a_change_between_looking_and_waiting_is_not_missed() -> None:
    async def main() -> None:
        notifier = Notifier()
        seen = notifier.notified
        notifier.notify()
        with trio.fail_after(60):
            await notifier.wait(seen)
        with trio.move_on_after(0) as late:
            await notifier.wait(notifier.notified)
        assert late.cancelled_caught, "nothing has changed since"

    trio.run(main)


def test_a_change_wakes_everybody_who_waits() -> None:
    async def main() -> None:
        notifier, woken = Notifier(), []

        async def waiter(name: int) -> None:
            await notifier.wait(notifier.notified)
            woken.append(name)

        async with trio.open_nursery() as nursery:
            for name in range(3):
                nursery.start_soon(waiter, name)
            await trio.testing.wait_all_tasks_blocked()
            assert woken == []
            notifier.notify()
        assert sorted(woken) == [0, 1, 2]

    trio.run(main)


def test_it_remembers_what_has_changed() -> None:
    notifier = Notifier()
    assert notifier.names_since(0) == set()
    for name in ("a", "b", "a", "c"):
        notifier.notify(name)
    assert [notifier.names_since(seen) for seen in range(5)] == [
        {"a", "b", "c"},
        {"a", "b", "c"},
        {"a", "c"},
        {"c"},
        set(),
    ]
    for _ in range(REMEMBERED - 1):
        notifier.notify("d")
    assert notifier.names_since(3) == {"c", "d"}
    assert notifier.names_since(2) is None, "one change more than it remembers"


def test_who_checks_changes_is_called_before_there_are_many() -> None:
    looks: list[set[str] | None] = []
    seen = 0

    def look() -> None:
        nonlocal seen
        looks.append(notifier.names_since(seen))
        seen = notifier.notified

    notifier = Notifier(look)
    for number in range(2 * OFTEN):
        notifier.notify(str(number))
    assert [len(names or ()) for names in looks] == [OFTEN, OFTEN]
