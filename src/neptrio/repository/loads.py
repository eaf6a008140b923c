"""Runs loads: each is a task, from the call to the moment the new versions serve.

Reading files and making models is in repository.model_builder.

Rules (in addition to those of repository.version_states):
 1. New versions replace old ones without an await in between: a lookup finds the old or the new one.
 2. Loads of one model run one after the other, loads of different models side by side. An ensemble waits for the
    models of its steps, but never for itself. It serves only as long as those that it was built with serve.
 3. An invalidated load leaves nothing: what it made is stopped, its thread is left behind.
 4. A caller who is cancelled does not end the load.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace

import trio

from neptrio.config import defaults, groups, version_labels
from neptrio.errors import Internal, InvalidArgument, TritonError, Unavailable, bare
from neptrio.foreign import summary
from neptrio.loop import collector
from neptrio.repository import change, ensemble_steps, load_line, model_builder, version_states
from neptrio.repository.catalog import Catalog
from neptrio.repository.expected_size import files_of
from neptrio.repository.load_line import DEAR_SECONDS, LAST, Aside, LoadLine, Rank
from neptrio.repository.model import Model
from neptrio.repository.model_builder import Building, Found, ModelBuilder, PollFailure
from neptrio.repository.override import LoadParameters
from neptrio.repository.records import Operation, Record, Row
from neptrio.repository.regroup import Regrouping
from neptrio.repository.version_states import Event, State
from neptrio.repository.waiting import NoRoom
from neptrio.repository.withdrawal import Withdrawal
from neptrio.request.infer_request import InferRequest, monotonic_ns
from neptrio.scheduling import ensemble_graph
from neptrio.settings import Settings

log = logging.getLogger("neptrio.repository")

EXITING = "Server exiting"
SLOW_SECONDS = 10.0  # a load that takes longer says what it does
DEAR_BYTES = 256 << 20  # a load of larger files is expected to take long, until it is known how long
REBUILDS = 10  # of an ensemble whose steps' models change while it is built


class Loads:
    """The loads under way. Lives on the trio thread."""

    def __init__(
        self, settings: Settings, catalog: Catalog, withdrawal: Withdrawal, made_by: ModelBuilder
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._withdrawal = withdrawal
        self.builder = made_by
        self._numbers = itertools.count(1)
        self._waits: dict[str, set[str]] = {}  # model -> the models that its load waits for
        self._line = LoadLine(load_line.places(settings), self._rank)
        self.discarding = 0  # unfinished models of invalidated loads that have not stopped yet
        self.closing = False

    def _rank(self, name: str) -> Rank:
        return (LAST, 0) if self._catalog.demand is None else self._catalog.demand.rank(name)

    def begin(self, name: str, parameters: LoadParameters, explicit: bool = True) -> Operation:
        """Starts a load. Raises Unavailable when the server exits."""
        if self.closing or self._catalog.nursery is None:
            raise Unavailable(EXITING)
        record = self._catalog.records.setdefault(name, Record(name))
        operation = Operation(next(self._numbers), record, parameters)
        operation.explicit = explicit
        record.operations.append(operation)
        if self._catalog.demand is not None:
            self._catalog.demand.begun(name)
        self._catalog.nursery.start_soon(self._run, operation)
        return operation

    async def _run(self, operation: Operation) -> None:
        record = operation.record
        loaded = False
        assert self._catalog.nursery is not None
        self._catalog.nursery.start_soon(self._tell_slow, operation)
        try:
            with operation.scope:
                await self._first_in_line(operation)
                record.problem, record.versionless = "", False
                changed = await self._load(operation)
                loaded = True
                operation.release()
                if self._catalog.demand is not None:  # before anything is awaited: who waited comes first
                    self._catalog.demand.loaded(record.name)
                if changed:
                    await self._follow(record.name)
        except TritonError as error:
            operation.error = error
        except Exception as error:
            if operation.stopped_by is None:
                log.exception("loading model '%s' failed", record.name)
            operation.error = Internal(f"failed to load '{record.name}': {summary(error)}")
        finally:
            if not loaded:  # who was outdated is told so, also where the load failed at that moment
                operation.error = operation.stopped_by or operation.error or Unavailable(EXITING)
            self._abandon(operation)
            operation.release()
            if operation.error is not None:
                record.last_error = str(bare(operation.error)).rstrip("\n")
                if not record.rows:
                    self._without_versions(operation)
                if not loaded:
                    self._tell_demand(operation, operation.error)
            self._keep_up(operation)
            operation.done.set()
            collector.loaded()

    def _tell_demand(self, operation: Operation, error: TritonError) -> None:
        """Those who wait for a model hear of a load that failed, unless another one follows."""
        demand, known = self._catalog.demand, self._catalog.records.get(operation.record.name)
        if demand is not None and (known is None or not known.operations):
            outdated = operation.stopped_by is not None and not self.closing
            demand.failed(operation.record.name, error, outdated, self.closing)

    async def _tell_slow(self, operation: Operation) -> None:
        """Says in the log what a load is doing that takes long, again and again, more and more rarely."""
        seconds = SLOW_SECONDS
        while not operation.done.is_set():
            left = operation.started + seconds - time.monotonic()
            with trio.move_on_after(max(0.0, left)):  # this task may have been kept waiting for longer
                await operation.done.wait()
                return
            log.info("loading '%s' since %.0f s: %s", operation.record.name, seconds, operation.phase)
            seconds *= 2

    def _without_versions(self, operation: Operation) -> None:
        """Notes why a load failed before it had any version to show it: in `problem`, for the index. A name that
        never was a model's, and a load that was ended from outside, leave nothing."""
        record = operation.record
        if record.listed and operation.stopped_by is None and not record.problem:
            record.problem = record.last_error.removeprefix(f"load failed for model '{record.name}': ")
        if not ((record.listed and record.problem) or record.operations):
            self._catalog.forget(record.name, only=record)

    async def _first_in_line(self, operation: Operation) -> None:
        """Waits until older loads of the model have ended."""
        while operation.stopped_by is None and (first := operation.record.operations[0]) is not operation:
            await first.released.wait()
        operation.check()

    def _abandon(self, operation: Operation) -> None:
        """Stops what a load has made and not put into service."""
        self._stop_made(operation)
        for row in operation.record.rows.values():
            if row.state in (State.LOADING, State.RELOADING) and not operation.released.is_set():
                row.apply(Event.ABANDON)

    async def _discard(self, model: Building, operation: Operation) -> None:
        try:
            await model.stop()
        except Exception:
            log.exception("stopping a model that was not needed failed")
        finally:
            self.discarding -= 1
            self._not_ended(operation, -1)

    def _not_ended(self, operation: Operation, change: int) -> None:
        """More or fewer of what a load that was given up has begun have not ended."""
        operation.discarding += change
        if change < 0 and self._catalog.budget is not None:
            self._catalog.budget.settle(operation)

    async def _load(self, operation: Operation) -> bool:
        """Loads and puts into service; returns True when what is served has changed."""
        record, name = operation.record, operation.record.name
        parameters = operation.parameters
        persists = record.override is not None and record.folder is None
        if not parameters.overrides and persists and record.serving:
            current = await self.builder.fingerprint(name, record.chosen)
            if current == record.fingerprint:
                parameters = replace(parameters, config=record.override)
        operation.phase = "reading the configuration"
        try:
            if operation.refresh and record.folder is not None and record.source is not None:
                found = Found(record.folder.path, record.source, record.fingerprint or {},
                              sorted(record.serving), record.folder)  # fmt: skip
            else:
                found = await self.builder.find(name, parameters, record.chosen)
        except PollFailure as failure:
            record.problem, record.polled = str(failure), failure.fingerprint
            record.listed = failure.listed
            raise model_builder.poll_failed(name, str(failure)) from None
        record.polled, record.listed = found.fingerprint, found.listed
        if self._catalog.demand is not None:
            self._catalog.demand.renew(name, found)
        try:
            operation.check()
            self._check_names(operation, found)
            before = record.wanted
            record.explicit = record.explicit or operation.explicit
            if (
                not operation.parameters.overrides
                and not operation.refresh
                and not ensemble_steps.outdated(self._catalog.records, record)
                and change.unchanged(record, found)
            ):
                record.wanted = True
                record.source, record.fingerprint = found.source, found.fingerprint
                record.digest = found.digest
                self._catalog.lack(record, not found.versions)
                for model in record.serving.values():
                    version_labels.take_over(model.config, found.source.config)
                self._take_names(operation, found)
                return False
            record.wanted = True
            try:
                async with self._turn(operation, found) as aside:
                    if self._catalog.budget is not None:
                        operation.phase = "looking for room"
                        await self._catalog.budget.make_room(operation, found, aside)
                        operation.check()
                    await self._make(operation, found, parameters)
            except BaseException:
                if self._settings.model_control_mode != "poll" and not record.serving:
                    record.wanted = before
                raise
        finally:
            if self._catalog.budget is not None:
                self._catalog.budget.settle(operation)
            if found.folder is not None and found.folder is not record.folder:
                found.folder.release()
        return True

    def _check_names(self, operation: Operation, found: Found) -> None:
        """Raises InvalidArgument where the versions that were found lack one that a label names, or an alias cannot be had, and
        Denied where the configuration of the call has an alias, or a step of an ensemble, that is not for who asks."""
        name, parameters = operation.record.name, operation.parameters
        if not found.versions:
            return
        if parameters.overrides and parameters.check_reach is not None:
            serving = operation.record.serving.values()
            steps = {step.model_name for model in serving for step in model.config.ensemble_scheduling.step}
            kept = {*self._catalog.names.configured_aliases(name), *steps}
            asked = [step.model_name for step in found.source.config.ensemble_scheduling.step]
            for other in (*version_labels.aliases(found.source.config), *asked):
                if other not in kept:
                    parameters.check_reach(other)
        try:
            self._catalog.check_names(name, found.versions, parameters.names, found.source.config)
        except InvalidArgument as error:
            raise InvalidArgument(f"load failed for model '{name}': {error}") from None

    def _take_names(self, operation: Operation, found: Found) -> None:
        self._catalog.names.configure(operation.record.name, found.source.config)
        self._catalog.names.change(operation.record.name, operation.parameters.names)

    def _turn(self, operation: Operation, found: Found) -> AbstractAsyncContextManager[Aside]:
        """The turn of a load that requests wait for. Loads by hand have none, nor have ensembles, which wait for others."""
        demand = self._catalog.demand
        if (
            demand is None
            or not demand.asked_for(operation.record.name)
            or defaults.is_ensemble(found.source.config)
        ):
            return nullcontext(nullcontext)
        operation.phase = "waiting for its turn to load"
        seconds = operation.record.last_seconds
        if not seconds and self._catalog.budget is not None:
            known = self._catalog.budget.remembered.of(operation.record.name, found.digest)
            seconds = 0.0 if known is None else known.seconds
        dear = seconds > DEAR_SECONDS or files_of(found) > DEAR_BYTES
        return self._line.turn(operation.record.name, dear, monotonic_ns())

    async def _make(self, operation: Operation, found: Found, parameters: LoadParameters) -> None:
        record, name = operation.record, operation.record.name
        config = found.source.config
        children = tuple(ensemble_graph.child_names(config)) if defaults.is_ensemble(config) else ()
        if not found.versions:
            record.versionless = True
            self._catalog.lack(record, True)
            raise model_builder.no_version(name, found.model_dir)
        self._catalog.lack(record, False)
        before = record.children
        self._catalog.compose(record, tuple(dict.fromkeys(before + children)))
        try:
            same = {} if operation.refresh else change.going_on(record, found)
            models, changes = await self._build(operation, found, children, same)
            operation.check()
            self._check_names(operation, found)  # calls may have moved labels meanwhile
        except BaseException:
            self._catalog.compose(record, before if record.serving else children)
            raise
        same_config = record.source is not None and record.source.config == config
        # a change of instances, also where it needs new models; a reload of what has not changed begins anew
        keep = not same_config and change.same_but_instances(record, found)
        operation.phase = "taking over"
        self._catalog.compose(record, children)
        record.source, record.fingerprint, record.place = found.source, found.fingerprint, found.place
        record.digest = found.digest
        if parameters.repository:
            record.chosen = found.place
        record.override = parameters.config
        record.steps = ensemble_steps.serving(self._catalog.records, children)
        record.last_error = ""
        made: list[Building] = [*models.values(), *changes.values()]
        record.last_seconds = max(one.load_duration_secs for one in made)
        for version, model in models.items():
            record.go_on_counting(version, model, same_config)
        self._swap(operation, models, changes, keep)
        self._take_names(operation, found)
        for version, model in sorted(models.items()):
            log.info(  # begins as a Triton server's line, for which scripts wait
                "successfully loaded '%s' version %d in %.1f s (%s)",
                *(name, version, model.load_duration_secs),
                groups.runs_on(model.config, model.backend.own_processes) or "its steps' models",
            )
        for version, regrouping in sorted(changes.items()):
            log.info(
                "successfully changed the instances of '%s' version %d in %.1f s (%s)",
                *(name, version, regrouping.load_duration_secs),
                groups.runs_on(record.serving[version].config, record.serving[version].backend.own_processes),
            )
        old, record.folder = record.folder, found.folder
        if found.folder is not None and found.folder is not old:
            found.folder.hold()
            self._withdrawal.folders.add(found.folder)
        if old is not None and old is not found.folder:
            self._withdrawal.release_folder(record, old)

    async def _build(
        self, operation: Operation, found: Found, children: tuple[str, ...], same: dict[int, Model]
    ) -> tuple[dict[int, Model], dict[int, Regrouping]]:
        """Makes the models of the versions; those of an ensemble fit the models of its steps as they are now."""
        name = operation.record.name
        for _ in range(REBUILDS):
            if children:
                operation.phase = "loading the models of the ensemble's steps"
                await self._children(name, children)
            steps = ensemble_steps.serving(self._catalog.records, children)
            made = await self._versions(operation, found, same)
            if steps == ensemble_steps.serving(self._catalog.records, children):
                return made
            self._stop_made(operation)
        raise Internal(f"failed to load '{name}': the models of its steps keep changing")

    async def _versions(
        self, operation: Operation, found: Found, same: dict[int, Model]
    ) -> tuple[dict[int, Model], dict[int, Regrouping]]:
        """Makes every wanted version, in parallel, or changes it in place when it needs no new model."""
        record, name = operation.record, operation.record.name
        operation.check()
        models: dict[int, Model] = {}
        changes: dict[int, Regrouping] = {}
        failed: list[tuple[int, TritonError]] = []
        changed = functools.partial(self._catalog.readiness.notify, name)
        for version in found.versions:
            row = record.rows.setdefault(version, Row(changed=changed))
            if row.state not in (State.LOADING, State.RELOADING):
                row.apply(Event.BEGIN)
        operation.phase = "loading files"
        for version in found.versions:
            what = "changing instances" if version in same else "loading"
            log.info("%s: %s:%d", what, name, version, extra={"subject": name})

        async def one(version: int) -> None:
            try:
                if version in same:
                    changes[version] = await self.builder.regroup(
                        same[version], found, operation.building, operation.tell
                    )
                else:
                    models[version] = await self.builder.build(
                        name,
                        version,
                        found,
                        operation.building,
                        operation.tell,
                        functools.partial(self._not_ended, operation),
                    )
            except TritonError as error:
                failed.append((version, bare(error)))

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
            raise model_builder.version_failed(name, version, reason) from error
        return models, changes

    def _stop_made(self, operation: Operation) -> None:
        made, operation.building = operation.building, []
        for model in made:
            model.abort()
            self.discarding += 1
            operation.discarding += 1
            assert self._catalog.nursery is not None
            self._catalog.nursery.start_soon(self._discard, model, operation)

    def _swap(
        self, operation: Operation, models: dict[int, Model], changes: dict[int, Regrouping], keep: bool
    ) -> None:
        """Puts new versions into service, retires old ones and carries out changes in place. Must not await."""
        record = operation.record
        operation.building = []
        for version, row in list(record.rows.items()):
            old = row.model
            if version in models:
                if old is not None and keep:
                    old.counters.memory_usage = models[version].counters.memory_usage
                    models[version].counters = old.counters
                row.model = models[version]
                row.model.on_ready = functools.partial(self._health_changed, record.name)
                row.model.on_not_begun = functools.partial(self._not_begun, record.name)
                row.apply(Event.SUCCEED)
                if old is not None:
                    self._withdrawal.retire(record, version, old)
            elif version in changes:
                row.apply(Event.SUCCEED)
                changes[version].commit()
            elif row.state.serves:
                self._withdrawal.row(record, version, row)
        self._catalog.latest[record.name] = record.serving[max(record.serving)]

    def _health_changed(self, name: str) -> None:
        self._catalog.readiness.notify(name)
        if self._catalog.demand is not None:
            self._catalog.demand.recovered(name)

    def _not_begun(self, name: str, request: InferRequest) -> bool:
        demand = self._catalog.demand
        return demand is not None and demand.take_back(name, request)

    async def _children(self, name: str, children: tuple[str, ...]) -> None:
        """Loads the models of an ensemble's steps that do not serve. Raises InvalidArgument."""
        failed: list[str] = []
        no_room: list[NoRoom] = []

        async def one(child: str) -> None:
            while child not in self._catalog.latest:
                if child == name or version_states.would_wait_for_itself(self._waits, name, child):
                    break
                record = self._catalog.records.get(child)
                running = record.operations[0] if record is not None and record.operations else None
                if running is None:
                    running = self.begin(child, LoadParameters(), explicit=False)
                self._waits.setdefault(name, set()).add(child)
                try:
                    await running.released.wait()
                finally:
                    self._waits[name].discard(child)
                if running.error is not None and child not in self._catalog.latest:
                    if isinstance(running.error, NoRoom):
                        no_room.append(running.error)
                    log.error("%s", str(running.error).rstrip("\n"), extra={"subject": child})
                    break
            if child not in self._catalog.latest:
                failed.append(child)

        async with trio.open_nursery() as nursery:
            for child in children:
                nursery.start_soon(one, child)
        if no_room:
            raise NoRoom(str(no_room[0]))
        if failed:
            raise InvalidArgument(
                f"load failed for model '{name}': ensemble {name} contains models that are not available or "
                f"ambiguous: {', '.join(sorted(failed))}\n"
            )

    async def _follow(self, name: str) -> None:
        """After a model has changed: loads the ensembles that use it again, with its new tensors. One that is being loaded is
        looked at when that load ends."""
        waiting = []
        for above in reversed(version_states.above(self._catalog.users, name)):
            record = self._catalog.records[above]
            if record.wanted and not record.operations and name in record.children:
                waiting.append(self._refresh(record))
        for operation in waiting:
            await operation.done.wait()

    def _refresh(self, record: Record) -> Operation:
        """Loads an ensemble again, because the models of its steps have changed."""
        operation = self.begin(record.name, LoadParameters(), explicit=False)
        operation.refresh = True
        return operation

    def _keep_up(self, operation: Operation) -> None:
        """After a load of an ensemble: it serves only with the models that its steps have (repository.ensemble_steps)."""
        record = operation.record
        if operation.refresh and operation.error is not None and operation.stopped_by is None:
            log.error("%s", str(operation.error).rstrip("\n"), extra={"subject": record.name})
        if record.operations or self._catalog.records.get(record.name) is not record:
            return
        if operation.refresh and operation.error is not None and operation.stopped_by is None:
            self._withdrawal.record(record)
        elif record.wanted and not self.closing and ensemble_steps.outdated(self._catalog.records, record):
            self._refresh(record)
