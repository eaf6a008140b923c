"""The slot table, explored until nothing new is found: every order of every event.

A state is written down as a `Key`: what the table holds, without clock and identities. Ids are named
in the order in which they appear, times are ranks, instances and the slots of one instance stand in a
fixed order, because which of two equal ones it is makes no difference to what follows. From a key a
real SlotTable is built, one event is applied to it, every rule is checked, and the key of the result
is new or known. Breadth first, the set of keys closes: there is no reachable state that was not
checked, whatever the length of the history.

Bounds: three ids; so many runs of ids at once that hold a slot or wait for one (`runs`; an id whose
END is queued may start again, so runs and ids differ); two unfinished requests per run; one instance
more than at the start, while a retired one still has sequences. Requests that would go beyond are not
sent, nothing else is left out. `NEPTRIO_SOAK=1` explores more runs.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from neptrio.scheduling import sequence_slots as slots
from neptrio.scheduling.sequence_slots import Sequence, SlotTable, StartMissing

IDS = ("a", "b", "c")
PER_RUN = 2  # unfinished requests
NOW = 10**9
FAR = 10**15
LIVE = (slots.ACTIVE, slots.WAITING)
RANK_NS = 1_000_000  # between one deadline in the backlog and the next

Key = tuple[tuple[Any, ...], tuple[Any, ...]]  # instances, backlog
Event = tuple[Any, ...]


class Bounds(NamedTuple):
    """What is explored: the instances at the start, whether they come and go, the strategy, how much."""

    instances: int
    per_instance: int
    oldest: bool  # the next request is taken from the list of ready sequences
    scaling: bool  # instances retire and come
    runs: int


class Request:
    """What the table looks at of a request."""

    __slots__ = ("cancelled", "run", "sequence_end", "sequence_start", "timeout_us")

    def __init__(self, start: bool = False, end: bool = False, timeout_us: int = 0) -> None:
        self.sequence_start = start
        self.sequence_end = end
        self.timeout_us = timeout_us
        self.cancelled = False
        self.run: Sequence | None = None


# ------------------------------------------------------------ tables and keys


def encode(table: SlotTable) -> Key:
    """The table's key."""
    idle = {s: i for i, s in enumerate(table._idle)}
    ready = {s: i for row in table.ready for i, s in enumerate(r for r in row if r.state != slots.GONE)}
    waiting_until = sorted({s.expires_ns for s in table._backlog if s.state != slots.GONE and s.expires_ns})
    until = {when: i + 1 for i, when in enumerate(waiting_until)}

    def plain(s: Sequence | None) -> Any:
        if s is None:
            return ()
        flight = 0 if s.in_flight is None else 1 + s.in_flight.cancelled
        waiting = tuple([r.cancelled for r in s.waiting or ()])
        expires = until.get(s.expires_ns, 0) if s.slot < 0 else 0
        return (s.state, flight, waiting, expires, idle.get(s, -1), ready.get(s, -1), s.id)

    rows = []
    for instance, row in enumerate(table.slots):
        if row:
            rows.append((instance in table._retired, sorted(map(plain, row))))
    rows.sort(key=_nameless)
    backlog = [plain(s) for s in table._backlog if s.state != slots.GONE]
    alike = any(_nameless(x) == _nameless(y) for x, y in itertools.pairwise(rows)) or any(
        p and p[:6] == q[:6] for _, held in rows for p, q in itertools.pairwise(held)
    )
    if alike:  # which of them comes first?
        return min(_named(order, backlog) for order in _orders(rows))
    return _named(rows, backlog)


def _nameless(row: Any) -> Any:
    return (row[0], [p[:6] for p in row[1]])


def _orders(rows: list[Any]) -> Iterator[list[Any]]:
    """Every order of rows, and of slots in them, in which only ids tell them apart."""
    wanted = [*map(_nameless, rows)]
    for order in itertools.permutations(rows):
        for slots_of in itertools.product(*(itertools.permutations(held) for _, held in order)):
            found = [(retired, list(held)) for (retired, _), held in zip(order, slots_of, strict=True)]
            if [*map(_nameless, found)] == wanted:
                yield found


