"""The states of a model that is loaded on demand, as a table, and what a request for it is to do.

The problem: requests, operators, ensembles and the idle time all load such a model or take it away, in any order, and a
load may fail or be overtaken by a newer operation. The choice: what is known of the model is a state that changes only by
the table below, and what a request does follows from the state and the time. Nothing here waits or reads a clock.

Rules:
 1. A request loads a model that is known or was put away, waits for one that loads, and is served by one that is loaded.
 2. A failed load is tried again by the first request after its back-off, which doubles with each failure in a row.
    Until then requests are refused, with the reason.
 3. A reload that fails or is overtaken leaves a model that serves as it is. One that is needed to serve again is put off as
    any load that fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

FIRST_BACKOFF_NS = 1_000_000_000
LONGEST_BACKOFF_NS = 60_000_000_000


class State(Enum):
    """What is known of the model."""

    KNOWN = "on demand"  # it has a folder, and was not loaded yet
    LOADING = "loading"
    READY = "loaded"
    AWAY = "put away"  # it was loaded
    FAILED = "failed"  # its last load


class Event(Enum):
    """What can happen to it."""

    BEGIN = "a load begins"
    LOADED = "a load is done"
    FAIL = "a load has failed"
    OUTDATE = "a load was ended by a newer operation"
    WITHDRAW = "it is taken out of service"


class Act(Enum):
    """What a request for it does."""

    SERVE = "it is served"
    WAIT = "it waits for the load under way"
    LOAD = "it begins a load and waits"
    REFUSE = "it is refused until the back-off has passed"


_S, _E = State, Event
TABLE: Mapping[tuple[State, Event], State] = {
    (_S.KNOWN, _E.BEGIN): _S.LOADING,
    (_S.AWAY, _E.BEGIN): _S.LOADING,
    (_S.FAILED, _E.BEGIN): _S.LOADING,
    (_S.LOADING, _E.BEGIN): _S.LOADING,  # a second load waits behind the first
    (_S.READY, _E.BEGIN): _S.READY,  # a reload: it serves meanwhile
    (_S.LOADING, _E.LOADED): _S.READY,
    (_S.READY, _E.LOADED): _S.READY,
    (_S.LOADING, _E.FAIL): _S.FAILED,
    (_S.READY, _E.FAIL): _S.READY,
    (_S.LOADING, _E.OUTDATE): _S.AWAY,
    (_S.READY, _E.OUTDATE): _S.READY,
    (_S.READY, _E.WITHDRAW): _S.AWAY,
    (_S.LOADING, _E.WITHDRAW): _S.LOADING,  # its load is outdated, which it says itself
    (_S.KNOWN, _E.WITHDRAW): _S.KNOWN,
    (_S.AWAY, _E.WITHDRAW): _S.AWAY,
    (_S.FAILED, _E.WITHDRAW): _S.FAILED,
    # the model became known while a load of it was under way, or was withdrawn during a reload
    (_S.KNOWN, _E.LOADED): _S.READY,
    (_S.KNOWN, _E.FAIL): _S.FAILED,
    (_S.KNOWN, _E.OUTDATE): _S.KNOWN,
    (_S.AWAY, _E.LOADED): _S.READY,
    (_S.AWAY, _E.FAIL): _S.FAILED,
    (_S.AWAY, _E.OUTDATE): _S.AWAY,
    (_S.FAILED, _E.LOADED): _S.READY,
    (_S.FAILED, _E.FAIL): _S.FAILED,
    (_S.FAILED, _E.OUTDATE): _S.FAILED,
}

_ACTS = {
    State.KNOWN: Act.LOAD,
    State.AWAY: Act.LOAD,
    State.LOADING: Act.WAIT,
    State.READY: Act.SERVE,
}


def backoff_ns(failures: int) -> int:
    """How long after so many failures in a row a load is not tried again."""
    return min(FIRST_BACKOFF_NS << min(max(failures, 1) - 1, 16), LONGEST_BACKOFF_NS)


@dataclass(slots=True)
class Standing:
    """Where a model stands."""

    state: State = State.KNOWN
    failures: int = 0  # in a row
    retry_ns: int = 0  # when a load may be tried again
    why: str = ""  # its last load has failed, or it was put away
    # how many models are in each state: those that count() was told of
    counted: Counter[State] = field(default_factory=Counter, repr=False, compare=False)

    def count(self, counted: Counter[State]) -> None:
        """Counts the model from now on among those of `counted`: there may be thousands, which nobody wants to look at to
        tell how many stand where."""
        self.counted = counted
        counted[self.state] += 1

    def leave(self) -> None:
        """There is no such model any more."""
        self.counted[self.state] -= 1
        self.counted = Counter()

    def apply(self, event: Event, now_ns: int, why: str = "") -> None:
        """Changes the state by the table."""
        before, self.state = self.state, TABLE[self.state, event]
        self.counted[before] -= 1
        self.counted[self.state] += 1
        if event is Event.LOADED:
            self.failures, self.retry_ns, self.why = 0, 0, ""
        elif self.state is State.FAILED and event is Event.FAIL:
            self.put_off(now_ns, why)
        elif self.state is State.AWAY and (before is not State.AWAY or why):
            self.why = why

    def put_off(self, now_ns: int, why: str) -> int:
        """A load has failed, and is not to be tried again before its back-off has passed. How long that is."""
        self.failures += 1
        wait = backoff_ns(self.failures)
        self.retry_ns, self.why = now_ns + wait, why
        return wait

    def act(self, now_ns: int) -> Act:
        """What a request for the model does now."""
        if self.state is State.FAILED:
            return Act.LOAD if now_ns >= self.retry_ns else Act.REFUSE
        return _ACTS[self.state]

    def forgive(self) -> None:
        """What a load has failed for is no longer so: the next request tries again."""
        self.failures, self.retry_ns = 0, 0

    @property
    def ready(self) -> bool:
        """Whether a request would be served, perhaps after a load: not if the last load has failed."""
        return self.state is not State.FAILED

    @property
    def reason(self) -> str:
        """What the repository index shows of a model that is not loaded."""
        if self.state is State.FAILED:
            return self.why
        return f"{self.state.value}: {self.why}" if self.why else self.state.value
