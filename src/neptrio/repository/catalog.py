"""What is served now: a record for every model, and the one place where models are looked up by name.

Nothing here changes what is served: repository.loads brings models in, repository.withdrawal takes them out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import trio

from neptrio.codec.json_reader import too_long
from neptrio.config import version_labels
from neptrio.errors import Code, InvalidArgument, NotFound, TritonError, Unavailable, meant
from neptrio.limits import LONGEST_NAME, shown
from neptrio.repository import scan, version_states
from neptrio.repository.budget import Budget
from neptrio.repository.demand import Demand
from neptrio.repository.model import Model
from neptrio.repository.model_names import Change, Names, numbers
from neptrio.repository.notifier import Notifier
from neptrio.repository.records import Record, Row
from neptrio.repository.repositories import Repositories
from neptrio.scheduling.base import Scheduler
from neptrio.settings import Settings

WHY = ", the log and the repository index say why"


def version_number(version: str) -> int:
    """The number of a version named in a request. Raises InvalidArgument for text that is no number."""
    try:  # int() also reads '1_0' and digits of other scripts
        if len(version) <= 20 and version.isascii() and "_" not in version:
            number = int(version)
            if abs(number) < version_labels.HIGHEST:
                return number
    except ValueError:
        pass
    raise InvalidArgument(version_text(version))


def version_text(version: str) -> str:
    """The text of the error for what is no number of a version."""
    return (
        f"failed to get model version from specified version string '{shown(version)}' (details: stol), version "
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
        self.repositories = Repositories(settings)
        self.records: dict[str, Record] = {}
        self.users: dict[str, set[str]] = {}  # model -> the ensembles that have it as a child
        self.latest: dict[str, Model] = {}  # model -> its highest version that serves
        self.readiness = Notifier(
            self.all_ready
        )  # notified when the state or the health of a version changes
        self._judged = 0  # how often it had been notified when all_ready() was asked last
        self._unready: set[str] = set()  # models that were not ready then
        self.unopened = ""  # why the repositories could not be listed, "" where they could
        self.names = Names(self.readiness.notify)  # labels of versions, aliases of models
        self.demand: Demand | None = None  # knows the models that are loaded when they are asked for
        self.budget: Budget | None = None  # what they may hold
        self.nursery: trio.Nursery | None = None  # runs loads and retirements while the server runs

    def lack(self, record: Record, lacking: bool) -> None:
        """Whether the model has no version to serve, though it should."""
        if record.lacking != lacking:
            record.lacking = lacking
            self.readiness.notify(record.name)

    def _unknown(self, name: str) -> TritonError:
        """The error for a model that there is not; a name that none can have is refused as such.

        The nearest name is told where clients have no tokens, which may keep names from them.
        """
        if len(name) > LONGEST_NAME:
            return too_long("model", name)
        record = self.records.get(name)
        if record is not None and record.listed and record.problem:
            said = f"; it failed to load{WHY}"
        else:
            said = "" if self._settings.auth_config is not None else meant(name, self.latest)
        return NotFound(f"Request for unknown model: '{shown(name)}' is not found{said}")

    def lookup(self, name: str, version: str = "") -> Model:
        """The ready version with that number, or the highest one. Errors are those of docs/protocol/features.md A1."""
        if not version:
            model = self.latest.get(name) or self.latest.get(self.own_name(name))
            if model is not None:
                if not model.ready:
                    raise Unavailable(
                        f"Request for unknown model: '{shown(name)}' version {model.version} is not at ready state"
                    )
                return model
            name = self.own_name(name)
            self._refuse_absent(name)
            if self._rows(name) or self._versionless(name):
                failed = any(row.state is version_states.State.FAILED for row in self._rows(name).values())
                why = f"; it failed to load{WHY}" if failed else ""
                raise NotFound(f"Request for unknown model: '{shown(name)}' has no available versions{why}")
            raise self._unknown(name)
        for what, text in (("model", name), ("version", version)):
            if len(text) > LONGEST_NAME:
                raise too_long(what, text)
        if len(version) < 19 and version.isdigit() and version.isascii():
            number = int(version)
        else:
            name = self.own_name(name)
            number = self.number(name, version)
        if number <= 0:
            raise not_above_zero(version)
        self._refuse_absent(name)
        versions = self._rows(name)
        if not versions and not self._versionless(name):
            own = self.own_name(name)
            if own != name:
                return self.lookup(own, version)
            raise self._unknown(name)
        row = versions.get(number)
        if row is None:
            there = [n for n, of in versions.items() if of.model is not None and of.model.ready]
            said = f", it has {numbers(there)}" if there and self._settings.auth_config is None else ""
            raise NotFound(f"Request for unknown model: '{shown(name)}' version {number} is not found{said}")
        if row.model is None or not row.model.ready:
            raise Unavailable(
                f"Request for unknown model: '{shown(name)}' version {number} is not at ready state"
            )
        return row.model

    def own_name(self, name: str) -> str:
        """The model that requests for that name are for: another one if the name is an alias."""
        model = self.names.aliased.get(name)
        return name if model is None or self.is_model(name) else model

    def is_model(self, name: str) -> bool:
        """Whether that is a model's own name, as far as is known without a look at the repositories."""
        record = self.records.get(name)
        if record is not None and (record.rows or record.listed):
            return True
        return self.demand is not None and name in self.demand.known

    def number(self, name: str, version: str) -> int:
        """The number of a version that a request for a model names, by its own name, by number or label. Raises
        InvalidArgument for a text that is neither, and TritonError NO_LABEL for a label that the model does not have."""
        if not version_labels.is_label(version):
            return version_number(version)
        number = self.names.label(name, version)
        if number is not None:
            return number
        text = version_text(version)
        labels = self.names.labels(name)
        if labels and self._settings.auth_config is None:  # tokens may keep them from whoever asks
            known = ", ".join(f"{label} ({number})" for label, number in sorted(labels.items()))
            text += (
                f" or a label: model '{shown(name)}' has the labels {known} and the versions "
                f"{numbers(self.versions(name))}"
            )
        raise TritonError(text, Code.NO_LABEL)

    def check_names(self, name: str, versions: Collection[int], change: Change, config: Any = None) -> None:
        """Names.check(); also raises InvalidArgument for an alias that is the name of a model."""
        self.names.check(name, versions, change, config)
        given = [alias for alias, wanted in change.aliases.items() if wanted]
        for alias in [*given, *(version_labels.aliases(config) if config is not None else ())]:
            if self.is_model(alias):
                raise InvalidArgument(
                    f"alias '{alias}' of model '{shown(name)}' is the name of another model"
                )

    def unname(self, name: str) -> None:
        """The model is unloaded by hand: what calls have set is forgotten, and its aliases are free for others unless the next
        request for it loads it again."""
        self.names.unset(name)
        if self.demand is None or name not in self.demand.known:
            self.names.tell(name, self.names.configured(name), ())

    def versions(self, name: str) -> set[int]:
        """The versions that a model has: those that serve, or of one that is loaded on demand and is not, would serve."""
        record = self.records.get(name)
        known = None if self.demand is None else self.demand.away(name)
        if known is not None and known.signature is not None:
            return set(known.signature.versions)
        return set() if record is None else set(record.serving)

    def _refuse_absent(self, name: str) -> None:
        """Raises Unavailable for a model that is loaded on demand and does not serve now."""
        known = None if self.demand is None else self.demand.away(name)
        if known is not None:
            raise Unavailable(
                f"model '{shown(name)}' is loaded on demand and is not loaded: {known.standing.reason}"
            )

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

    def compose(self, record: Record, children: tuple[str, ...]) -> None:
        """The models of an ensemble's steps are these from now on. A load that was outdated may still tell this of a record
        that is forgotten."""
        known = self.records.get(record.name) is record
        if known:
            self._uses_nothing(record)
        record.children = children
        for child in children if known else ():
            self.users.setdefault(child, set()).add(record.name)

    def forget(self, name: str, only: Record | None = None) -> None:
        """There is no such model any more. With `only`, nothing is forgotten where a later load has begun another record."""
        if only is not None and self.records.get(name) is not only:
            return
        record = self.records.pop(name, None)
        if record is not None:
            self._uses_nothing(record)
            self.readiness.notify(name)
        if not self.is_model(name):
            self.names.forget(name)

    def _uses_nothing(self, record: Record) -> None:
        for child in set(record.children):
            users = self.users[child]
            users.discard(record.name)
            if not users:
                del self.users[child]

    def serving(self) -> list[Model]:
        """Every version that serves, ready or not, in no order: 0.1 ms for 1,000."""
        rows = (row for record in self.records.values() for row in record.rows.values())
        return [row.model for row in rows if row.model is not None]

    def ready_models(self) -> list[Model]:
        """Every ready version, sorted by name and version number: 2 ms for 1,000. each_ready() can be cut into slices."""
        return list(self.each_ready())

    def each_ready(self, names: Iterable[str] | None = None) -> Iterator[Model]:
        """The ready versions of these models, or of all in the order of their names. Each is looked for when it is asked
        for: models may come and go in between."""
        for name in sorted(self.latest) if names is None else names:
            for _, row in sorted(self._rows(name).items()):
                if row.model is not None and row.model.ready:
                    yield row.model

    def all_ready(self) -> bool:
        """Strict readiness: True when no version is loading, unloading or failed, no model lacks a version, and the
        repositories could be opened."""
        changed = self.readiness.names_since(self._judged)
        self._judged = self.readiness.notified
        if changed is None:
            changed = self._unready.union(self.records)
        unready = self._unready
        for name in changed:
            record = self.records.get(name)
            if self.demand is not None and name in self.demand.known:
                unready.discard(name)  # it may come and go as it is asked for
                continue
            if record is not None and record.lacking:
                unready.add(name)
                continue
            for row in self._rows(name).values():
                ready = row.model is None or row.model.healthy
                if not ready or not version_states.keeps_ready(row.state, row.reason):
                    unready.add(name)
                    break
            else:
                unready.discard(name)
        return not unready and not self.unopened

    def index(
        self,
        ready: bool,
        timings: bool = False,
        names: Mapping[str, int] | None = None,
        repository: str = "",
    ) -> list[dict[str, Any]]:
        """The rows of the repository index, sorted by name and version, only of models with a folder in a repository,
        or in those that the caller calls `repository`.

        `names` is what places.names(repository) returned on another thread just before.
        """
        return list(self.index_rows(ready, timings, names, repository))

    def index_rows(
        self,
        ready: bool,
        timings: bool = False,
        names: Mapping[str, int] | None = None,
        repository: str = "",
    ) -> Iterator[dict[str, Any]]:
        """The rows of index(), each made when it is asked for."""
        if names is None:
            names = {} if self.unopened else self.repositories.names(repository)
        for name in self._shown(names, ready):
            record, rows = self._with_folders(name, names[name], repository)
            for entry in rows if record is None else record.index(timings):
                if not ready or entry.get("state") == "READY":
                    yield entry

    def index_texts(
        self,
        ready: bool,
        form: str,
        text: Callable[[dict[str, Any]], bytes],
        names: Mapping[str, int],
        repository: str = "",
    ) -> Iterator[bytes]:
        """`text(row)` of each row of index() without timings; `form` names what `text` makes (Record.index_texts)."""
        for name in self._shown(names, ready):
            record, rows = self._with_folders(name, names[name], repository)
            if record is None:
                if not ready:
                    yield from map(text, rows)
                continue
            for state, made in record.index_texts(form, text):
                if not ready or state == "READY":
                    yield made

    def _shown(self, names: Mapping[str, int], ready: bool) -> Iterable[str]:
        """The names that may have rows of the index. Of those that wait to be loaded, which may be thousands, none is ready:
        whoever cuts the index into slices can rest at rows only, not where one after the other is left out."""
        return [name for name in names if name in self.latest] if ready else names

    def _with_folders(
        self, name: str, folders: int, repository: str
    ) -> tuple[Record | None, list[dict[str, Any]]]:
        """The record that has rows of the index for a name with so many folders, or None and the rows of a name without
        such a record. Of one repository's index, a model that was loaded from another one is not loaded."""
        record = self.records.get(name)
        place = record.place if record is not None else None
        if repository and place is not None and not self.repositories.has(repository, place):
            return None, [{"name": name}]
        rows = None if self.demand is None else self.demand.rows(name)
        if rows is not None:
            return None, rows
        if record is not None and record.rows:
            return record, []
        if folders > 1:
            return None, [{"name": name, "state": "UNAVAILABLE", "reason": scan.DUPLICATE}]
        if record is not None and record.problem:
            return record, []
        return None, [{"name": name}]

    async def progress(self, name: str) -> dict[str, Any]:
        """Versions, names, the load under way and the last error of a model. Raises NotFound."""
        name = self.own_name(name)
        known = None if self.demand is None else self.demand.known.get(name)
        heard_of = self.records.get(name) is not None or (known is not None and not known.missing)
        if not heard_of and not await self.repositories.have(name):
            raise self._unknown(name)
        record = self.records.get(name)
        found: dict[str, Any] = {"name": name, "versions": []} if record is None else record.progress()
        if known is not None:
            found["on_demand"] = known.document()
        names = self.names.document(name)
        found.update({key: names[key] for key in ("labels", "aliases") if names[key]})
        return found

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
