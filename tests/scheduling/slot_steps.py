"""What may happen to a slot table in a state, done to it, and the account of every request it touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from neptrio.scheduling import sequence_slots as slots
from neptrio.scheduling import sequence_transitions as transitions
from neptrio.scheduling.sequence_slots import Sequence, SlotTable, StartMissing
from tests.scheduling.slot_keys import FAR, NOW, RANK_NS, Bounds, Request

IDS = ("a", "b", "c")
PER_RUN = 2  # unfinished requests
LIVE = (transitions.ACTIVE, transitions.WAITING)

Event = tuple[Any, ...]


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
        waits = any(p[6] == name and p[0] == transitions.WAITING for p in backlog)
        if name not in live:
            waits = not free
            yield ("refused", name, name in used)
            if len(runs) == bounds.runs:
                continue
        elif any(p[6] == name and bool(p[1]) + len(p[2]) == PER_RUN for p in runs if p[0] in LIVE):
            yield from (("end", name, transitions.EVICT), ("end", name, transitions.DISCONNECT))
            continue
        for start in (True, False) if name in live else (True,):
            for end in (False, True):
                for timeout in timeouts if waits and not (start and name in live) else (0,):
                    yield ("request", name, start, end, timeout)
        if name in live:
            yield ("end", name, transitions.EVICT)
            yield ("end", name, transitions.DISCONNECT)
    if live:
        yield ("close",)
    for i, (_, held) in enumerate(rows):
        for slot, p in enumerate(held):
            if not p:
                continue
            yield ("lose", i, slot)
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
        self.runs = [s for row in table.slots for s in row if s] + [*table.backlog]
        self.runs = [s for s in self.runs if s.state != transitions.GONE]
        # what may stand as a reason: an old one, or this event's
        self.ended_by = {s: s.reason for s in self.runs if s.reason}
        self.leaves: set[int] = set()  # instances that may be drained
        self.were_waiting = [s for s in table.backlog if s.state != transitions.GONE]

    def apply(self, event: Event) -> bool:
        """False when the event was refused."""
        kind = event[0]
        table = self.table
        before = {s: self.requests(s) for s in self.runs}
        free = sorted(table.free)
        ok = getattr(self, "do_" + kind)(*event[1:])
        effects, table.effects = table.effects, []
        self.account(before, effects)
        if kind == "request" and len(self.runs) > len(before):  # the table's choice of a slot
            new = self.runs[-1]
            assert (new.slot, new.instance) == (free[0] if free else (-1, -1)), "not the lowest free slot"
        if kind != "request":
            self.check_backlog_order(before)
        self.runs = [s for s in self.runs if s.state != transitions.GONE]
        return bool(ok)

    @staticmethod
    def requests(s: Sequence) -> list[Request]:
        """The unfinished requests of a run, in order."""
        return ([] if s.in_flight is None else [s.in_flight]) + list(s.waiting or ())

    def account(self, before: dict[Sequence, list[Request]], effects: list[tuple[int, Any]]) -> None:
        """Every request is where it was, or went where it may, once; its neighbours did not move."""
        ended = [subject for kind, subject in effects if kind == slots.ENDED]
        gone = [
            subject for kind, subject in effects if kind in (slots.CANCELLED, slots.TIMED_OUT, slots.LOST)
        ]
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
            ends = s.state == transitions.GONE and s.slot >= 0
            assert ended.count(s) == ends, "ended twice, never, or in the backlog"
            if s.state in (transitions.ENDING, transitions.WAITING_ENDED, transitions.GONE):
                assert s.reason == self.ended_by.get(s), f"the reason is {s.reason}"
        assert len(gone) == len(set(gone)) == known, "a request was answered twice, or is not to be found"
        assert set(ended) <= set(self.runs)
        assert len(drained) == len(set(drained)) and set(drained) <= self.leaves, "an instance left twice"

    def check_backlog_order(self, before: dict[Sequence, list[Request]]) -> None:
        """The backlog's oldest moved in, in order; nobody overtook anybody (sequence_slots, rules 3 and 6)."""
        moved = [s.slot >= 0 for s in self.were_waiting if s.state != transitions.GONE]
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
        self.ended_by[sequence] = transitions.REASONS[event]
        if sequence.state == transitions.WAITING and event == transitions.DISCONNECT:
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
        if sequence.state in (transitions.ACTIVE, transitions.WAITING):
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
        self.table.end(sequence, transitions.END, self.now)
        self.table.finish(sequence, self.now)
        return True

    def do_requeue(self, instance: int, slot: int) -> bool:
        """Another round of an iterative sequence: what waits meanwhile goes first."""
        sequence = self.run_at(instance, slot)
        request = self.land(sequence)
        live = sequence.state == transitions.ACTIVE
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
            assert sequence.state == transitions.GONE and not sequence.waiting
        elif number == 0:
            assert not sequence.waiting and sequence.state in (transitions.ENDING, transitions.GONE)
        else:
            assert sequence.state in (transitions.ACTIVE, transitions.ENDING)
        return True

    def do_lose(self, instance: int, slot: int) -> bool:
        """The instance's process ends, and of its sequences this one has begun."""
        sequence = self.run_at(instance, slot)
        for other in self.table.slots[instance]:
            if other is not None:
                other.started = other is sequence
        in_flight = sequence.in_flight
        self.maybe(sequence, "lost")
        self.leaves.add(instance)
        self.table.lose(instance, self.now)
        assert not sequence.waiting and sequence.in_flight is in_flight
        assert sequence.state == (transitions.GONE if in_flight is None else transitions.ENDING)
        return True

    def do_idle(self) -> bool:
        table = self.table
        first = next(iter(table.idle))
        timeouts, table.timeouts = table.timeouts, []  # these may be as late as one likes
        table.idle_ns = self.now + 1 - first.last_ns
        due = table.next_deadline()
        assert due == self.now + 1
        table.expire(due - 1)
        assert first.state == transitions.ACTIVE and not table.effects, "expired before its deadline"
        self.maybe(first, "idle")
        self.leaves.add(first.instance)
        table.expire(due)
        table.timeouts = timeouts
        table.idle_ns = FAR
        assert first.state != transitions.ACTIVE and first.id not in table.live
        return True

    def do_timeout(self) -> bool:
        table = self.table
        waiting = [s for s in table.backlog if s.state != transitions.GONE and s.expires_ns]
        first = min(waiting, key=lambda s: s.expires_ns)
        due = table.next_deadline()
        assert due == first.expires_ns
        self.now = max(self.now, due)
        table.expire(due - 1)
        assert first.state != transitions.GONE and not table.effects, "timed out too early"
        for s in waiting:
            if s.expires_ns == due:
                self.maybe(s, "cancelled")
        table.expire(due)
        assert first.state == transitions.GONE and {kind for kind, _ in table.effects} == {slots.TIMED_OUT}
        return True

    def do_retire(self, instance: int) -> bool:
        self.leaves.add(instance)
        empty = not self.table.held[instance]
        self.table.retire_instance(instance)
        assert self.table.effects == ([(slots.DRAINED, instance)] if empty else [])
        return True

    def do_add(self) -> bool:
        instance = self.table.add_instance(self.now)
        assert self.table.slots[instance] and instance not in self.table.retired
        return True
