"""The states of an HTTP/1.1 connection: one table, (state, event) to state.

The problem: whether a connection reads, what it reads, and how it ends was spread over flags, of which only some
combinations had a meaning. The choice: one state, which changes by this table alone, as in h11.

Rules:
 1. An event that the table does not have in a state changes nothing: the parser may go on with bytes behind a last request.
 2. From LAST on no request is begun, and nothing leads back. ENDED is the end.
 3. What is no state: that the next answer is the last one (`draining`), that workers are at it (`paused`), and where
    bytes wait (`partial`, `later`, `direct`).
"""

cdef enum:
    STATES = 8
    EVENTS = 9

TABLE = {
    (State.IDLE, Event.KEPT): State.PARTIAL,
    (State.PARTIAL, Event.TAKEN_UP): State.IDLE,
    (State.IDLE, Event.BEGUN): State.HEAD,
    (State.HEAD, Event.HEAD_READ): State.BODY,
    (State.BODY, Event.BEGUN): State.HEAD,    # a head that offers an upgrade is read again, without the offer
    (State.BODY, Event.PAST_PARSER): State.DIRECT,
    (State.BODY, Event.WHOLE): State.IDLE,
    (State.DIRECT, Event.WHOLE): State.IDLE,
    **{(state, Event.NO_MORE): State.LAST for state in State if state < State.LAST},
    **{(state, Event.REFUSAL): State.REFUSED for state in State if state < State.LAST},
    **{(state, Event.INPUT_ENDED): State.ENDED for state in State},
}  # type: dict[tuple[State, Event], State]

cdef unsigned char[STATES][EVENTS] _NEXT


def _fill():
    for state in State:
        for event in Event:
            _NEXT[state][event] = TABLE.get((state, event), state)


_fill()


cdef State after(State state, Event event) noexcept:
    """The state that follows."""
    return <State>_NEXT[<int>state][<int>event]