def _named(rows: list[Any], backlog: list[Any]) -> Key:
    """With ids named in the order of their appearance. Slots that differ in their ids only stand in the
    order of these names too, or one state would have two keys."""
    names: dict[str, str] = {}

    def named(p: Any) -> Any:
        return p and (*p[:6], names.setdefault(p[6], chr(ord("a") + len(names))))

    made = [(retired, tuple([named(p) for p in held])) for retired, held in rows]
    return tuple(made), tuple([named(p) for p in backlog])


def decode(key: Key, bounds: Bounds) -> SlotTable:
    """A table whose key is `key`."""
    rows, backlog = key
    table = SlotTable(0, bounds.per_instance, FAR, bounds.oldest)
    idle: dict[int, Sequence] = {}

    def made(p: Any) -> Sequence:
        state, flight, waiting, expires, rank, _, name = p
        s = Sequence(name, 0)
        s.state = state
        if state in (slots.ENDING, slots.WAITING_ENDED):
            s.reason = "before"
        else:
            table.live[name] = s
        requests = []
        for cancelled in waiting:
            request = Request()
            request.cancelled = cancelled
            request.run = s
            requests.append(request)
        s.waiting = deque(requests) if requests else None
        if flight:
            s.in_flight = Request()
            s.in_flight.cancelled = flight == 2
            s.in_flight.run = s
            s.started = True
            table.in_flight += 1
        if expires:
            s.expires_ns = NOW + RANK_NS * expires
            heapq.heappush(table._timeouts, (s.expires_ns, next(table._order), s))
        if rank >= 0:
            idle[rank] = s
        return s

    for instance, (retired, held) in enumerate(rows):
        table.add_instance()
        ready: dict[int, Sequence] = {}
        for slot, p in enumerate(held):
            if p:
                s = made(p)
                s.slot, s.instance = slot, instance
                table.slots[instance][slot] = s
                table.held[instance] += 1
                table.slots_used += 1
                table.waiting[instance] += len(s.waiting or ())
                table._free.remove((slot, instance))
                if p[5] >= 0:
                    ready[p[5]] = s
                    s.offered = True
        if retired:
            table._retired.add(instance)
            table._free = [entry for entry in table._free if entry[1] != instance]
        table.ready[instance].extend(ready[i] for i in sorted(ready))
        heapq.heapify(table._free)
    for p in backlog:
        s = made(p)
        table._backlog.append(s)
        table.backlog_sequences += 1
        table.backlog_requests += len(s.waiting or ())
    for rank in sorted(idle):
        idle[rank].last_ns = 1000 + rank
        table._idle[idle[rank]] = None
    return table


# ------------------------------------------------------------ the rules, in one state


def tally(table: SlotTable) -> tuple[int, ...]:
    """Every number that the table keeps; tables with equal keys must agree in them."""
    return (
        len(table._free),
        len(table.live),
        len(table._idle),
        len(table._retired),
        table.slots_used,
        table.backlog_sequences,
        table.backlog_requests,
        table.in_flight,
        sum(table.waiting),
        sum(table.held),
    )


