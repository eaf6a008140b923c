"""Which models are put away for room (repository.putting_away)."""

from __future__ import annotations

import pytest

from neptrio.repository.putting_away import Hold, Holder, choose, hopeful, idle, who_holds


def names(holders: list[Holder]) -> list[str]:
    return [holder.name for holder in holders]


def test_what_was_used_longest_ago_goes_first() -> None:
    holders = [Holder("new", 10, 30), Holder("old", 10, 10), Holder("older", 10, 5), Holder("none", 0, 1)]
    assert names(choose(holders, 5)) == ["older"]
    assert names(choose(holders, 11)) == ["older", "old"]
    assert names(choose(holders, 30)) == ["older", "old", "new"]
    assert choose(holders, 0) == []


def test_nothing_goes_where_it_would_not_do() -> None:
    holders = [Holder("a", 10, 1), Holder("kept", 10, 1, Hold.KEPT)]
    assert choose(holders, 11) == []
    assert not hopeful(holders, 11) and hopeful(holders, 10)


@pytest.mark.parametrize("hold", Hold)
def test_what_is_held_stays(hold: Hold) -> None:
    holders = [Holder("a", 10, 2), Holder("held", 10, 1, hold)]
    assert names(choose(holders, 10)) == ["a"]
    assert hopeful(holders, 20) is hold.passes
    assert names(choose(holders, 20)) == (["a"] if hold.passes else []), "the rest may come soon"


@pytest.mark.parametrize("hold", [None, *Hold])
def test_steps_that_an_ensemble_waits_with_stay_once_they_are_loaded(hold: Hold | None) -> None:
    holders = [Holder("step", 10, 1, hold)]
    assert hopeful(holders, 10, {"step"}) is (hold in (Hold.LOADING, Hold.LEAVING, Hold.GIVEN_UP))


def test_an_ensemble_goes_before_its_steps() -> None:
    ensemble = Holder("e", 0, 20, steps=True)
    step = Holder("s", 10, 1, needed_by=("e",))
    assert names(choose([step, ensemble], 10)) == ["e", "s"]
    assert names(choose([step, ensemble, Holder("a", 10, 30)], 20)) == ["e", "s", "a"]
    busy = Holder("e", 0, 20, Hold.REQUESTS, steps=True)
    assert choose([step, busy], 10) == [] and hopeful([step, busy], 10)
    kept = Holder("e", 0, 20, Hold.KEPT, steps=True)
    assert choose([step, kept], 10) == [] and not hopeful([step, kept], 10)


def test_a_step_of_a_kept_ensemble_of_ensembles_stays() -> None:
    holders = [
        Holder("top", 0, 3, Hold.KEPT, steps=True),
        Holder("middle", 0, 2, needed_by=("top",), steps=True),
        Holder("step", 10, 1, needed_by=("middle",)),
    ]
    assert not hopeful(holders, 1)


def test_what_is_idle() -> None:
    assert idle(Holder("idle", 1, 1000), 2.0, 3000)
    assert not idle(Holder("used", 1, 1001), 2.0, 3000)
    assert not idle(Holder("busy", 1, 0, Hold.REQUESTS), 2.0, 3000)
    assert not idle(Holder("step", 1, 0, needed_by=("e",)), 2.0, 3000)


def test_who_holds_the_memory() -> None:
    holders = [
        Holder("a", 3 << 20, 0, Hold.KEPT),
        Holder("b", 2 << 30, 0),
        Holder("c", 1 << 20, 0, needed_by=("e",)),
        Holder("d", 1 << 19, 0),
        Holder("e", 0, 0),
    ]
    assert (
        who_holds(holders) == "'b' 2.0 GiB, 'a' 3.0 MiB (keep_loaded), 'c' 1.0 MiB (step of 'e') and 1 more"
    )
    assert who_holds([]) == "nobody"
