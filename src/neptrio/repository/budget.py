"""The memory that models may take together (--model-memory-budget), and when they are put away.

The problem: models that are loaded on demand add up until the kernel ends the server. The choice: what loaded models hold is
measured, what a load will take is estimated from its files until it was measured once, and a load begins only when both
together are within the budget. Room is made before the load, by putting away models that nobody uses
(repository.putting_away says which); what still leaves counts until it has left.

Rules:
 1. What models hold, what loads under way will hold, what is leaving and what the server has grown by (repository.own_growth)
    never add up to more than the budget, as far as it is known before a load; where a model turns out larger, others are put
    away at the next look. One model may be as large as the budget.
 2. A load for which there is no room waits while that may change, at most --load-wait-secs, else it fails with a reason that
    names who holds the memory. That is no failure of the model: the next request tries again. A load that has waited for a
    while is no longer passed by others.
 3. A model is put away only between requests, on the trio thread: what comes later loads it again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from neptrio.limits import shown
from neptrio.loop import periodic, threads
from neptrio.loop.slices import Slices
from neptrio.repository import putting_away, version_states
from neptrio.repository.demand import Demand
from neptrio.repository.expected_size import device_need, files_of, need
from neptrio.repository.holdings import Holdings, held_by, now_ms
from neptrio.repository.load_line import Aside
from neptrio.repository.own_growth import OwnGrowth
from neptrio.repository.putting_away import HOST, Hold, Holder, budget_text, size_text
from neptrio.repository.remembered_sizes import Remembered
from neptrio.repository.room_line import FIRST, RETRY_SECONDS, RoomLine, Sizes, Waiter
from neptrio.repository.waiting import NoRoom
from neptrio.settings import Settings

if TYPE_CHECKING:
    from neptrio.repository.catalog import Catalog
    from neptrio.repository.model import Model
    from neptrio.repository.model_builder import Found
    from neptrio.repository.records import Operation, Record
    from neptrio.repository.withdrawal import Withdrawal

log = logging.getLogger("neptrio.repository")

LOOK_SECONDS = 0.5  # between looks for idle models
MEASURED_SECONDS = 5.0  # between measurements of processes, which grow while they work
KEPT_SECONDS = 10.0  # between writings of what models hold
MODEL_SECONDS = 200e-6  # between looks for room, for each model that is looked at (20 us)
SEEN_SECONDS = 1.0  # for which what a look has found may be told


class Budget:
    """What models hold. Trio thread only."""

    def __init__(self, settings: Settings, catalog: Catalog, demand: Demand, withdrawal: Withdrawal) -> None:
        self._settings = settings
        self._catalog = catalog
        self._demand = demand
        self._withdrawal = withdrawal
        self.limits = settings.memory_budgets  # place -> bytes; {}: no budget
        self._holdings = Holdings(catalog, demand, withdrawal)
        self._line = RoomLine()
        self._looking = False  # for room
        self._next_look = 0.0  # of trio's clock
        self._seen: tuple[float, list[Holder]] = (0.0, [])  # the holders of the last look, and when that was
        self.remembered = Remembered(catalog.repositories.sizes_file(settings))
        self._own = OwnGrowth(catalog, withdrawal, LOOK_SECONDS)

    def rows(self) -> list[tuple[int, int, int]]:
        """(place, bytes that models hold, loads under way will hold, and models that leave still hold, budget)."""
        held, _ = self._holdings.total()
        return [(place, held.get(place, 0), limit) for place, limit in self.limits.items()]

    def grown_at(self, place: int) -> int:
        """Bytes of a budget that the server has grown by itself."""
        return self._own.counted(self.limits[place]) if place == HOST and HOST in self.limits else 0

    # ------------------------------------------------------------ room for loads

    async def make_room(self, operation: Operation, found: Found, aside: Aside) -> None:
        """Reserves what a load will take, once there is room for it; settle() ends that. Raises NoRoom. Where it has to
        wait, the load is `aside`."""
        name = operation.record.name
        if not self.limits:
            return
        known = self.remembered.of(name, found.digest)
        needs: dict[int, int] = {}
        for place, limit in self.limits.items():
            if place == HOST:
                held = 0 if known is None else known.held
                keeps = self._settings.model_cache_directory is not None
                size, least = need(found, held, keeps), held or files_of(found)
            else:
                size = least = device_need(found, place, 0 if known is None else known.devices.get(place, 0))
            if least <= limit:  # only its height may be above
                size = min(size, max(self._room_at(place), least))
            if size > limit:
                what = "" if place == HOST else f" of GPU {place}"
                raise NoRoom(
                    f"model '{shown(name)}' takes about {size_text(size)}{what}, more than {budget_text(place, limit)}"
                )
            needs[place] = size
        if not self._missing(None, needs, self._holdings.total()[0]):
            self._holdings.reserve(operation, needs)
            return
        async with aside():
            await self._room(operation, needs)

    def _room_at(self, place: int) -> int:
        """The bytes that models may hold: what the server has grown by itself they cannot have, unless one of them is so large."""
        limit = self.limits[place]
        grown = self.grown_at(place)
        if not grown:
            return limit
        largest = max((waiter.needs.get(place, 0) for waiter in self._line.first), default=0)
        return max(limit - grown, min(largest, limit))

    def _grown_text(self, place: int) -> str:
        grown = self.grown_at(place)
        return f", and {size_text(grown)} by the server" if grown else ""

    def _short(self, place: int, needs: Sizes, held: Sizes) -> int:
        """How many bytes of a place are missing for a load."""
        return held.get(place, 0) + needs[place] - self._room_at(place)

    def _missing(self, waiter: Waiter | None, needs: Sizes, held: Sizes) -> list[int]:
        """The places in which there is no room for a load yet."""
        before = self._line.promised_before(waiter)
        return [p for p in self.limits if self._short(p, needs, held) + before.get(p, 0) > 0]

    async def _room(self, operation: Operation, needs: Sizes) -> None:
        """Waits until there is room, and reserves it. Raises NoRoom."""
        name, where = operation.record.name, HOST
        operation.tell("waiting for room")
        with self._line.waiting(name, needs, operation.tell) as waiter:
            with trio.move_on_after(self._settings.load_wait_secs):
                while missing := self._missing(waiter, needs, self._holdings.total()[0]):
                    where = missing[0]
                    if waiter in self._line.first:
                        await self._look_for_room()
                        if waiter.hopeless is not None:
                            where = waiter.hopeless
                            break
                    await self._line.pause(waiter)
                else:
                    self._holdings.reserve(operation, needs)
                    return
        holders, together = [holder.at(where) for holder in self._seen_lately()], self._together(name)
        ensemble = next((together[holder.name] for holder in holders if holder.name in together), "")
        beside = f" beside other steps of '{shown(ensemble)}', which waits for it" if ensemble else ""
        raise NoRoom(
            f"there is no room for model '{shown(name)}', which takes about {size_text(needs[where])}{beside}: "
            f"{budget_text(where, self.limits[where])} is held by {putting_away.who_holds(holders)}{self._grown_text(where)}"
        )

    async def _look_for_room(self) -> None:
        """Puts away what the first in line need, unless that leaves already, and says which of them wait in vain."""
        if self._looking or trio.current_time() < self._next_look or self._leaves(len(self._line.first)):
            return
        self._looking = True
        try:
            holders = await self._holdings.holders_in_slices()
            self._seen = (trio.current_time(), holders)
            for waiter in self._line.first[:FIRST]:
                places = self._missing(waiter, waiter.needs, self._holdings.total()[0])
                holding = putting_away.who_holds(one.at(places[0] if places else HOST) for one in holders)
                waiter.tell(f"waiting for room, held by {holding}")
                if self._in_vain(waiter, places, holders) is not None:
                    # what was seen before others were served may be another's by now
                    waiter.hopeless = self._in_vain(waiter, places, self._holdings.holders())
            gone: set[str] = set()
            for place in self.limits:
                self._make_way(place, [holder.at(place) for holder in holders], gone)
            self._next_look = trio.current_time() + max(RETRY_SECONDS, MODEL_SECONDS * len(holders))
            self._line.loaded(len(holders))
            self._line.wake()
        finally:
            self._looking = False

    def _leaves(self, count: int) -> bool:
        """Whether what leaves makes room for the first so many in line."""
        held, leaving = self._holdings.total()
        needs = self._line.needed(count)
        return all(
            held.get(place, 0) + needs.get(place, 0) - leaving.get(place, 0) <= self._room_at(place)
            for place in self.limits
        )

    def _seen_lately(self) -> list[Holder]:
        """Those of the last look, or of now."""
        when, found = self._seen
        return found if found and trio.current_time() - when < SEEN_SECONDS else self._holdings.holders()

    def _in_vain(self, waiter: Waiter, places: list[int], holders: list[Holder]) -> int | None:
        """The first of these places in which waiting for room has no point."""
        together = self._together(waiter.name).keys()
        for place in places:
            here = [one.at(place) for one in holders]
            short = sum(one.size for one in here) + waiter.needs[place] - self._room_at(place)
            # what serves under this name stays until this load has replaced it
            others = [one for one in here if one.name != waiter.name or one.hold is Hold.LEAVING]
            if not putting_away.hopeful(others, short, together):
                return place
        return None

    def _make_way(self, place: int, holders: list[Holder], gone: set[str]) -> None:
        """Puts models away for as many of the first in line as can have room. `gone`: those that were put away for it."""
        first = [waiter for waiter in self._line.first if waiter.hopeless is None]
        may = [holder for holder in _without_leaving(holders) if holder.name not in gone]
        held, leaving = self._holdings.total()
        count = len(first)
        while count:
            needs = sum(waiter.needs.get(place, 0) for waiter in first[:count])
            short = held.get(place, 0) + needs - leaving.get(place, 0) - self._room_at(place)
            victims = putting_away.choose(may, short)
            for victim in victims:
                if self._may_go(victim.name, gone):
                    gone.add(victim.name)
                    self.put_away(victim.name, f"room for '{first[0].name}'")
            if victims:
                return
            count //= 2

    def _may_go(self, name: str, gone: set[str]) -> bool:
        """Whether nobody has asked for a model since it was looked at, or needs it, and it is still there."""
        record = self._catalog.records.get(name)
        serving = list(record.serving.values()) if record is not None else []
        if record is None or not serving:
            return False
        now = self._holdings.model(record, serving, now_ms())
        return now.hold is None and gone.issuperset(now.needed_by)

    def _together(self, name: str) -> dict[str, str]:
        """Models that stay because an ensemble waits for this one, which it needs with them, and that ensemble."""
        found: dict[str, str] = {}
        records, users = self._catalog.records, self._catalog.users
        for ensemble in version_states.above(users, name):
            if records[ensemble].operations:
                todo = list(records[ensemble].children)
                while todo:
                    child = todo.pop()
                    if child != name and child not in found:
                        found[child] = ensemble
                        todo += records[child].children if child in records else ()
        return found

    def settle(self, operation: Operation) -> None:
        """A load for which there was room has ended: what it has made is measured from now on. Where that was not needed, it
        holds its memory until it has stopped."""
        if operation.building or operation.discarding:
            return
        if self._holdings.release(operation):
            self._remember(operation.record)
            self._shrink()  # it may have turned out larger
            self.freed()

    def freed(self) -> None:
        """Memory may have come free."""
        self._line.wake()

    def _remember(self, record: Record) -> None:
        """Notes what a model holds."""
        held = held_by(record.serving.values())
        if any(held.values()):
            self.remembered.note(record.name, record.digest, held, record.last_seconds)

    def put_away(self, name: str, why: str) -> None:
        """Takes a model out of service that nobody uses; the next request loads it again."""
        record, known = self._catalog.records[name], self._demand.known[name]
        log.info("putting '%s' away: %s", name, why, extra={"subject": name})
        self._remember(record)
        known.put_away += 1
        record.wanted = record.explicit = False
        self._holdings.forget(name)
        self._withdrawal.record(record, why)

    # ------------------------------------------------------------ looks

    async def watch(self) -> None:
        """Puts away what is idle, and what is above the budget because models have grown, for ever."""
        measured = kept = trio.current_time()
        if HOST in self.limits:
            await self._own.look(loading=False)

        async def turn() -> None:
            nonlocal measured, kept
            now = trio.current_time()
            if self.limits and now - measured >= MEASURED_SECONDS:
                measured = now  # also where it fails: then the next turn does the rest
                await self.measure()
            await self.look()
            if HOST in self.limits:
                await self._own.look(self._holdings.loading)
            if self.remembered.due and now - kept >= KEPT_SECONDS:
                kept = now
                await self.keep()

        await periodic.for_ever(LOOK_SECONDS, turn, "looking what models hold", log)

    async def recall(self) -> None:
        """Takes up what was remembered at an earlier start."""
        if self.limits:
            with suppress(threads.NoThread):
                self.remembered.take(await threads.run(self.remembered.read, abandon_on_cancel=True))

    async def keep(self) -> None:
        """Writes down what models hold, for the next start."""
        if self.remembered.due:
            with suppress(threads.NoThread):
                await threads.run(self.remembered.write, self.remembered.snapshot(), abandon_on_cancel=True)

    async def look(self) -> None:
        """Notes how models are used, and puts away what is to be put away now. In slices."""
        slices = Slices()
        for record in list(self._catalog.records.values()):
            serving = list(record.serving.values())
            if serving:
                now = now_ms()
                holder = self._holdings.model(record, serving, now)
                known = self._demand.known.get(record.name)
                seconds = None if known is None else known.residence.idle_seconds
                if seconds is not None and putting_away.idle(holder, seconds, now):
                    self.put_away(record.name, f"idle for {seconds:g} s")
            await slices.rest()
        self._shrink()

    def _shrink(self) -> None:
        """Puts models away while they hold more than the budget."""
        held, leaving = self._holdings.total()
        for place, limit in self.limits.items():
            room = self._room_at(place)
            if held.get(place, 0) - leaving.get(place, 0) <= room:
                continue
            here = _without_leaving([holder.at(place) for holder in self._holdings.holders()])
            largest = max((holder.size for holder in here), default=0)
            over = sum(holder.size for holder in here) - max(room, min(largest, limit))
            for victim in putting_away.choose(here, over):
                self.put_away(victim.name, "models have grown beyond the budget")

    async def measure(self) -> None:
        """Measures the processes of models again."""
        grown = list(self._processes())
        if not grown:
            return

        def measure() -> None:
            for model in grown:
                model.measure_processes(again=True)

        try:
            await threads.run(measure, abandon_on_cancel=True)
        except threads.NoThread:
            return
        for model in grown:
            if model.healthy:
                model.memory_changed()

    def _processes(self) -> Iterator[Model]:
        for record in self._catalog.records.values():
            for model in record.serving.values():
                if model.backend.own_processes:
                    yield model


def _without_leaving(holders: list[Holder]) -> list[Holder]:
    """Those that do not leave already: a name that leaves may serve again, too."""
    return [holder for holder in holders if holder.hold is not Hold.LEAVING]