def check(table: SlotTable, oldest: bool) -> None:
    """Rules 1, 4, 5, 6 and 11 of sequence_slots, and that every number is the count it claims to be."""
    held: list[Sequence] = []
    everything: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    requests = flights = 0
    for i, row in enumerate(table.slots):
        assert bool(row) != (i in table._vacant)
        offered = [s for s in table.ready[i] if s.state != slots.GONE]
        wants, here, queued = [], 0, 0
        for slot, s in enumerate(row):
            if i not in table._retired:
                everything.add((slot, i))
            if s is None:
                continue
            taken.add((slot, i))
            held.append(s)
            here += 1
            assert (s.instance, s.slot) == (i, slot)
            assert s.state == slots.ACTIVE or (s.state == slots.ENDING and (s.waiting or s.in_flight)), (
                "an ended sequence keeps its slot"
            )
            if s.waiting:
                assert not s.waiting[0].cancelled, "a cancelled request heads its queue"
                queued += len(s.waiting)
                if s.in_flight is None:
                    wants.append(s)
            flights += s.in_flight is not None
        requests += queued
        assert (table.held[i], table.waiting[i]) == (here, queued)
        assert i not in table._retired or here, "a retired instance was not let go"
        if oldest:
            assert len(offered) == len(wants) and set(offered) == set(wants)
    free = table._free
    assert len(set(free)) == len(free), "a free slot is listed twice"
    assert set(free) == everything - taken, "a slot was lost, or is free and held"
    assert len(set(held)) == len(held), "a sequence holds two slots"
    backlog = [s for s in table._backlog if s.state != slots.GONE]
    assert not (free and backlog), "the backlog waits beside a free slot"
    behind = 0
    for s in backlog:
        assert s.state in (slots.WAITING, slots.WAITING_ENDED) and s.waiting and s.in_flight is None
        assert s.slot < 0 and not any([r.cancelled for r in s.waiting])
        behind += len(s.waiting)
    live = 0
    last = 0
    for s in held + backlog:
        if s.state in (slots.ACTIVE, slots.WAITING):
            live += 1
            assert table.live[s.id] is s and not s.reason, "an id is live twice, or not as it should be"
        else:
            assert s.reason
        assert (s in table._idle) == (s.state == slots.ACTIVE)
    assert len(table.live) == live
    for s in table._idle:
        assert last <= s.last_ns, "the idle order is not the order of the deadlines"
        last = s.last_ns
    stats = table.statistics()
    assert (stats.slots_used, stats.live, stats.slots) == (len(held), live, len(everything))
    assert (stats.backlog_sequences, stats.backlog_requests) == (len(backlog), behind)
    assert (stats.waiting, stats.in_flight) == (requests, flights)


# ------------------------------------------------------------ events


