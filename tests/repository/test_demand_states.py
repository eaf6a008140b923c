"""The states of models that are loaded on demand (repository.demand_states)."""

from __future__ import annotations

import itertools

import pytest

from neptrio.repository.demand_states import (
    FIRST_BACKOFF_NS,
    LONGEST_BACKOFF_NS,
    TABLE,
    Act,
    Event,
    Standing,
    State,
    backoff_ns,
)


def test_every_event_is_foreseen_in_every_state() -> None:
    impossible = set(itertools.product(State, Event)) - TABLE.keys()
    assert impossible == set()


@pytest.mark.parametrize(
    ("events", "state", "act"),
    [
        ([], State.KNOWN, Act.LOAD),
        ([Event.BEGIN], State.LOADING, Act.WAIT),
        ([Event.BEGIN, Event.LOADED], State.READY, Act.SERVE),
        ([Event.BEGIN, Event.FAIL], State.FAILED, Act.REFUSE),
        ([Event.BEGIN, Event.LOADED, Event.WITHDRAW], State.AWAY, Act.LOAD),
        ([Event.BEGIN, Event.WITHDRAW, Event.OUTDATE], State.AWAY, Act.LOAD),
        ([Event.BEGIN, Event.LOADED, Event.BEGIN, Event.FAIL], State.READY, Act.SERVE),
        ([Event.BEGIN, Event.LOADED, Event.BEGIN, Event.OUTDATE], State.READY, Act.SERVE),
        ([Event.BEGIN, Event.FAIL, Event.BEGIN], State.LOADING, Act.WAIT),
        ([Event.BEGIN, Event.LOADED, Event.WITHDRAW, Event.BEGIN], State.LOADING, Act.WAIT),
    ],
)
def test_ways_through_the_table(events: list[Event], state: State, act: Act) -> None:
    standing = Standing()
    for event in events:
        standing.apply(event, 0, "why")
    assert (standing.state, standing.act(0)) == (state, act)


def test_a_failed_load_is_tried_again_after_a_back_off_that_doubles() -> None:
    standing, now = Standing(), 5
    for failures in range(1, 12):
        standing.apply(Event.BEGIN, now)
        standing.apply(Event.FAIL, now, "broken")
        assert not standing.ready and standing.reason == "broken"
        wait = backoff_ns(failures)
        assert wait == min(FIRST_BACKOFF_NS * 2 ** (failures - 1), LONGEST_BACKOFF_NS)
        assert standing.act(now + wait - 1) is Act.REFUSE
        now += wait
        assert standing.act(now) is Act.LOAD
    standing.apply(Event.BEGIN, now)
    standing.apply(Event.LOADED, now)
    assert standing.ready and standing.failures == 0
    standing.apply(Event.WITHDRAW, now)
    standing.apply(Event.BEGIN, now)
    standing.apply(Event.FAIL, now, "again")
    assert standing.retry_ns == now + FIRST_BACKOFF_NS, "a load that went well begins the series anew"


def test_the_reason_of_a_model_that_was_put_away_is_kept() -> None:
    standing = Standing()
    assert standing.reason == "on demand"
    standing.apply(Event.BEGIN, 0)
    standing.apply(Event.LOADED, 0)
    standing.apply(Event.WITHDRAW, 0, "idle for 5 s")
    assert standing.reason == "put away: idle for 5 s"
    standing.apply(Event.OUTDATE, 0)
    assert standing.reason == "put away: idle for 5 s", "a load that was ended says nothing new"
