"""Takes models out of service: they accept nothing from then on, and are finalized after their last answer.

Rules:
 1. A model answers all requests it has accepted before it is finalized. Models of an ensemble's steps outlive
    the last request of every ensemble that was withdrawn together with them.
 2. After a model was finalized its memory is given back to the system (observe.memory.give_back).
 3. The folder of a file override is removed when the models loaded from it are gone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress

from neptrio.errors import Internal, TritonError
from neptrio.loop import threads
from neptrio.observe import memory
from neptrio.observe.memory import MemoryProbe, Release
from neptrio.repository import version_states
from neptrio.repository.catalog import Catalog
from neptrio.repository.model import Model
from neptrio.repository.override import Folder
from neptrio.repository.records import Record, Retirement, Row
from neptrio.repository.version_states import Event, State

log = logging.getLogger("neptrio.repository")


class Withdrawal:
    """Takes models out of service. Trio thread only."""

    def __init__(self, catalog: Catalog, probe: MemoryProbe) -> None:
        """`probe` measures loads, beside which models leave."""
        self._catalog = catalog
        self._probe = probe
        self._releases: list[Release] = []  # whose models are gone, but for what the allocator keeps of them
        self.returning: list[
            tuple[str, int]
        ] = []  # of these: the model, and how many bytes it held of this process
        self.folders: set[Folder] = set()  # temporary folders of file overrides
        self.give_back: Callable[[bool], None] = memory.give_back
        self._giving_back = self._once_more = self._with_cycles = False

    def unload(self, name: str, unload_dependents: bool) -> None:
        """Takes a model out of service; accepted requests are still answered (state UNLOADING).

        Ensembles that use it are taken out too, and come back with it unless `unload_dependents` is set, which
        also unloads models that were loaded only because an ensemble needs them.
        """
        record = self._catalog.records.get(name)
        if record is None:
            return
        outdated = Internal(version_states.OUTDATED)
        records, users = self._catalog.records, self._catalog.users
        orphans = version_states.orphans(records, users, name) if unload_dependents else ()
        for above in version_states.above(users, name):
            other = self._catalog.records[above]
            other.wanted = other.wanted and not unload_dependents
            self._outdate(other, outdated)
            self.record(other)
        for gone in (record, *(self._catalog.records[orphan] for orphan in orphans)):
            gone.wanted, gone.explicit, gone.chosen = False, False, None
            self._catalog.lack(gone, False)
            self._catalog.unname(gone.name)
            self._outdate(gone, outdated)
            self.record(gone)

    def _outdate(self, record: Record, reason: TritonError) -> None:
        for operation in list(record.operations):
            operation.cancel(reason)
            operation.release()
        for row in record.rows.values():
            if row.state in (State.LOADING, State.RELOADING):
                row.apply(Event.ABANDON)

    def record(self, record: Record, why: str = version_states.UNLOADED) -> None:
        """Takes all versions of a model out of service at once; `why` is told of one that is loaded on demand."""
        demand = self._catalog.demand
        if demand is not None and record.name in demand.known:
            record.put_counters_by()
        for version, row in record.rows.items():
            self.row(record, version, row)
        if demand is not None:
            demand.withdrawn(record.name, why)
        if self._catalog.latest.pop(record.name, None) is not None:
            record.override = record.fingerprint = None
            record.steps = {}
            folder, record.folder = record.folder, None
            if folder is not None:
                self.release_folder(record, folder)

    def row(self, record: Record, version: int, row: Row) -> None:
        model, row.model = row.model, None
        row.apply(Event.WITHDRAW)
        if model is not None:
            self.retire(record, version, model)

    def retire(self, record: Record, version: int, model: Model) -> None:
        log.info("unloading: %s:%d", record.name, version)
        model.withdraw()
        retirement = Retirement(version, model)
        record.retiring.append(retirement)
        if self._catalog.nursery is not None:
            self._catalog.nursery.start_soon(self._retiring, record, retirement)
        else:  # the server was cancelled from outside, so nobody can wait for the requests
            record.retiring.remove(retirement)

    async def _retiring(self, record: Record, retirement: Retirement) -> None:
        for user in list(self._catalog.users.get(record.name, ())):
            other = self._catalog.records.get(user)
            for above in list(other.retiring) if other is not None else ():
                await above.drained.wait()
        release: Release | None = None
        try:
            await retirement.model.drain()
            retirement.drained.set()
            release = self._probe.releasing(retirement.model.cpu_bytes)
            await retirement.model.stop()
        except Exception:
            log.exception("stopping model '%s' failed", record.name)
        else:
            # scripts wait for a Triton server's text
            log.info("successfully unloaded '%s' version %d", record.name, retirement.version)
        finally:
            if release is not None:
                self._releases.append(release)
        retirement.drained.set()
        record.retiring.remove(retirement)
        self.returning.append((record.name, retirement.model.cpu_bytes))
        record.keep(retirement)
        if not any(other.version == retirement.version for other in record.retiring):
            row = record.rows.get(retirement.version)
            if row is not None:
                row.apply(Event.RETIRED)
        retirement.done.set()
        self._freed()
        self._once_more = True
        self._with_cycles |= retirement.model.backend.runs_code_here
        if not self._giving_back and self._catalog.nursery is not None:
            self._catalog.nursery.start_soon(self._give_back)

    def _freed(self) -> None:
        if self._catalog.budget is not None:
            self._catalog.budget.freed()

    async def _give_back(self) -> None:
        """Gives memory of unloaded models back to the system, once for all that retire at the same time."""
        if self._giving_back:
            return
        self._giving_back = True
        try:
            while self._once_more:
                with_cycles, self._once_more, self._with_cycles = self._with_cycles, False, False
                releases, self._releases = self._releases, []
                freed = len(self.returning)
                with suppress(threads.NoThread):  # it is given back after the next unload
                    await threads.run(self.give_back, with_cycles, abandon_on_cancel=True)
                self._probe.released(releases)
                del self.returning[:freed]
                self._freed()
        finally:
            self._giving_back = False

    def release_folder(self, record: Record, folder: Folder) -> None:
        """Removes the folder of a file override after the models loaded from it are gone."""

        async def release() -> None:
            for retirement in list(record.retiring):
                await retirement.done.wait()
            self.folders.discard(folder)
            folder.release()

        if self._catalog.nursery is not None:
            self._catalog.nursery.start_soon(release)