def events(rows: Any, backlog: Any, bounds: Bounds) -> Iterator[Event]:
    """Everything that can happen next. Sequences are named by their place: (instance, slot) or number.

    A deadline can come before, at, between and after all those there are.
    """
    deadlines = len({p[3] for p in backlog if p[3]})
    timeouts = [0, *(RANK_NS // 2000 * n for n in range(1, 2 * deadlines + 2))]
    active = [i for i, (retired, _) in enumerate(rows) if not retired]
    free = any(not p for i in active for p in rows[i][1])
    runs = [p for _, held in rows for p in held if p] + list(backlog)
    live = {p[6] for p in runs if p[0] in LIVE}
    used = {p[6] for p in runs}
    for name in sorted(used) + [i for i in IDS if i not in used][:1]:  # unused ids are all alike
        waits = any(p[6] == name and p[0] == slots.WAITING for p in backlog)
        if name not in live:
            waits = not free
            yield ("refused", name, name in used)
            if len(runs) == bounds.runs:
                continue
        elif any(p[6] == name and bool(p[1]) + len(p[2]) == PER_RUN for p in runs if p[0] in LIVE):
            yield from (("end", name, slots.EVICT), ("end", name, slots.DISCONNECT))
            continue
        for start in (True, False) if name in live else (True,):
            for end in (False, True):
                for timeout in timeouts if waits and not (start and name in live) else (0,):
                    yield ("request", name, start, end, timeout)
        if name in live:
            yield ("end", name, slots.EVICT)
            yield ("end", name, slots.DISCONNECT)
    if live:
        yield ("close",)
    for i, (_, held) in enumerate(rows):
        for slot, p in enumerate(held):
            if not p:
                continue
            if p[1]:
                yield ("finish", i, slot)
                yield ("requeue", i, slot)
                yield ("last", i, slot)
            elif p[2] and not bounds.oldest:
                yield ("issue", i, slot)
            for n in range(-1 if p[1] else 0, len(p[2])):
                yield ("cancel", i, slot, n)
        if bounds.oldest and any(p and p[5] >= 0 for p in held):
            yield ("issue", i, -1)
    for number, p in enumerate(backlog):
        for n in range(len(p[2])):
            yield ("cancel", -1, number, n)
    if any(p[4] >= 0 for p in runs):
        yield ("idle",)
    if any(p[3] for p in backlog):
        yield ("timeout",)
    if bounds.scaling:
        for i in active:
            yield ("retire", i)
        if len(active) < bounds.instances and sum(1 for _, held in rows if held) <= bounds.instances:
            yield ("add",)


class Step:
    """One event applied to one table, and what may have come of it."""

    def __init__(self, table: SlotTable, bounds: Bounds, now: int = NOW) -> None:
        self.table = table
        self.now = now
        self.oldest = bounds.oldest
        self.finished: list[Request] = []
        self.runs = [s for row in table.slots for s in row if s] + [*table._backlog]
        self.runs = [s for s in self.runs if s.state != slots.GONE]
        # what may stand as a reason: an old one, or this event's
        self.ended_by = {s: s.reason for s in self.runs if s.reason}
        self.leaves: set[int] = set()  # instances that may be drained
        self.were_waiting = [s for s in table._backlog if s.state != slots.GONE]

    def apply(self, event: Event) -> bool:
        """False when the event was refused."""
        kind = event[0]
        table = self.table
        before = {s: self.requests(s) for s in self.runs}
        free = sorted(table._free)
        ok = getattr(self, "do_" + kind)(*event[1:])
        effects, table.effects = table.effects, []
        self.account(before, effects)
        if kind == "request" and len(self.runs) > len(before):  # the table's choice of a slot
            new = self.runs[-1]
            assert (new.slot, new.instance) == (free[0] if free else (-1, -1)), "not the lowest free slot"
        if kind != "request":
            self.check_backlog_order(before)
        self.runs = [s for s in self.runs if s.state != slots.GONE]
        return bool(ok)

    @staticmethod
    def requests(s: Sequence) -> list[Request]:
        """The unfinished requests of a run, in order."""
        return ([] if s.in_flight is None else [s.in_flight]) + list(s.waiting or ())

    def account(self, before: dict[Sequence, list[Request]], effects: list[tuple[int, Any]]) -> None:
        """Every request is where it was, or went where it may, once; its neighbours did not move."""
        ended = [subject for kind, subject in effects if kind == slots.ENDED]
        gone = [subject for kind, subject in effects if kind in (slots.CANCELLED, slots.TIMED_OUT)]
        gone += self.finished
        drained = [subject for kind, subject in effects if kind == slots.DRAINED]
        known = 0
        for s in self.runs:
            was, now = before.get(s, []), self.requests(s)
            if was != now:
                left = [r for r in was if r not in gone]
                assert now[: len(left)] == left, "requests were lost, reordered or changed their sequence"
                assert (len(now) <= len(left) + 1 and now[-1:] != was[:1]) or not now[len(left) :]
                known += len(was) - len(left)
            assert all([r.run is s for r in now])
            ends = s.state == slots.GONE and s.slot >= 0
            assert ended.count(s) == ends, "ended twice, never, or in the backlog"
            if s.state in (slots.ENDING, slots.WAITING_ENDED, slots.GONE):
                assert s.reason == self.ended_by.get(s), f"the reason is {s.reason}"
        assert len(gone) == len(set(gone)) == known, "a request was answered twice, or is not to be found"
        assert set(ended) <= set(self.runs)
        assert len(drained) == len(set(drained)) and set(drained) <= self.leaves, "an instance left twice"

    def check_backlog_order(self, before: dict[Sequence, list[Request]]) -> None:
        """The backlog's oldest moved in, in order; nobody overtook anybody (rules 3 and 6)."""
        moved = [s.slot >= 0 for s in self.were_waiting if s.state != slots.GONE]
        assert moved == sorted(moved, reverse=True), "a younger sequence was given the slot"

    # the events

    def do_request(self, name: str, start: bool, end: bool, timeout_us: int) -> bool:
        request = Request(start, end, timeout_us)
        live = self.table.live.get(name)
        sequence, conflict = self.table.accept(name, request, self.now)
        assert conflict == (live is not None and start)
        assert sequence is live if live is not None else sequence not in self.runs
        request.run = sequence
        if live is None:
            self.runs.append(sequence)
        if end:
            self.ended_by[sequence] = "ended"
        assert (self.table.live.get(name) is sequence) == (not end)
        return True

    def do_refused(self, name: str, end: bool) -> bool:
        try:
            self.table.accept(name, Request(False, end), self.now)
        except StartMissing:
            return False
        raise AssertionError("a request without START was taken for a sequence that is not live")

    def do_end(self, name: str, event: int) -> bool:
        sequence = self.table.live[name]
        self.ended_by[sequence] = slots.REASONS[event]
        if sequence.state == slots.WAITING and event == slots.DISCONNECT:
            self.ended_by[sequence] = "cancelled"
        assert self.table.end(sequence, event, self.now)
        assert name not in self.table.live and not self.table.end(sequence, event, self.now)
        return True

    def do_close(self) -> bool:
        self.ended_by |= dict.fromkeys(self.table.live.values(), "unloaded")
        self.table.close(self.now)
        assert not self.table.live
        return True

    def run_at(self, instance: int, slot: int) -> Sequence:
        run = self.table.slots[instance][slot] if instance >= 0 else self.were_waiting[slot]
        assert run is not None
        return run

    def do_issue(self, instance: int, slot: int) -> bool:
        table = self.table
        if self.oldest:
            table.drop_stale(instance)
            sequence = table.ready[instance][0]
            table.withdraw(instance)
        else:
            sequence = self.run_at(instance, slot)
        assert sequence.waiting is not None
        expected = sequence.waiting[0]
        if len(sequence.waiting) > 1 and sequence.waiting[1].cancelled:
            self.maybe(sequence, "cancelled")
        request = table.issue(sequence, self.now)
        assert request is expected and request.run is sequence and sequence.in_flight is request
        assert not request.cancelled, "a request that was cancelled at the head was issued"
        assert sequence.started
        return True

    def maybe(self, sequence: Sequence, reason: str) -> None:
        """`reason` is the sequence's if it has none yet."""
        if sequence.state in (slots.ACTIVE, slots.WAITING):
            self.ended_by[sequence] = reason

    def land(self, sequence: Sequence) -> Request:
        request = sequence.in_flight
        assert isinstance(request, Request)
        self.leaves.add(sequence.instance)
        return request

    def do_finish(self, instance: int, slot: int) -> bool:
        sequence = self.run_at(instance, slot)
        self.finished.append(self.land(sequence))
        self.table.finish(sequence, self.now)
        return True

    def do_last(self, instance: int, slot: int) -> bool:
        """The last round of an iterative sequence."""
        sequence = self.run_at(instance, slot)
        self.maybe(sequence, "ended")
        self.finished.append(self.land(sequence))
        self.table.end(sequence, slots.END, self.now)
        self.table.finish(sequence, self.now)
        return True

    def do_requeue(self, instance: int, slot: int) -> bool:
        """Another round of an iterative sequence: what waits meanwhile goes first."""
        sequence = self.run_at(instance, slot)
        request = self.land(sequence)
        live = sequence.state == slots.ACTIVE
        alone = not sequence.waiting
        self.table.finish(sequence, self.now)
        if request.cancelled and alone:
            self.maybe(sequence, "cancelled")
        assert self.table.requeue(sequence, request, self.now) == live
        self.finished.append(request)  # from its old place, to the end of the line or to its error
        request.run = None
        if live and sequence.waiting and sequence.waiting[-1] is request:
            again = Request()
            again.cancelled, again.run = request.cancelled, sequence
            sequence.waiting[-1] = again
        self.table.effects = [e for e in self.table.effects if e[1] is not request]
        return True

    def do_cancel(self, instance: int, place: int, number: int) -> bool:
        sequence = self.run_at(instance, place)
        request = sequence.in_flight if number < 0 else (sequence.waiting or ())[number]
        request.cancelled = True
        if instance < 0 or number == 0:
            self.maybe(sequence, "cancelled")
            self.leaves.add(instance)
        self.table.cancel(sequence, request, self.now)
        if instance < 0:
            assert sequence.state == slots.GONE and not sequence.waiting
        elif number == 0:
            assert not sequence.waiting and sequence.state in (slots.ENDING, slots.GONE)
        else:
            assert sequence.state in (slots.ACTIVE, slots.ENDING)
        return True

    def do_idle(self) -> bool:
        table = self.table
        first = next(iter(table._idle))
        timeouts, table._timeouts = table._timeouts, []  # these may be as late as one likes
        table.idle_ns = self.now + 1 - first.last_ns
        due = table.next_deadline()
        assert due == self.now + 1
        table.expire(due - 1)
        assert first.state == slots.ACTIVE and not table.effects, "expired before its deadline"
        self.maybe(first, "idle")
        self.leaves.add(first.instance)
        table.expire(due)
        table._timeouts = timeouts
        table.idle_ns = FAR
        assert first.state != slots.ACTIVE and first.id not in table.live
        return True

    def do_timeout(self) -> bool:
        table = self.table
        waiting = [s for s in table._backlog if s.state != slots.GONE and s.expires_ns]
        first = min(waiting, key=lambda s: s.expires_ns)
        due = table.next_deadline()
        assert due == first.expires_ns
        self.now = max(self.now, due)
        table.expire(due - 1)
        assert first.state != slots.GONE and not table.effects, "timed out too early"
        for s in waiting:
            if s.expires_ns == due:
                self.maybe(s, "cancelled")
        table.expire(due)
        assert first.state == slots.GONE and {kind for kind, _ in table.effects} == {slots.TIMED_OUT}
        return True

    def do_retire(self, instance: int) -> bool:
        self.leaves.add(instance)
        empty = not self.table.held[instance]
        self.table.retire_instance(instance)
        assert self.table.effects == ([(slots.DRAINED, instance)] if empty else [])
        return True

    def do_add(self) -> bool:
        instance = self.table.add_instance(self.now)
        assert self.table.slots[instance] and instance not in self.table._retired
        return True


def take(key: Key, event: Event, bounds: Bounds) -> tuple[SlotTable, bool]:
    """The table after the event, and whether it took it; what became of every request was checked."""
    table = decode(key, bounds)
    step = Step(table, bounds)
    step.leaves.update(table._retired)
    return table, step.apply(event)


def within(key: Key, bounds: Bounds) -> bool:
    """The state is one of those asked for."""
    rows, backlog = key
    runs = [p for _, held in rows for p in held if p] + list(backlog)
    return len(runs) <= bounds.runs and all(bool(p[1]) + len(p[2]) <= PER_RUN for p in runs)


def drain(table: SlotTable, oldest: bool) -> None:
    """Executes everything that was accepted after the last sequence was closed: nothing stays held."""
    table.close(NOW)
    for _ in range(100):
        busy = [s for row in table.slots for s in row if s is not None]
        if not busy:
            break
        for s in busy:
            if s.in_flight is None:
                table.issue(s, NOW)
            table.finish(s, NOW)
    left = table.statistics()
    assert not (left.slots_used or left.live or left.waiting or left.in_flight)
    # all instances may have been retired: then the backlog waits for one to come
    assert not left.backlog_sequences or not left.slots


def explore(bounds: Bounds) -> tuple[dict[Key, tuple[int, ...]], int, set[tuple[int, int]]]:
    """Every reachable state, the number of transitions, and the rows of the table that were used."""
    used: set[tuple[int, int]] = set()
    original = SlotTable._apply

    def recorded(self: Any, sequence: Any, event: int, now_ns: int, request: Any = None) -> None:
        used.add((sequence.state, event))
        original(self, sequence, event, now_ns, request)

    SlotTable._apply = recorded  # type: ignore[method-assign]
    try:
        first = encode(SlotTable(bounds.instances, bounds.per_instance, FAR, bounds.oldest))
        seen, frontier, transitions = {first: tally(decode(first, bounds))}, [first], 0
        while frontier:
            following = []
            for key in frontier:
                for event in events(*key, bounds):
                    table, changed = take(key, event, bounds)
                    transitions += 1
                    result = encode(table)
                    assert changed or result == key, "a refused request changed something"
                    known = seen.get(result)
                    if known is not None:
                        assert tally(table) == known
                        continue
                    check(table, bounds.oldest)
                    assert within(result, bounds)
                    seen[result] = tally(table)
                    following.append(result)
                    copy = decode(result, bounds)
                    assert encode(copy) == result and tally(copy) == seen[result]
                    drain(copy, bounds.oldest)
            frontier = following
    finally:
        SlotTable._apply = original  # type: ignore[method-assign]
    return seen, transitions, used


# ------------------------------------------------------------ tests

SOAK = os.environ.get("NEPTRIO_SOAK") == "1"
# bounds -> (states, transitions)
EXPLORED = {
    Bounds(1, 2, oldest=False, scaling=False, runs=3): (3168, 58569),
    Bounds(1, 2, oldest=True, scaling=False, runs=3): (3417, 61062),
    Bounds(2, 1, oldest=True, scaling=True, runs=2): (2178, 33719),
}
if SOAK:
    EXPLORED |= {
        Bounds(1, 1, oldest=False, scaling=False, runs=3): (4032, 72613),
        Bounds(2, 1, oldest=False, scaling=True, runs=2): (2178, 33719),
        Bounds(1, 2, oldest=False, scaling=True, runs=3): (44250, 886205),
    }


@pytest.mark.parametrize(
    "bounds", EXPLORED, ids=lambda b: f"{'oldest' if b.oldest else 'direct'}-{b[:2]}-{b.runs}"
)
def test_every_reachable_state(bounds: Bounds) -> None:
    """The exploration ends, every row of the table is used, and every rule holds in every transition."""
    seen, transitions, used = explore(bounds)
    print(f"{bounds}: {len(seen)} states, {transitions} transitions")
    assert used == set(slots.TRANSITIONS)
    assert (len(seen), transitions) == EXPLORED[bounds]
    walk(bounds, seen)


def walk(bounds: Bounds, seen: dict[Key, tuple[int, ...]]) -> None:
    """A table that is never taken apart goes through explored states only: keys leave nothing out."""
    chance = random.Random(4)
    table = SlotTable(bounds.instances, bounds.per_instance, FAR, bounds.oldest)
    now = NOW
    visited = set()
    for _ in range(4000):
        rows, backlog = raw(table)
        event = chance.choice(list(events(rows, backlog, bounds)))
        step = Step(table, bounds, now)
        step.leaves.update(table._retired)
        step.apply(event)
        check(table, bounds.oldest)
        key = encode(table)
        assert tally(table) == seen[key], "a state that the exploration has not found"
        visited.add(key)
        now = step.now + 2
    assert len(visited) > 500


def raw(table: SlotTable) -> tuple[list[Any], list[Any]]:
    """A table as `events` wants it, every sequence in its own place."""
    ready = {s for row in table.ready for s in row}

    def plain(s: Sequence | None) -> Any:
        if s is None:
            return ()
        expires = s.expires_ns if s.slot < 0 else 0
        waiting = tuple(s.waiting or ())
        idle = 0 if s in table._idle else -1
        return (s.state, int(s.in_flight is not None), waiting, expires, idle, 0 if s in ready else -1, s.id)

    rows = [(i in table._retired or not row, [plain(s) for s in row]) for i, row in enumerate(table.slots)]
    return rows, [plain(s) for s in table._backlog if s.state != slots.GONE]
