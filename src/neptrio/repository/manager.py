"""The repository manager: the verbs that the rest of the server calls, polling, start-up and shutdown.

It joins the parts: repository.version_states has the states, repository.model_builder makes models, repository.loads runs
loads, repository.withdrawal takes models out of service, repository.catalog knows what serves. Loads and
retirements are tasks in the manager's own nursery. So a caller who is cancelled does not end them, and a load
that never ends delays neither newer operations nor the shutdown.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import trio

from neptrio.errors import Internal, InvalidArgument, NotFound, TritonError, Unavailable, raise_it
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of
from neptrio.limits import shown
from neptrio.loop import periodic, threads
from neptrio.loop.mailbox import CompletionQueue
from neptrio.observe.memory import MemoryProbe
from neptrio.repository import override
from neptrio.repository.budget import Budget
from neptrio.repository.catalog import Catalog
from neptrio.repository.demand import Demand
from neptrio.repository.demand_view import DemandView
from neptrio.repository.loads import EXITING, Loads
from neptrio.repository.model_builder import ModelBuilder
from neptrio.repository.model_names import Change
from neptrio.repository.override import LoadParameters
from neptrio.repository.records import Operation
from neptrio.repository.withdrawal import Withdrawal
from neptrio.scheduling.base import LoopServices
from neptrio.settings import Settings

log = logging.getLogger("neptrio.repository")


KEEP_SECONDS = 2.0  # how long writing down what models hold may delay the shutdown
REFRESH_SECONDS = 30.0  # how long listing cloud storage may delay the start, or a poll


class RepositoryManager(Catalog):
    """Finds, loads, serves and unloads models. Trio thread only."""

    def __init__(
        self,
        settings: Settings,
        loop: LoopServices,
        completions: CompletionQueue,
        host: Callable[[RepositoryManager], ModelHost],
    ) -> None:
        """`host` makes the ModelHost for models' calls from this manager, which is part of it."""
        super().__init__(settings)
        self.host = host(self)
        probe = MemoryProbe()
        self.withdrawal = Withdrawal(self, probe)
        self.loads = Loads(
            settings,
            self,
            self.withdrawal,
            ModelBuilder(settings, self.repositories, loop, completions, self.host, probe),
        )
        self.demand_view: DemandView | None = None
        if settings.loads_by_request:
            self.demand = Demand(settings, self, loop, self.loads.begin)
            self.demand_view = DemandView(self, self.demand)
            self.budget = Budget(settings, self, self.demand, self.withdrawal)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The nursery of all loads and retirements; runs until it is cancelled."""
        try:
            async with trio.open_nursery() as self.nursery:
                task_status.started()
                await trio.sleep_forever()
        finally:
            self.nursery = None

    @property
    def left_behind(self) -> int:
        """Threads and unfinished models of invalidated loads that have not ended."""
        return self.loads.builder.left_behind + self.loads.discarding

    async def _refresh(self) -> None:
        """Lists the repositories in cloud storage again."""
        if self.repositories.cloud:
            with trio.move_on_after(REFRESH_SECONDS) as scope:
                await threads.run_surely(self.repositories.refresh, abandon_on_cancel=True)
            if scope.cancelled_caught:
                log.error("cloud storage has not listed its models within %g s", REFRESH_SECONDS)

    async def load_all(self) -> None:
        """Start-up: loads every model (modes none and poll) or those named (explicit, on-demand)."""
        operations: dict[str, Operation] = {}

        def begin(names: Iterable[str]) -> None:
            known = () if self.demand is None else self.demand.known
            for name in names:
                if name not in operations and (name not in known or name in self._settings.load_model):
                    operations[name] = self.loads.begin(name, LoadParameters())

        if self.budget is not None:
            await self.budget.recall()
        if self._settings.model_control_mode == "on-demand":
            await self._refresh()
        await self._look()
        for place, hints in (await threads.run(self.repositories.loose, abandon_on_cancel=True)).items():
            for hint in hints:
                log.warning("%s: %s", place, hint)
        if self._settings.loads_by_request and "*" not in self._settings.load_model:
            begin(self._settings.load_model)
            if self._settings.model_control_mode == "explicit":
                await self._refresh()
        else:
            try:
                begin(await self.repositories.listed())  # local models do not wait for the cloud storage
                await self._refresh()
                begin(await self.repositories.listed())
            except InvalidArgument as error:
                if self._settings.exit_on_error:
                    raise
                self._unopened(error)
        failed = bool(self.repositories.problems)
        why: TritonError | None = None
        for operation in operations.values():
            await operation.done.wait()
            if operation.error is not None:
                failed = True
                why = why or operation.error
                log.error("%s", str(operation.error).rstrip("\n"), extra={"subject": operation.record.name})
        if failed and self._settings.exit_on_error:
            raise Internal("failed to load all models") from why

    async def _look(self) -> None:
        """Looks which models are loaded on demand. In mode explicit repositories may come later."""
        if self.demand is None:
            return
        self.demand.serve(self.host.admission)
        try:
            await self.demand.look()
        except InvalidArgument as error:
            if self._settings.model_control_mode == "explicit":
                return
            if self._settings.exit_on_error:
                raise
            self._unopened(error)
        else:
            if self._settings.model_control_mode == "on-demand":
                self._unopened(None)

    async def watch(self) -> None:
        """Mode on-demand: looks every --repository-poll-secs for folders that are new or gone, for ever."""

        async def look() -> None:
            await self._refresh()
            await self._look()

        await periodic.for_ever(
            self._settings.repository_poll_secs, look, "listing the model repository", log
        )

    def _unopened(self, error: TritonError | None) -> None:
        """Notes whether the repositories could be listed at the start; until they are, the server is not ready."""
        text = "" if error is None else text_of(error)
        if text != self.unopened:
            self.unopened = text
            self.readiness.notify()
            if text:
                log.error("%s", text)

    async def load(
        self,
        name: str,
        parameters: dict[str, Any],
        repository: str = "",
        check_reach: Callable[[str], None] | None = None,
    ) -> None:
        """Loads or reloads a model; returns when it serves, or at once with `async`. `repository` is what the caller calls
        the repository to load from, "" for any. `check_reach` raises Denied for an alias, or a step of an
        ensemble, that the caller's configuration may not have.

        Raises the load's TritonError. A caller that is cancelled does not end the load.
        """
        self.repositories.select(repository)
        parsed = override.parse(parameters, repository, check_reach)
        operation = self.loads.begin(name, parsed)
        if parsed.return_at_once:
            return
        await operation.done.wait()
        try:
            raise_it(operation.error)
        finally:
            del operation  # its error refers to this call's frame

    async def unload(self, name: str, unload_dependents: bool, repository: str = "") -> None:
        """Takes a model out of service and returns; accepted requests are still answered (state UNLOADING).

        Ensembles that use it are taken out too, and come back with it unless `unload_dependents` is set, which
        also unloads models that were loaded only because an ensemble needs them. Raises NotFound for a model that was
        loaded from another repository than the one that the caller calls `repository`.
        """
        record = self.records.get(name)
        place = record.place if record is not None and record.serving else None
        if repository and not self.repositories.has(repository, place or Path()) and place is not None:
            raise NotFound(f"model '{shown(name)}' was not loaded from the repository '{shown(repository)}'")
        self.withdrawal.unload(name, unload_dependents)
        await trio.lowlevel.checkpoint()

    async def told_names(self, name: str) -> dict[str, Any]:
        """The labels and aliases of a model, and the versions that labels may name. Raises NotFound."""
        own = self.own_name(name)
        if not self.is_model(own) and not await self.repositories.have(own):
            raise self._unknown(name)
        return {"name": own, "versions": sorted(self.versions(own)), **self.names.document(own)}

    async def set_names(self, name: str, change: Change) -> dict[str, Any]:
        """Sets and removes labels and aliases of a model, all at once, and returns told_names(). Raises NotFound, and
        InvalidArgument for a label of a version that is not there, and for an alias that is the name of a model."""
        own = str((await self.told_names(name))["name"])
        taken = [alias for alias, wanted in change.aliases.items() if wanted]
        folders = await self.repositories.listed() if taken else {}
        for alias in taken:
            if alias in folders and alias != own:
                raise InvalidArgument(f"alias '{alias}' of model '{own}' is the name of another model")
        if taken and not self.versions(own):
            raise InvalidArgument(
                f"model '{own}' has no version that serves: load it before it gets an alias"
            )
        self.check_names(own, self.versions(own), change)
        self.names.change(own, change)
        for label, number in change.labels.items():
            log.info(
                "version label '%s' of '%s' %s",
                label,
                own,
                f"names version {number}" if number else "is unset",
            )
        for alias, wanted in change.aliases.items():
            log.info("alias '%s' %s '%s'", alias, "names" if wanted else "no longer names", own)
        return await self.told_names(own)

    async def poll_once(self) -> None:
        """Mode poll: loads models that are new or have changed, unloads those whose folder is gone."""
        await self._refresh()
        names = await self.repositories.listed()
        self._unopened(None)
        for name in list(self.records):
            record = self.records[name]
            if name not in names and not record.operations:
                self.withdrawal.unload(name, False)
                if not record.retiring:
                    self.forget(name)
        operations = []
        for name in names:
            record_now = self.records.get(name)
            chosen = record_now.chosen if record_now is not None else None
            current = await self.loads.builder.fingerprint(name, chosen)
            if record_now is not None and (record_now.operations or current == record_now.polled):
                continue
            operations.append(self.loads.begin(name, LoadParameters()))
        for operation in operations:
            await operation.done.wait()
            if operation.error is not None:
                log.error("%s", str(operation.error).rstrip("\n"), extra={"subject": operation.record.name})

    async def poll(self) -> None:
        """Mode poll: polls every --repository-poll-secs, for ever."""
        await periodic.for_ever(
            self._settings.repository_poll_secs, self.poll_once, "polling the model repository", log
        )

    def tell_requests(self) -> None:
        """Logs what the shutdown waits for, with a Triton server's texts, for which scripts look."""
        busy = [model for model in self.serving() if model.inflight]
        seconds = self._settings.exit_timeout_secs
        log.info("Timeout %g: Found %d model versions that have in-flight inferences", seconds, len(busy))
        for model in busy:
            log.info(
                "Model '%s' (version %s) has %d in-flight inferences",
                model.name,
                model.version,
                model.inflight,
            )

    def close(self) -> None:
        """Shutdown has begun: loads end at once, and no new one starts."""
        self.loads.closing = True
        for record in self.records.values():
            for operation in list(record.operations):
                operation.cancel(Unavailable(EXITING))

    async def unload_all(self) -> None:
        """Shutdown: unloads every model after its accepted requests are answered."""
        self.close()
        if self.budget is not None:
            with trio.move_on_after(KEEP_SECONDS):
                await self.budget.keep()
        try:
            for record in list(self.records.values()):
                for operation in list(record.operations):
                    await operation.done.wait()
            for name in list(self.records):
                self.withdrawal.unload(name, False)
            for record in list(self.records.values()):
                for retirement in list(record.retiring):
                    await retirement.done.wait()
        finally:
            for folder in list(self.withdrawal.folders):
                folder.release()
            self.withdrawal.folders.clear()
            self.repositories.close()
