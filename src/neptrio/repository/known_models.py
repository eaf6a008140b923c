"""The models that are loaded on demand: which there are, what is known of each, and how that follows the repositories.

The problem: what a model's folder says is needed before the model is there, and folders come, change and go while the server runs.
The choice: at the start and every --repository-poll-secs the repositories are looked at (repository.signature says what is read),
and each load tells what it has found.

Rules:
 1. A model is forgotten when it was gone at two looks in a row: who replaces a folder may take it away for a moment. One that is
    loaded stays known.
 2. A look at repositories that cannot be listed changes nothing.
 3. What the folder says counts for the next load; while the model serves, what it was loaded from counts.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import trio

from neptrio.config import demand as demand_config
from neptrio.config.demand import Residence
from neptrio.errors import InvalidArgument, TritonError
from neptrio.loop import threads
from neptrio.loop.slices import Slices
from neptrio.repository import signature as signatures
from neptrio.repository.demand_states import Event, Standing, State
from neptrio.repository.signature import ABOUT, FolderState, Listing, Reading, Signature, read_folder
from neptrio.repository.waiting import Room
from neptrio.settings import Settings

if TYPE_CHECKING:
    from neptrio.repository.catalog import Catalog
    from neptrio.repository.model_builder import Found


@dataclass(slots=True)
class Ended:
    """The end of a load, for those that wait for it."""

    event: trio.Event = field(default_factory=trio.Event)
    refusal: str = ""  # there was no room for it


@dataclass(slots=True)
class Known:
    """A model that is loaded when it is asked for."""

    name: str
    signature: Signature | None = None  # None: its configuration could not be read, the load will say why
    residence: Residence = field(default_factory=Residence)
    state: FolderState = ()  # of its folder when the signature was read there
    missing: bool = False  # at the last look it had no folder
    standing: Standing = field(default_factory=Standing)
    room: Room | None = None  # while requests wait
    ended: Ended | None = None  # of the load under way, while somebody waits for it
    hits: int = 0  # requests that found it loaded, as they were counted last (repository.demand_view)
    misses: int = 0  # requests that had to wait
    released: int = 0  # of these, requests that went to the model
    loads: int = 0
    load_failures: int = 0
    put_away: int = 0

    def document(self) -> dict[str, Any]:
        """What the progress verb says of it."""
        return {
            "state": self.standing.state.value,
            **({"reason": self.standing.why} if self.standing.why else {}),
            "waiting": 0 if self.room is None else len(self.room),
            "misses": self.misses,
            "loads": self.loads,
            "load_failures": self.load_failures,
            "put_away": self.put_away,
        }


class KnownModels:
    """Trio thread only, but for read()."""

    def __init__(self, settings: Settings, catalog: Catalog) -> None:
        self._settings = settings
        self._catalog = catalog
        self.known: dict[str, Known] = {}
        self.states: Counter[State] = Counter()  # how many of them are in each state
        self._turns: list[str] = []  # those whose folders are to be looked at before the others are again

    @property
    def marked(self) -> bool:
        """Whether only models are loaded on demand whose configuration says so."""
        return self._settings.model_control_mode == "explicit"

    async def look(self) -> None:
        """Lists the repositories and reads the configurations of models that are not known yet, and of those that have changed
        (repository.signature); forgets those that were gone at the look before, too (rule 1). Raises InvalidArgument for a repository that cannot be listed."""
        names = await self._catalog.repositories.listed()
        slices = Slices()  # there may be thousands
        for one in list(self.known.values()):
            await slices.rest()
            name, gone = one.name, one.name not in names
            if self.known.get(name) is not one:
                continue  # another look has forgotten it meanwhile
            if gone and one.missing and one.standing.state not in (State.LOADING, State.READY):
                del self.known[name]
                one.standing.leave()
                self._catalog.readiness.notify(name)
                self._catalog.names.forget(name)  # also where rows of it are still shown
            elif one.missing and not gone:
                one.standing.forgive()
            one.missing = gone
        missing = [name for name in names if name not in self.known]
        looked_at = self._next_looked_at()
        if missing or looked_at:
            found = await threads.run_surely(self._read, missing, looked_at, abandon_on_cancel=True)
            for name, reading in found.items():
                await slices.rest()
                known = self.known.get(name)
                if known is None:
                    known = self.add(name, reading.signature, reading.residence)
                else:  # it has changed, or a load has made it known meanwhile
                    self._take(known, reading)
                known.state = reading.state

    def _next_looked_at(self) -> list[tuple[str, FolderState]]:
        """The models whose folders it is the turn of, and what is known of those."""
        if not self._turns:
            self._turns = list(self.known)
        turns, self._turns = self._turns[:ABOUT], self._turns[ABOUT:]
        here = (known for name in turns if (known := self.known.get(name)) is not None and not known.missing)
        return [(known.name, known.state) for known in here]

    def _take(self, known: Known, reading: Reading) -> None:
        """This is what the model's folder says now. Of a model that serves it counts when that is put away."""
        signature, before = reading.signature, known.signature
        known.signature = signature
        if known.name not in self._catalog.latest:
            known.residence = reading.residence
            self._tell_names(known)
            if signature != before:
                self._catalog.readiness.notify(known.name)

    def _tell_names(self, known: Known) -> None:
        if known.signature is not None:
            self._catalog.names.tell(known.name, known.signature.labels, known.signature.aliases)

    def _read(self, names: list[str], looked_at: list[tuple[str, FolderState]]) -> Listing:
        """What is kept of these models, and of those of which something else was known. On another thread."""
        return self.read([*names, *(name for name, state in looked_at if not signatures.current(state))])

    def read(self, names: list[str]) -> Listing:
        """What is kept of each of these models. On another thread."""
        found: Listing = {}
        for name in names:
            try:
                folders = self._catalog.repositories.folders(name)
            except InvalidArgument:
                continue
            one = read_folder(folders[0], self._settings.model_config_name, self.marked) if folders else None
            if one is not None:
                found[name] = one
        return found

    def add(self, name: str, signature: Signature | None, residence: Residence) -> Known:
        """There is such a model from now on."""
        known = self.known[name] = Known(name, signature, residence)
        known.standing.count(self.states)
        self._tell_names(known)
        record = self._catalog.records.get(name)
        if record is not None and record.operations:
            known.standing.apply(Event.BEGIN, 0)
        if name in self._catalog.latest:
            known.standing.apply(Event.LOADED, 0)
        return known

    def renew(self, name: str, found: Found) -> None:
        """A load has found this. What a call has brought along says nothing of the next load."""
        known, config = self.known.get(name), found.source.config
        if known is None:
            if not found.listed or (self.marked and not _is_marked(config)):
                return
            known = self.add(name, None, Residence())
        try:
            known.residence = demand_config.residence(config)
        except TritonError:  # the load is refused for it
            known.residence = Residence()
        if found.digest:
            with suppress(TritonError):
                known.signature = Signature.of(config, found.versions)


def _is_marked(config: Any) -> bool:
    try:
        return demand_config.on_demand(config)
    except TritonError:
        return False
