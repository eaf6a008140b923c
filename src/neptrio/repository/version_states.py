"""The states of a model version as a table, and which other models an operation on one model concerns.

The problem: models are loaded, reloaded and unloaded while they serve, several operations at a time, on models that
depend on each other; and an operator must always be told what state a version is in and why. The choice: a
version's state changes only by the table below, which loads and withdrawals (repository.loads,
repository.withdrawal) follow. Nothing here waits, reads files or knows the time.

Rules (docs/protocol/rules.md E4, docs/protocol/observed.md 14):
 1. A load makes the new version beside the old one (which serves, as RELOADING), then swaps them, or changes the
    old version's instances in place. A failed load leaves a version that served READY.
 2. An unload takes effect at once: the version accepts no more requests, and is UNLOADING until its last accepted
    request is answered (RETIRED).
 3. A version that failed to load keeps its reason, also through an unload.
 4. An unload invalidates every load of the model that began before it. Loads of one model run one after the
    other.
 5. An ensemble serves only while its steps' models do: it is withdrawn with them, and comes back
    with them as long as it is wanted (asked for and not itself unloaded since).
 6. A model loaded only because an ensemble needs it is removed with its last wanted ensemble when
    unload_dependents asks for it; one that was asked for by name stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Protocol

UNLOADED = "unloaded"
OUTDATED = "Newer operation has been applied to the model lifecycle, current load operation is out-dated."


class State(Enum):
    """The state of a version."""

    NEW = "new"
    LOADING = "loading"
    READY = "ready"
    RELOADING = "reloading"  # serves while its successor loads
    UNLOADING = "unloading"
    FAILED = "failed"
    UNLOADED = "unloaded"

    @property
    def shown(self) -> str:
        """The state's name in the repository index."""
        return _SHOWN[self]

    @property
    def serves(self) -> bool:
        """True when requests are accepted."""
        return self in (State.READY, State.RELOADING)


_SHOWN = {
    State.NEW: "UNKNOWN",
    State.LOADING: "LOADING",
    State.READY: "READY",
    State.RELOADING: "READY",
    State.UNLOADING: "UNLOADING",
    State.FAILED: "UNAVAILABLE",
    State.UNLOADED: "UNAVAILABLE",
}


class Event(Enum):
    """What can happen to a version."""

    BEGIN = "a load begins"
    SUCCEED = "the load is done"
    FAIL = "the load failed"
    ABANDON = "the load was outdated by a newer operation"
    WITHDRAW = "it is taken out of service"
    RETIRED = "its last request is answered"


_S, _E = State, Event
# (state, event) -> next state; pairs that are missing cannot happen
TABLE: Mapping[tuple[State, Event], State] = {
    (_S.NEW, _E.BEGIN): _S.LOADING,
    (_S.FAILED, _E.BEGIN): _S.LOADING,
    (_S.UNLOADED, _E.BEGIN): _S.LOADING,
    (_S.UNLOADING, _E.BEGIN): _S.LOADING,
    (_S.READY, _E.BEGIN): _S.RELOADING,
    (_S.LOADING, _E.SUCCEED): _S.READY,
    (_S.RELOADING, _E.SUCCEED): _S.READY,
    (_S.LOADING, _E.FAIL): _S.FAILED,
    (_S.RELOADING, _E.FAIL): _S.READY,
    (_S.LOADING, _E.ABANDON): _S.UNLOADED,
    (_S.RELOADING, _E.ABANDON): _S.READY,
    (_S.READY, _E.WITHDRAW): _S.UNLOADING,
    (_S.RELOADING, _E.WITHDRAW): _S.UNLOADING,
    # withdrawn while its load still runs or after it failed: nothing was served
    (_S.LOADING, _E.WITHDRAW): _S.UNLOADED,
    (_S.FAILED, _E.WITHDRAW): _S.FAILED,
    (_S.UNLOADED, _E.WITHDRAW): _S.UNLOADED,
    (_S.UNLOADING, _E.WITHDRAW): _S.UNLOADING,
    (_S.NEW, _E.WITHDRAW): _S.UNLOADED,
    # a predecessor may end long after its version's state has changed
    (_S.UNLOADING, _E.RETIRED): _S.UNLOADED,
    (_S.LOADING, _E.RETIRED): _S.LOADING,
    (_S.READY, _E.RETIRED): _S.READY,
    (_S.RELOADING, _E.RETIRED): _S.RELOADING,
    (_S.FAILED, _E.RETIRED): _S.FAILED,
    (_S.UNLOADED, _E.RETIRED): _S.UNLOADED,
    # the load ended after its version was withdrawn
    (_S.UNLOADING, _E.FAIL): _S.UNLOADING,
    (_S.UNLOADING, _E.ABANDON): _S.UNLOADING,
    (_S.UNLOADED, _E.FAIL): _S.FAILED,
    (_S.UNLOADED, _E.ABANDON): _S.UNLOADED,
}


