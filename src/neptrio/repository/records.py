"""What the manager remembers of each model: its versions, its last configuration, its loads under way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from neptrio.config.model_config import ConfigSource
from neptrio.errors import TritonError
from neptrio.observe.counters import ModelCounters
from neptrio.observe.totals import total
from neptrio.repository import version_states
from neptrio.repository.model import Model
from neptrio.repository.override import Folder, LoadParameters
from neptrio.repository.regroup import Regrouping
from neptrio.repository.scan import Fingerprint
from neptrio.repository.version_states import Event, State

log = logging.getLogger("neptrio.repository")


# what a row of the index is made from: version, state, reason, why the model that serves is not ready
Shown = tuple[int, State, str, str | None]


@dataclass
class Row:
    """One version of a model, as the repository index shows it."""

    state: State = State.NEW
    reason: str = ""
    model: Model | None = None  # the model that serves; None in every state in which none does
    changed: Callable[[], None] = lambda: None  # called after every change of state

    def apply(self, event: Event, reason: str = "") -> None:
        """Changes the state by the table of repository.version_states."""
        self.reason = version_states.reason_after(self.state, event, self.reason, reason)
        self.state = version_states.after(self.state, event)
        self.changed()


class Retirement:
    """A model that accepts no more requests: it answers those it has accepted, then it is finalized."""

    def __init__(self, version: int, model: Model) -> None:
        self.version = version
        self.model = model
        self.drained = trio.Event()
        self.done = trio.Event()


class Operation:
    """One load, from the call to its result."""

    def __init__(self, number: int, record: Record, parameters: LoadParameters) -> None:
        self.number = number
        self.record = record
        self.parameters = parameters
        self.explicit = False
        self.refresh = False  # an ensemble is loaded because the models of its steps have changed
        self.phase = "waiting for its turn"
        self.started = time.monotonic()
        self.error: TritonError | None = None
        self.scope = trio.CancelScope()
        self.stopped_by: TritonError | None = None  # the reason, once it is being cancelled
        self.released = trio.Event()  # set when the next load of this model may begin
        self.done = trio.Event()
        self.building: list[Model | Regrouping] = []  # made, but not serving yet
        self.discarding = 0  # of these, and threads left behind, that were not needed and have not ended yet

    def cancel(self, reason: TritonError) -> None:
        """Ends the load; its caller gets `reason` as the error."""
        if self.stopped_by is None and not self.done.is_set():
            self.stopped_by = reason
            self.scope.cancel()

    def tell(self, phase: str) -> None:
        """Notes what the load is doing now, for the progress verb."""
        self.phase = phase

    def release(self) -> None:
        """Lets the next load of this model begin."""
        self.released.set()
        if self in self.record.operations:
            self.record.operations.remove(self)

    def check(self) -> None:
        """Raises the reason when the load was invalidated. To be called before every step that others can see: a
        cancelled task still runs until it next waits."""
        if self.stopped_by is not None:
            raise self.stopped_by


@dataclass
class Record:
    """A model that is or was served, or was asked for."""

    name: str
    rows: dict[int, Row] = field(default_factory=dict)
    wanted: bool = False
    explicit: bool = False
    children: tuple[str, ...] = ()  # set by Catalog.compose()
    # of an ensemble that serves: the models that it was built with (repository.ensemble_steps)
    steps: dict[str, dict[int, Model]] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)  # the first one runs, the others wait
    retiring: list[Retirement] = field(default_factory=list)
    # of what is served: the configuration as given, the folder's state, the temporary folder of a file override
    source: ConfigSource | None = None
    fingerprint: Fingerprint | None = None
    digest: str = ""  # of that state, "" where a load call has brought configuration or files
    override: str | None = None
    folder: Folder | None = None
    place: Path | None = None  # the folder of the repository that it was loaded from, also after an unload
    chosen: Path | None = None  # that repository, where a load call has named it, until an unload
    listed: bool = False  # at the last try a repository had a folder of that name
    versionless: bool = False  # at the last try the folder had no version to serve
    lacking: bool = False  # so since then, and nobody has unloaded it: the server is not ready
    problem: str = ""  # why the folder could not be used at the last try
    polled: Fingerprint | None = None  # the folder's state at the last load, successful or not
    # version -> the statistics of its earlier loads, once those have answered everything (observe.totals)
    past: dict[int, dict[str, Any]] = field(default_factory=dict)
    # version -> the counters of a model that is loaded on demand and was put away: its next load goes on with them
    kept: dict[int, ModelCounters] = field(default_factory=dict)
    last_error: str = ""
    last_seconds: float = 0.0
    # of the index: form -> what its rows were made from, and (state, text) of each
    texts: dict[str, tuple[list[Shown], list[tuple[str, bytes]]]] = field(default_factory=dict)

    @property
    def serving(self) -> dict[int, Model]:
        """The versions that accept requests, also those with unhealthy instances."""
        return {v: row.model for v, row in self.rows.items() if row.model is not None}

    def _counters(self, version: int) -> list[ModelCounters]:
        """Those of a version that still count: of its serving model, and of those that answer what they accepted. A reload
        may have handed them on."""
        row = self.rows.get(version)
        models = [row.model] if row is not None and row.model is not None else []
        models += [one.model for one in self.retiring if one.version == version]
        found = [model.counters for model in models] + [self.kept[v] for v in self.kept if v == version]
        return list({id(counters): counters for counters in found}.values())

    def put_counters_by(self) -> None:
        """Keeps the counters of what serves for the next load of the same configuration."""
        self.kept.update({version: model.counters for version, model in self.serving.items()})

    def go_on_counting(self, version: int, model: Model, same: bool) -> None:
        """A version serves again: with the counters that were kept of it if its configuration is the same, else those join
        the sums over earlier loads."""
        counters = self.kept.pop(version, None)
        if counters is not None and same:
            counters.memory_usage = model.counters.memory_usage
            model.counters = counters
        elif counters is not None:
            past = [self.past[version]] if version in self.past else []
            self.past[version] = total([*past, counters.snapshot()])

    def answered(self) -> int:
        """Requests that ended, of all versions over all their loads."""
        counters = [model.counters for row in self.rows.values() if (model := row.model) is not None]
        counters += [one.model.counters for one in self.retiring] + list(self.kept.values())
        count = 0
        for one in {id(each): each for each in counters}.values():
            accounts = one.accounts()
            count += accounts["answered"] + accounts["failed"] + accounts["cancelled"]
        for past in self.past.values():
            count += past["inference_stats"].get("success", {}).get("count", 0)
            count += past["inference_stats"].get("fail", {}).get("count", 0)
        return count

    def since_start(self, version: int) -> dict[str, Any]:
        """The statistics of a version over all its loads."""
        past = [self.past[version]] if version in self.past else []
        return total([*past, *(counters.snapshot() for counters in self._counters(version))])

    def keep(self, retirement: Retirement) -> None:
        """Keeps the statistics of a model that is gone from `retiring`, unless others still count on in them."""
        counters, version = retirement.model.counters, retirement.version
        if counters not in self._counters(version):
            past = [self.past[version]] if version in self.past else []
            self.past[version] = total([*past, counters.snapshot()])

    def index(self, timings: bool = False) -> Iterator[dict[str, Any]]:
        """The model's rows of the repository index, sorted by version; with `timings` also when each was loaded and
        how long that took (our extension)."""
        for version, row in sorted(self.rows.items()):
            state, reason = row.state.shown, row.reason
            if row.state.serves and row.model is not None and not row.model.healthy:
                state, reason = "UNAVAILABLE", row.model.reason  # an instance is broken, or being restarted
            entry: dict[str, Any] = {"name": self.name, "version": str(version), "state": state}
            if reason:
                entry["reason"] = reason
            if timings and row.model is not None:
                entry["loaded_at"] = row.model.loaded_at_ms
                entry["load_duration_ns"] = int(row.model.load_duration_secs * 1e9)
            yield entry
        if not self.rows and self.problem:
            yield {"name": self.name, "state": "UNAVAILABLE", "reason": self.problem}

    def index_texts(self, form: str, text: Callable[[dict[str, Any]], bytes]) -> list[tuple[str, bytes]]:
        """State and `text(row)` of each row of index(). `form` names what `text` makes: rows that show the same as when
        they were last asked for in that form are not made again."""
        shown_from: list[Shown] = [
            (
                version,
                row.state,
                row.reason,
                None if row.model is None or row.model.healthy else row.model.reason,
            )
            for version, row in self.rows.items()
        ] or [(0, State.NEW, self.problem, None)]
        kept = self.texts.get(form)
        if kept is None or kept[0] != shown_from:
            kept = self.texts[form] = (shown_from, [(row["state"], text(row)) for row in self.index()])
        return kept[1]

    def progress(self) -> dict[str, Any]:
        """The answer of GET v2/repository/models/M (our extension)."""
        plain: dict[str, Any] = {"name": self.name, "versions": []}
        for entry in self.index(timings=True):
            plain["versions"].append({key: value for key, value in entry.items() if key != "name"})
        if self.operations:
            operation = self.operations[0]
            plain["loading"] = {
                "phase": operation.phase,
                "elapsed_ns": int((time.monotonic() - operation.started) * 1e9),
                "waiting": len(self.operations) - 1,
            }
        if self.last_seconds:
            plain["last_load_duration_ns"] = int(self.last_seconds * 1e9)
        if self.last_error:
            plain["last_error"] = self.last_error
        return plain
