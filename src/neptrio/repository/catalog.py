"""What is served now: a record for every model, and the one place where models are looked up by name.

Nothing here changes what is served: repository.loading brings models in, repository.withdrawal takes them out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import trio

from neptrio.errors import InvalidArgument, NotFound, TritonError, Unavailable
from neptrio.repository import lifecycle, scan
from neptrio.repository.bell import Bell
from neptrio.repository.model import Model
from neptrio.repository.places import Places
from neptrio.repository.records import Record, Row
from neptrio.scheduling.base import Scheduler
from neptrio.settings import Settings


def version_number(version: str) -> int:
    """The number of a version named in a request. Raises InvalidArgument for text that is no number."""
    try:  # int() also reads '1_0' and digits of other scripts
        if len(version) < 19 and version.isascii() and "_" not in version:
            return int(version)
    except ValueError:
        pass
    raise InvalidArgument(
        f"failed to get model version from specified version string '{version}' (details: stol), version "
        "should be an integral value > 0"
    )


def not_above_zero(version: str) -> InvalidArgument:
    """The error for a version number of 0 or below, which no version has."""
    return InvalidArgument(
        f"invalid model version specified '{version}' , version should be an integral value > 0"
    )


class Catalog:
    """The records of all models that are or were served, or were asked for. Trio thread only."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.places = Places(settings)
        self.records: dict[str, Record] = {}
        self.latest: dict[str, Model] = {}  # model -> its highest version that serves
        self.readiness = Bell()  # rung when the state or the health of a version changes
        self.nursery: trio.Nursery | None = None  # runs loads and retirements while the server runs

    def lookup(self, name: str, version: str = "") -> Model:
        """The ready version with that number, or the highest one. Errors are those of docs/protocol/features.md A1."""
        if not version:
            model = self.latest.get(name)
            if model is not None:
                if not model.ready:
                    raise Unavailable(
                        f"Request for unknown model: '{name}' version {model.version} is not at ready state"
                    )
                return model
            if self._rows(name) or self._versionless(name):
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        number = version_number(version)
        if number <= 0:
            raise not_above_zero(version)
        versions = self._rows(name)
        if not versions and not self._versionless(name):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        row = versions.get(number)
        if row is None:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if row.model is None or not row.model.ready:
            raise Unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        return row.model

    def lookup_step(self, name: str, version: str) -> Model:
        """lookup() for a step of an accepted ensemble request. Also finds a model that was withdrawn together with
        the ensemble: it serves the ensemble's requests to their end."""
        try:
            return self.lookup(name, version)
        except TritonError:
            record = self.records.get(name)
            for retirement in reversed(record.retiring if record is not None else []):
                if not retirement.drained.is_set() and version in ("", str(retirement.version)):
                    return retirement.model
            raise

    def _rows(self, name: str) -> dict[int, Row]:
        record = self.records.get(name)
        return record.rows if record is not None else {}

    def _versionless(self, name: str) -> bool:
        record = self.records.get(name)
        return record is not None and record.versionless

    def ready_versions(self, name: str) -> list[int]:
        """Ready version numbers of a model, ascending."""
        rows = self._rows(name)
        return sorted(v for v, row in rows.items() if row.model is not None and row.model.ready)

    def ready_models(self) -> list[Model]:
        """Every ready version, sorted by name and version number."""
        return [
            row.model
            for name in sorted(self.records)
            for _, row in sorted(self.records[name].rows.items())
            if row.model is not None and row.model.ready
        ]

    def all_ready(self) -> bool:
        """Strict readiness: True when no version is loading, unloading or failed."""
        return all(
            lifecycle.keeps_ready(row.state, row.reason) and (row.model is None or row.model.ready)
            for record in self.records.values()
            for row in record.rows.values()
        )

    def index(
        self, ready: bool, timings: bool = False, model_dirs: Mapping[str, list[Path]] | None = None
    ) -> list[dict[str, Any]]:
        """The rows of the repository index, sorted by name and version, only of models with a folder in a repository.

        `model_dirs` is what places.model_dirs() returned on another thread just before.
        """
        return list(self.index_rows(ready, timings, model_dirs))

    def index_rows(
        self, ready: bool, timings: bool = False, model_dirs: Mapping[str, list[Path]] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The rows of index(), each made when it is asked for."""
        for name, folders in (self.places.model_dirs() if model_dirs is None else model_dirs).items():
            record = self.records.get(name)
            if len(folders) > 1 and not (record is not None and record.rows):
                found: list[dict[str, Any]] = [
                    {"name": name, "state": "UNAVAILABLE", "reason": scan.DUPLICATE}
                ]
            else:
                found = list(record.index(timings)) if record is not None else []
            for row in found or [{"name": name}]:
                if not ready or row.get("state") == "READY":
                    yield row

    async def progress(self, name: str) -> dict[str, Any]:
        """Versions, the load under way and the last error of a model. Raises NotFound."""
        record = self.records.get(name)
        if record is None:
            if name not in await self.places.listed():
                raise NotFound(f"Request for unknown model: '{name}' is not found")
            return {"name": name, "versions": []}
        return record.progress()

    def flush(self) -> None:
        """Shutdown has begun: schedulers send their batches without waiting for more requests."""
        for scheduler in self._ready_schedulers():
            scheduler.flush()

    def live_sequences(self) -> int:
        """How many sequences of all models are live."""
        return sum(scheduler.live_sequences() for scheduler in self._ready_schedulers())

    def _ready_schedulers(self) -> list[Scheduler]:
        """The schedulers of all ready models."""
        return [model.scheduler for model in self.ready_models() if model.scheduler is not None]

    def standings(self) -> dict[str, lifecycle.Standing]:
        """What the plans in repository.lifecycle need to know of every model."""
        return {name: record.standing for name, record in self.records.items()}