def after(state: State, event: Event) -> State:
    """The state that follows. Raises KeyError for what cannot happen."""
    return TABLE[state, event]


def reason_after(state: State, event: Event, old: str, given: str) -> str:
    """The reason that the index shows for the next state: why it failed, that it was unloaded, or nothing."""
    new = after(state, event)
    if new is State.UNLOADED:
        return UNLOADED
    if new is State.FAILED:
        return given if event is Event.FAIL else old
    return ""


def keeps_ready(state: State, reason: str) -> bool:
    """Strict readiness: False while the version loads, unloads or has failed."""
    return state.serves or (state is State.UNLOADED and reason == UNLOADED)


# ------------------------------------------------------------ models that depend on each other


class Standing(Protocol):
    """What orphans() needs to know of a model (repository.records.Record)."""

    @property
    def children(self) -> tuple[str, ...]:
        """The models of its steps; () for a model that is no ensemble."""

    @property
    def wanted(self) -> bool:
        """Whether it was asked for by name, or is needed by a wanted ensemble."""

    @property
    def explicit(self) -> bool:
        """Whether it was asked for by name."""


# a model -> the ensembles with a step that is that model. There may be thousands of models and few of them here, so
# that nothing below looks at all models.
Users = Mapping[str, AbstractSet[str]]


def above(users: Users, name: str) -> tuple[str, ...]:
    """The ensembles that need `name`, directly or not, the nearest ones last.

    In this order an ensemble is withdrawn before the models of its steps.
    """
    found: dict[str, None] = {}
    todo = [name]
    while todo:
        child = todo.pop()
        if child not in found:
            if child != name:
                found[child] = None
            todo += sorted(users.get(child, set()) - {name} - found.keys(), reverse=True)
    ordered: list[str] = []
    left = dict(found)
    while left:
        free = [
            one for one in left if all(other == one or other not in left for other in users.get(one, set()))
        ]
        for one in free or [next(iter(left))]:  # models in a cycle cannot serve, but this loop must end
            ordered.append(one)
            del left[one]
    return tuple(ordered)


def orphans(models: Mapping[str, Standing], users: Users, name: str) -> tuple[str, ...]:
    """The models to unload together with the ensemble `name` when unload_dependents is set: those not asked for
    by name that no other wanted model needs, recursively, ensembles before the models of their steps."""
    found: list[str] = []
    _find_orphans(models, users, name, {name}, found)
    return tuple(found)


def _find_orphans(
    models: Mapping[str, Standing], users: Users, parent: str, gone: set[str], found: list[str]
) -> None:
    for child in models[parent].children if parent in models else ():
        standing = models.get(child)
        if standing is None or standing.explicit or child in gone:
            continue
        if any(models[user].wanted and user not in gone for user in users.get(child, set())):
            continue
        gone.add(child)
        found.append(child)
        _find_orphans(models, users, child, gone, found)


def would_wait_for_itself(waits: Mapping[str, Iterable[str]], waiter: str, target: str) -> bool:
    """True when the load of `target` waits, directly or not, for the load of `waiter`."""
    seen: set[str] = set()
    todo = [target]
    while todo:
        name = todo.pop()
        if name == waiter:
            return True
        if name not in seen:
            seen.add(name)
            todo += waits.get(name, ())
    return False
