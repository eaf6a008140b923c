"""The models that are served: which, in what state, and how they come and go.

States and plans are repository.lifecycle's table, reading files and making models is
repository.loader's. Here operations run: each load is a task of the manager's own nursery, so that
a caller who leaves does not end it, and a load that never ends holds up neither a newer operation
nor the shutdown.

Rules (beyond those of repository.lifecycle):
 1. A swap happens between two awaits: whoever looks a model up finds the old or the new one.
 2. What is taken out of service answers what it accepted before it is finalized. The models of an
    ensemble's steps outlive the last walk of every ensemble that was withdrawn with them.
 3. Loads of one model run one after the other; loads of different models side by side. An ensemble
    waits for the models of its steps, never for itself.
 4. A load that is outdated leaves nothing: what it made is stopped, its thread is left behind.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable
from typing import Any

import trio

from neptrio._cext.mailbox import CompletionQueue
from neptrio.errors import Internal, InvalidArgument, NotFound, TritonError, Unavailable
from neptrio.model import defaults
from neptrio.model.model import Model
from neptrio.repository import lifecycle, loader, override, scan
from neptrio.repository.lifecycle import Event, State
from neptrio.repository.loader import Found, Loader, PollFailure
from neptrio.repository.override import Folder, LoadParameters
from neptrio.repository.records import Operation, Record, Retirement, Row
from neptrio.scheduling import ensemble_graph
from neptrio.scheduling.base import LoopServices
from neptrio.settings import Settings

log = logging.getLogger("neptrio.repository")

EXITING = "Server exiting"
REBUILDS = 10  # of an ensemble whose steps' models change while it is built


class RepositoryManager:
    """Finds, loads, serves and unloads models. Lives on the trio thread."""

    def __init__(
        self, settings: Settings, loop: LoopServices, completions: CompletionQueue, services: Any = None
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._loader = Loader(settings, loop, completions)
        self._loader.services = services
        self._records: dict[str, Record] = {}
        self._latest: dict[str, Model] = {}
        self._numbers = itertools.count(1)
        self._waits: dict[str, set[str]] = {}  # model -> the models its load waits for
        self._nursery: trio.Nursery | None = None
        self._discarding = 0  # half-made models of outdated loads that have not stopped
        self._closing = False
        self._folders: set[Folder] = set()  # of file overrides

    @property
    def services(self) -> Any:
        """What backends may call; set once the server has made everything."""
        return self._loader.services

    @services.setter
    def services(self, services: Any) -> None:
        self._loader.services = services

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The nursery of every load and retirement; runs until it is cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self._nursery = None

    @property
    def left_behind(self) -> int:
        """Threads and half-made models of outdated loads that have not ended."""
        return self._loader.left_behind + self._discarding

    # ------------------------------------------------------------ serving

    def lookup(self, name: str, version: str = "") -> Model:
        """The ready version asked for, or the highest ready one. Texts as in spec/features.md A1."""
        if not version:
            model = self._latest.get(name)
            if model is not None:
                if not model.ready:
                    raise Unavailable(
                        f"Request for unknown model: '{name}' version {model.version} is not at ready state"
                    )
                return model
            if self._rows(name):
                raise NotFound(f"Request for unknown model: '{name}' has no available versions")
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        try:
            number = int(version) if len(version) < 19 else None
        except ValueError:
            number = None
        if number is None:
            raise InvalidArgument(
                f"failed to get model version from specified version string '{version}' (details: stol), version "
                "should be an integral value > 0"
            )
        if number <= 0:
            raise InvalidArgument(
                f"invalid model version specified '{version}' , version should be an integral value > 0"
            )
        versions = self._rows(name)
        if not versions:
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        row = versions.get(number)
        if row is None:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if row.model is None or not row.model.ready:
            raise Unavailable(f"Request for unknown model: '{name}' version {number} is not at ready state")
        return row.model

    def lookup_step(self, name: str, version: str) -> Model:
        """lookup() for a step of an accepted ensemble request: a model that was withdrawn together
        with the ensemble serves it to its end."""
        try:
            return self.lookup(name, version)
        except TritonError:
            record = self._records.get(name)
            for retirement in reversed(record.retiring if record is not None else []):
                if not retirement.drained.is_set() and version in ("", str(retirement.version)):
                    return retirement.model
            raise

    def _rows(self, name: str) -> dict[int, Row]:
        record = self._records.get(name)
        return record.rows if record is not None else {}

    def ready_versions(self, name: str) -> list[int]:
        """Ready version numbers of a model, ascending."""
        rows = self._rows(name)
        return sorted(v for v, row in rows.items() if row.model is not None and row.model.ready)

    def ready_models(self) -> list[Model]:
        """Every ready version, by name, then version number."""
        return [
            row.model
            for name in sorted(self._records)
            for _, row in sorted(self._records[name].rows.items())
            if row.model is not None and row.model.ready
        ]

    def all_ready(self) -> bool:
        """Strict readiness: no version loading, unloading or failed."""
        return all(
            lifecycle.keeps_ready(row.state, row.reason) and (row.model is None or row.model.ready)
            for record in self._records.values()
            for row in record.rows.values()
        )

    def index(self, ready: bool) -> list[dict[str, str]]:
        """The rows of the repository index, sorted by name and version: folders of the
        repositories only."""
        rows: list[dict[str, str]] = []
        for name, folders in scan.model_dirs(self._settings.model_repository).items():
            record = self._records.get(name)
            if len(folders) > 1 and not (record is not None and record.rows):
                found: list[dict[str, str]] = [
                    {"name": name, "state": "UNAVAILABLE", "reason": scan.DUPLICATE}
                ]
            else:
                found = list(record.index()) if record is not None else []
            rows += [row for row in found or [{"name": name}] if not ready or row.get("state") == "READY"]
        return rows

    def progress(self, name: str) -> dict[str, Any]:
        """Versions, the load under way and the last error of a model. Raises NotFound."""
        record = self._records.get(name)
        if record is None:
            if name not in scan.model_dirs(self._settings.model_repository):
                raise NotFound(f"Request for unknown model: '{name}' is not found")
            return {"name": name, "versions": []}
        return record.progress()

    # ------------------------------------------------------------ loading

    async def load_all(self) -> None:
        """Start-up: loads every model (modes none and poll) or those named (explicit)."""
        names: Iterable[str] = scan.model_dirs(self._settings.model_repository)
        if self._settings.model_control_mode == "explicit" and "*" not in self._settings.load_model:
            names = self._settings.load_model
        failed = False
        operations = [self.begin(name, LoadParameters()) for name in dict.fromkeys(names)]
        for operation in operations:
            await operation.done.wait()
            if operation.error is not None:
                failed = True
                log.error("%s", operation.error)
        if failed and self._settings.exit_on_error:
            raise Internal("failed to load all models")

    async def load(self, name: str, parameters: dict[str, Any]) -> None:
        """Loads or reloads a model; returns when it serves, or at once with `async`.

        Raises the load's TritonError. A caller that is cancelled does not end the load.
        """
        parsed = override.parse(parameters)
        operation = self.begin(name, parsed)
        if parsed.return_at_once:
            return
        await operation.done.wait()
        if operation.error is not None:
            raise operation.error

    def begin(self, name: str, parameters: LoadParameters, explicit: bool = True) -> Operation:
        """Starts a load. Raises Unavailable once the server exits."""
        if self._closing or self._nursery is None:
            raise Unavailable(EXITING)
        record = self._records.setdefault(name, Record(name))
        operation = Operation(next(self._numbers), record, parameters)
        operation.explicit = explicit
        record.operations.append(operation)
        self._nursery.start_soon(self._run, operation)
        return operation

    async def _run(self, operation: Operation) -> None:
        record = operation.record
        loaded = False
        try:
            with operation.scope:
                await self._turn(operation)
                record.problem = ""
                changed = await self._load(operation)
                loaded = True
                self._release(operation)
                if changed:
                    await self._follow(record.name)
        except TritonError as error:
            operation.error = error
        except Exception as error:
            log.exception("loading model '%s' failed", record.name)
            operation.error = Internal(f"failed to load '{record.name}': {type(error).__name__}: {error}")
        finally:
            if not loaded and operation.error is None:
                operation.error = operation.stopped_by or Unavailable(EXITING)
            self._abandon(operation)
            self._release(operation)
            if operation.error is not None:
                record.last_error = str(operation.error).rstrip("\n")
            if operation.error is not None and not record.rows and not record.operations:
                self._forget_stranger(record)
            operation.done.set()

    def _forget_stranger(self, record: Record) -> None:
        """A name that was never a model's leaves no trace."""
        try:
            known = bool(record.problem) and record.name in scan.model_dirs(self._settings.model_repository)
        except TritonError:
            known = False
        if not known:
            self._records.pop(record.name, None)

    async def _turn(self, operation: Operation) -> None:
        """Waits for the older loads of the model."""
        while operation.stopped_by is None and (first := operation.record.operations[0]) is not operation:
            await first.released.wait()
        operation.check()

    def _release(self, operation: Operation) -> None:
        operation.released.set()
        if operation in operation.record.operations:
            operation.record.operations.remove(operation)

    def _abandon(self, operation: Operation) -> None:
        """Stops what a load made and did not bring into service."""
        self._stop_made(operation)
        for row in operation.record.rows.values():
            if row.state in (State.LOADING, State.RELOADING) and not operation.released.is_set():
                row.apply(Event.ABANDON)

    async def _discard(self, model: Model) -> None:
        try:
            await model.stop()
        except Exception:
            log.exception("stopping a model that was not needed failed")
        finally:
            self._discarding -= 1

    async def _load(self, operation: Operation) -> bool:
        """Loads, and swaps; True when what serves has changed."""
        record, name = operation.record, operation.record.name
        parameters = operation.parameters
        persists = record.override is not None and record.folder is None
        if not parameters.overrides and persists and record.serving:
            current = await self._loader.fingerprint(name)
            if current == record.fingerprint:
                parameters = LoadParameters(config=record.override)
        operation.phase = "reading the configuration"
        try:
            if operation.refresh and record.folder is not None and record.source is not None:
                found = Found(record.folder.path, record.source, record.fingerprint or {},
                              sorted(record.serving), record.folder)  # fmt: skip
            else:
                found = await self._loader.find(name, parameters)
        except PollFailure as failure:
            record.problem, record.polled = str(failure), failure.fingerprint
            raise loader.poll_failed(name, str(failure)) from None
        record.polled = found.fingerprint
        try:
            operation.check()
            before = record.wanted
            record.explicit = record.explicit or operation.explicit
            if not operation.parameters.overrides and not operation.refresh and _unchanged(record, found):
                record.wanted = True
                return False
            record.wanted = True
            try:
                await self._make(operation, found, parameters)
            except BaseException:
                if self._settings.model_control_mode != "poll" and not record.serving:
                    record.wanted = before
                raise
        finally:
            if found.folder is not None and found.folder is not record.folder:
                found.folder.release()
        return True

    async def _make(self, operation: Operation, found: Found, parameters: LoadParameters) -> None:
        record, name = operation.record, operation.record.name
        config = found.source.config
        children = tuple(ensemble_graph.child_names(config)) if defaults.is_ensemble(config) else ()
        if not found.versions:
            raise loader.no_version(name)
        before = record.children
        record.children = tuple(dict.fromkeys(before + children))
        try:
            models = await self._build(operation, found, children)
            operation.check()
        except BaseException:
            record.children = before if record.serving else children
            raise
        keep = _same_but_instances(record, found)
        operation.phase = "taking over"
        record.children = children
        record.source, record.fingerprint = found.source, found.fingerprint
        record.override = parameters.config
        record.last_error, record.last_seconds = "", max(m.load_duration_secs for m in models.values())
        self._swap(operation, models, keep)
        old, record.folder = record.folder, found.folder
        if found.folder is not None and found.folder is not old:
            found.folder.hold()
            self._folders.add(found.folder)
        if old is not None and old is not found.folder:
            self._release_folder(record, old)

    async def _build(self, operation: Operation, found: Found, children: tuple[str, ...]) -> dict[int, Model]:
        """The versions' models; those of an ensemble fit the models of its steps as they are now."""
        name = operation.record.name
        for _ in range(REBUILDS):
            if children:
                operation.phase = "loading the models of the ensemble's steps"
                await self._children(name, children)
            steps = [self._latest.get(child) for child in children]
            models = await self._versions(operation, found)
            if steps == [self._latest.get(child) for child in children]:
                return models
            self._stop_made(operation)
        raise Internal(f"failed to load '{name}': the models of its steps keep changing")

    async def _versions(self, operation: Operation, found: Found) -> dict[int, Model]:
        """Every wanted version, made in parallel; the first that fails ends the others."""
        record, name = operation.record, operation.record.name
        operation.check()
        models: dict[int, Model] = {}
        failed: list[tuple[int, TritonError]] = []
        for version in found.versions:
            row = record.rows.setdefault(version, Row())
            if row.state not in (State.LOADING, State.RELOADING):
                row.apply(Event.BEGIN)
        operation.phase = "loading files and initializing instances"

        async def one(version: int) -> None:
            try:
                models[version] = await self._loader.build(name, version, found, operation.building)
            except TritonError as error:
                failed.append((version, error))

        async with trio.open_nursery() as nursery:
            for version in found.versions:
                nursery.start_soon(one, version)
        operation.check()
        if failed:
            version, error = min(failed, key=lambda pair: pair[0])
            reason = f"{error.code.title}: {error}"
            reasons = {v: f"{e.code.title}: {e}" for v, e in failed}
            for v in found.versions:
                record.rows[v].apply(Event.FAIL, reasons.get(v, f"version {version} failed to load"))
            raise loader.version_failed(name, version, reason) from error
        return models

    def _stop_made(self, operation: Operation) -> None:
        made, operation.building = operation.building, []
        for model in made:
            self._discarding += 1
            assert self._nursery is not None
            self._nursery.start_soon(self._discard, model)

    def _swap(self, operation: Operation, models: dict[int, Model], keep: bool) -> None:
        """The new versions serve, the old ones retire: no await in here."""
        record = operation.record
        operation.building = []
        for version, row in list(record.rows.items()):
            old = row.model
            if version in models:
                if old is not None and keep:
                    old.counters.memory_usage = models[version].counters.memory_usage
                    models[version].counters = old.counters
                row.model = models[version]
                row.apply(Event.SUCCEED)
                if old is not None:
                    self._retire(record, version, old)
            elif row.state.serves:
                self._withdraw_row(record, version, row)
        self._latest[record.name] = models[max(models)]

    async def _children(self, name: str, children: tuple[str, ...]) -> None:
        """Sees to it that the models of an ensemble's steps serve. Raises InvalidArgument."""
        failed: list[str] = []

        async def one(child: str) -> None:
            while child not in self._latest:
                if child == name or lifecycle.would_wait_for_itself(self._waits, name, child):
                    break
                record = self._records.get(child)
                running = record.operations[0] if record is not None and record.operations else None
                if running is None:
                    running = self.begin(child, LoadParameters(), explicit=False)
                self._waits.setdefault(name, set()).add(child)
                try:
                    await running.released.wait()
                finally:
                    self._waits[name].discard(child)
                if running.error is not None and child not in self._latest:
                    log.error("%s", running.error)
                    break
            if child not in self._latest:
                failed.append(child)

        async with trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(one, child)
        if failed:
            raise InvalidArgument(
                f"load failed for model '{name}': ensemble {name} contains models that are not available or "
                f"ambiguous: {', '.join(sorted(failed))}\n"
            )

    async def _follow(self, name: str) -> None:
        """The ensembles that use a model follow its change: they come back, or take its new tensors."""
        waiting = []
        for above in reversed(lifecycle.above(self._standings(), name)):
            record = self._records[above]
            if not record.wanted or record.operations or name not in record.children:
                continue
            operation = self.begin(above, LoadParameters(), explicit=False)
            operation.refresh = True
            waiting.append(operation)
        for operation in waiting:
            await operation.done.wait()
            if operation.error is not None and operation.stopped_by is None:
                log.error("%s", operation.error)
                if not operation.record.operations:
                    self._withdraw(operation.record)

    # ------------------------------------------------------------ unloading

    async def unload(self, name: str, unload_dependents: bool) -> None:
        """Takes a model out of service and returns; accepted requests finish (state UNLOADING).

        Ensembles above it go with it, and come back with it unless `unload_dependents`. That also
        removes the models that were only loaded because of an ensemble.
        """
        self.unload_now(name, unload_dependents)
        await trio.lowlevel.checkpoint()

    def unload_now(self, name: str, unload_dependents: bool) -> None:
        """unload(), without a checkpoint."""
        record = self._records.get(name)
        if record is None:
            return
        outdated = Internal(lifecycle.OUTDATED)
        orphans = lifecycle.orphans(self._standings(), name) if unload_dependents else ()
        for above in lifecycle.above(self._standings(), name):
            other = self._records[above]
            other.wanted = other.wanted and not unload_dependents
            self._outdate(other, outdated)
            self._withdraw(other)
        for gone in (record, *(self._records[orphan] for orphan in orphans)):
            gone.wanted = gone.explicit = False
            self._outdate(gone, outdated)
            self._withdraw(gone)

    def _outdate(self, record: Record, reason: TritonError) -> None:
        for operation in list(record.operations):
            operation.cancel(reason)
            self._release(operation)
        for row in record.rows.values():
            if row.state in (State.LOADING, State.RELOADING):
                row.apply(Event.ABANDON)

    def _withdraw(self, record: Record) -> None:
        """Out of service at once."""
        for version, row in record.rows.items():
            self._withdraw_row(record, version, row)
        if self._latest.pop(record.name, None) is not None:
            record.override = record.fingerprint = None
            folder, record.folder = record.folder, None
            if folder is not None:
                self._release_folder(record, folder)

    def _withdraw_row(self, record: Record, version: int, row: Row) -> None:
        model, row.model = row.model, None
        row.apply(Event.WITHDRAW)
        if model is not None:
            self._retire(record, version, model)

    def _retire(self, record: Record, version: int, model: Model) -> None:
        model.withdraw()
        retirement = Retirement(version, model)
        record.retiring.append(retirement)
        if self._nursery is not None:
            self._nursery.start_soon(self._retiring, record, retirement)
        else:  # the server was cancelled from outside: nothing can be waited for
            record.retiring.remove(retirement)

    async def _retiring(self, record: Record, retirement: Retirement) -> None:
        for other in list(self._records.values()):
            if record.name in other.children:
                for above in list(other.retiring):
                    await above.drained.wait()
        try:
            await retirement.model.drain()
            retirement.drained.set()
            await retirement.model.stop()
        except Exception:
            log.exception("stopping model '%s' failed", record.name)
        retirement.drained.set()
        record.retiring.remove(retirement)
        if not any(other.version == retirement.version for other in record.retiring):
            row = record.rows.get(retirement.version)
            if row is not None:
                row.apply(Event.RETIRED)
        retirement.done.set()

    def _release_folder(self, record: Record, folder: Folder) -> None:
        """Removes the folder of a file override once the models that came from it are gone."""

        async def release() -> None:
            for retirement in list(record.retiring):
                await retirement.done.wait()
            self._folders.discard(folder)
            folder.release()

        if self._nursery is not None:
            self._nursery.start_soon(release)

    def _standings(self) -> dict[str, lifecycle.Standing]:
        return {name: record.standing for name, record in self._records.items()}

    # ------------------------------------------------------------ polling and shutdown

    async def poll_once(self) -> None:
        """Mode poll: loads what is new or has changed, unloads what is gone."""
        names = scan.model_dirs(self._settings.model_repository)
        for name in list(self._records):
            record = self._records[name]
            if name not in names and not record.operations:
                self.unload_now(name, False)
                if not record.retiring:
                    self._records.pop(name, None)
        operations = []
        for name in names:
            record_now = self._records.get(name)
            current = await self._loader.fingerprint(name)
            if record_now is not None and (record_now.operations or current == record_now.polled):
                continue
            operations.append(self.begin(name, LoadParameters()))
        for operation in operations:
            await operation.done.wait()
            if operation.error is not None:
                log.error("%s", operation.error)

    async def poll(self) -> None:
        """Mode poll: polls every --repository-poll-secs, for ever."""
        while True:
            await trio.sleep(self._settings.repository_poll_secs)
            try:
                await self.poll_once()
            except TritonError as error:
                log.error("polling the model repository failed: %s", error)

    def flush(self) -> None:
        """Shutdown has begun: no scheduler waits any longer for company before it sends."""
        for model in self.ready_models():
            model.scheduler.flush()

    def close(self) -> None:
        """Shutdown has begun: loads end at once, and none begins."""
        self._closing = True
        for record in self._records.values():
            for operation in list(record.operations):
                operation.cancel(Unavailable(EXITING))

    def live_sequences(self) -> int:
        """Sequences of all models that a request may continue."""
        return sum(model.scheduler.live_sequences() for model in self.ready_models())

    async def unload_all(self) -> None:
        """Shutdown: drains and unloads everything."""
        self.close()
        try:
            for record in list(self._records.values()):
                for operation in list(record.operations):
                    await operation.done.wait()
            for name in list(self._records):
                self.unload_now(name, False)
            for record in list(self._records.values()):
                for retirement in list(record.retiring):
                    await retirement.done.wait()
        finally:
            for folder in list(self._folders):
                folder.release()
            self._folders.clear()


def _unchanged(record: Record, found: Found) -> bool:
    """Every wanted version serves already, from the files as they are."""
    return (
        record.folder is None
        and set(record.serving) == set(found.versions) != set()
        and record.fingerprint == found.fingerprint
    )


def _same_but_instances(record: Record, found: Found) -> bool:
    """The new configuration differs from the serving one in instance groups at most."""
    if record.source is None or found.folder is not None or record.folder is not None:
        return False
    plain = []
    for source in (record.source, found.source):
        config = type(source.config)()
        config.CopyFrom(source.config)
        config.ClearField("instance_group")
        plain.append(config.SerializeToString(deterministic=True))
    return plain[0] == plain[1] and _files(record.fingerprint) == _files(found.fingerprint)


def _files(state: scan.Fingerprint | None) -> dict[str, tuple[int, int]]:
    """The folder's state without its configuration files."""
    return {
        name: value
        for name, value in (state or {}).items()
        if name not in ("config.pbtxt", "config.json") and not name.startswith("configs/")
    }
