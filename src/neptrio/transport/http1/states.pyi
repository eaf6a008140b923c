# The types of cext/transport/http1/states.pyx, which says what everything does; written by tools/make_stubs.py.
from enum import IntEnum

TABLE: dict[tuple[State, Event], State]

class State(IntEnum):
    IDLE = 0
    PARTIAL = 1
    HEAD = 2
    BODY = 3
    DIRECT = 4
    LAST = 5
    REFUSED = 6
    ENDED = 7

class Event(IntEnum):
    KEPT = 0
    TAKEN_UP = 1
    BEGUN = 2
    HEAD_READ = 3
    PAST_PARSER = 4
    WHOLE = 5
    NO_MORE = 6
    REFUSAL = 7
    INPUT_ENDED = 8
