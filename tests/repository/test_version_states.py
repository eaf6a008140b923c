"""The lifecycle table and the plans for models that depend on each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import pytest

from neptrio.repository import version_states
from neptrio.repository.version_states import TABLE, UNLOADED, Event, State, after, reason_after

LOADS = (Event.SUCCEED, Event.FAIL, Event.ABANDON)


def test_every_state_is_reached_and_left() -> None:
    reached = {State.NEW}
    while True:
        more = {TABLE[pair] for pair in TABLE if pair[0] in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == set(State)
    assert {state for state, _ in TABLE} == set(State)


@pytest.mark.slow
def test_whatever_happens_in_whatever_order_is_in_the_table() -> None:
    """All sequences of six happenings as the manager lets them follow each other: one load at a time."""
    happenings = ("begin", *LOADS, Event.WITHDRAW, Event.RETIRED)
    seen = set()
    for sequence in itertools.product(happenings, repeat=6):
        state, loading, reason = State.NEW, False, ""
        for happening in sequence:
            if happening == "begin":
                if loading:
                    continue
                event, loading = Event.BEGIN, True
            elif happening in LOADS:
                if not loading:
                    continue
                event, loading = happening, False
            elif happening is Event.WITHDRAW and loading:
                # an unload outdates the load first
                state, reason = after(state, Event.ABANDON), reason_after(state, Event.ABANDON, reason, "why")
                event, loading = Event.WITHDRAW, False
            else:
                event = happening
                if event is Event.RETIRED and state is State.NEW:
                    continue
            served = state.serves
            reason = reason_after(state, event, reason, "why")
            state = after(state, event)
            seen.add(state)
            if served and event in (Event.BEGIN, Event.FAIL, Event.ABANDON, Event.RETIRED):
                assert state.serves, "only a withdrawal takes a version out of service"
            assert (reason == UNLOADED) == (state is State.UNLOADED)
            assert (reason == "why") == (state is State.FAILED)
            assert loading == (state in (State.LOADING, State.RELOADING))
    assert seen == set(State) - {State.NEW} | ({State.NEW} & seen)


@pytest.mark.parametrize("pair", [(State.NEW, Event.SUCCEED), (State.READY, Event.SUCCEED)])
def test_what_cannot_happen_is_refused(pair: tuple[State, Event]) -> None:
    with pytest.raises(KeyError):
        after(*pair)


def test_readiness_and_names() -> None:
    assert [s.shown for s in State] == [
        "UNKNOWN", "LOADING", "READY", "READY", "UNLOADING", "UNAVAILABLE", "UNAVAILABLE"]  # fmt: skip
    assert [s for s in State if version_states.keeps_ready(s, UNLOADED if s is State.UNLOADED else "")] == [
        State.READY, State.RELOADING, State.UNLOADED]  # fmt: skip


@dataclass
class Standing:
    """A model."""

    children: tuple[str, ...] = ()
    wanted: bool = False
    explicit: bool = False


def users(models: Mapping[str, Standing]) -> dict[str, set[str]]:
    """Model -> the ensembles that have it as a child."""
    found: dict[str, set[str]] = {}
    for name, standing in models.items():
        for child in standing.children:
            found.setdefault(child, set()).add(name)
    return found


MODELS = {
    "a": Standing(wanted=True),
    "b": Standing(wanted=True, explicit=True),
    "inner": Standing(("a", "b"), wanted=True),
    "outer": Standing(("inner", "a"), wanted=True, explicit=True),
}


def test_ensembles_go_before_the_models_of_their_steps() -> None:
    assert version_states.above(users(MODELS), "a") == ("outer", "inner")
    assert version_states.above(users(MODELS), "inner") == ("outer",)
    assert version_states.above(users(MODELS), "outer") == ()
    assert version_states.above({"y": {"x"}, "x": {"y"}}, "x") == ("y",)


def test_orphans_are_implicit_and_needed_by_nobody_else() -> None:
    assert version_states.orphans(MODELS, users(MODELS), "outer") == ("inner", "a")
    assert version_states.orphans(MODELS, users(MODELS), "inner") == (), "outer needs a"
    assert version_states.orphans(MODELS, users(MODELS), "a") == ()
    unwanted = {**MODELS, "outer": Standing(("inner", "a"))}
    assert version_states.orphans(unwanted, users(unwanted), "inner") == ("a",)


def test_waiting_in_a_circle_is_seen() -> None:
    assert version_states.would_wait_for_itself({"b": ["c"], "c": ["a"]}, "a", "b")
    assert not version_states.would_wait_for_itself({"b": ["c"], "c": ["d"]}, "a", "b")
    assert version_states.would_wait_for_itself({}, "a", "a")
