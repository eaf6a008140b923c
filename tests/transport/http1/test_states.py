"""The states of an HTTP/1.1 connection are one table; what the wire shows of it is in test_http1 and test_fast_path."""

from __future__ import annotations

from neptrio.transport.http1.states import TABLE, Event, State

READING = [state for state in State if state < State.LAST]


def reached(first: State) -> set[State]:
    """The states to which a state may lead, itself included."""
    found, new = {first}, [first]
    while new:
        state = new.pop()
        more = {to for (of, _), to in TABLE.items() if of == state} - found
        found |= more
        new += more
    return found


def test_every_state_is_reached_and_nothing_leads_back_from_the_last_request() -> None:
    assert reached(State.IDLE) == set(State)
    assert reached(State.LAST) == {State.LAST, State.ENDED}, "a last request cannot be refused any more"
    assert reached(State.REFUSED) == {State.REFUSED, State.ENDED}
    assert reached(State.ENDED) == {State.ENDED}


def test_a_connection_can_end_in_every_state() -> None:
    for state in State:
        assert TABLE[state, Event.INPUT_ENDED] == State.ENDED
    for state in READING:
        assert TABLE[state, Event.REFUSAL] == State.REFUSED
        assert TABLE[state, Event.NO_MORE] == State.LAST


def test_a_request_is_begun_between_requests_alone() -> None:
    """But for a head that is read again without the upgrade that it offers."""
    assert {of for (of, event), _ in TABLE.items() if event == Event.BEGUN} == {State.IDLE, State.BODY}
    assert {of for (of, event), _ in TABLE.items() if event == Event.KEPT} == {State.IDLE}
    assert {to for (_, event), to in TABLE.items() if event == Event.WHOLE} == {State.IDLE}
