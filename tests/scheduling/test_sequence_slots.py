"""The slot table, explored: every order of events for three sequence ids on two slots."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest

from neptrio.scheduling import sequence_slots as slots
from neptrio.scheduling.sequence_slots import SlotTable, StartMissing

IDS = ("a", "b", "c")
IDLE_NS = 1_000_000


class Request:
    """What the table looks at of a request, and where it has been."""

    def __init__(self, sequence_id: str, start: bool, end: bool, timeout_us: int = 0) -> None:
        self.id = sequence_id
        self.sequence_start = start
        self.sequence_end = end
        self.timeout_us = timeout_us
        self.cancelled = False
        self.run: Any = None


class World:
    """A table, a clock, and a record of what became of every request and every sequence."""

    def __init__(self, instances: int = 1, per_instance: int = 2) -> None:
        self.table = SlotTable(instances, per_instance, IDLE_NS, offers=True)
        self.now = 0
        self.accepted: list[Request] = []
        self.gone: Counter[Request] = Counter()  # finished, cancelled or timed out
        self.runs: list[Any] = []  # every Sequence there ever was
        self.ended: Counter[Any] = Counter()
        self.issued: dict[Any, list[Request]] = {}

    def collect(self) -> None:
        effects, self.table.effects = self.table.effects, []
        for kind, subject in effects:
            if kind == slots.ENDED:
                self.ended[subject] += 1
            else:
                self.gone[subject] += 1

    def do(self, event: tuple[str, Any]) -> bool:
        """Applies an event; False when there is nothing for it to act on."""
        self.now += 1
        name, what = event
        if name in ("start", "middle", "end", "both"):
            request = Request(what, name in ("start", "both"), name in ("end", "both"))
            live = self.table.live.get(what)
            if live is None and not request.sequence_start:
                before = self.key()
                with pytest.raises(StartMissing):
                    self.table.accept(what, request, self.now)
                assert self.key() == before, "a refused request changed something"
                return False
            sequence, conflict = self.table.accept(what, request, self.now)
            assert conflict == (live is not None and request.sequence_start)
            assert live is None or sequence is live
            if sequence not in self.runs:
                self.runs.append(sequence)
            request.run = sequence
            self.accepted.append(request)
        elif name == "idle":
            due = self.table.next_deadline()
            if due is None:
                return False
            self.now = max(self.now, due)
            before = len(self.table.live)
            self.table.expire(self.now - 1)
            assert len(self.table.live) == before or due < self.now, "expired before its deadline"
            self.table.expire(self.now)
            assert len(self.table.live) < before
        elif name == "evict":
            live = self.table.live.get(what)
            if live is None:
                return False
            assert self.table.end(live, slots.EVICT, self.now)
            assert not self.table.end(live, slots.EVICT, self.now)
        elif name == "cancel":
            waiting = [r for r in self.accepted if r.id == what and not self.gone[r] and not r.cancelled]
            waiting = [r for r in waiting if r.run.in_flight is not r]
            if not waiting:
                return False
            waiting[-1].cancelled = True
            self.table.cancel(waiting[-1].run, waiting[-1], self.now)
        elif name == "issue":
            sequence = self.in_slot(what)
            if sequence is None or not sequence.waiting or sequence.in_flight is not None:
                return False
            expected = sequence.waiting[0]
            request = self.table.issue(sequence, self.now)
            assert request is expected and request.run is sequence and request.id == sequence.id
            assert not request.cancelled, "a request that was cancelled at the head was issued"
            self.issued.setdefault(sequence, []).append(request)
        elif name == "finish":
            sequence = self.in_slot(what)
            if sequence is None or sequence.in_flight is None:
                return False
            self.gone[sequence.in_flight] += 1
            self.table.finish(sequence, self.now)
        self.collect()
        return True

    def in_slot(self, number: int) -> Any:
        instance, slot = divmod(number, len(self.table.slots[0]))
        return self.table.slots[instance][slot]

    def key(self) -> Any:
        """The state without clock and identities: two worlds with equal keys behave alike."""
        table = self.table

        def sequence(s: Any) -> Any:
            return s and (
                s.id,
                s.state,
                s.in_flight is not None and (s.in_flight.cancelled),
                tuple((r.sequence_end, r.cancelled) for r in s.waiting or ()),
            )

        return (
            tuple(tuple(sequence(s) for s in row) for row in table.slots),
            tuple(sequence(s) for s in table._backlog if s.state != slots.GONE),
            tuple(s.id for s in table._idle),
            tuple(tuple((s.id, s.slot) for s in ready) for ready in table.ready),
        )

    def check(self) -> None:
        """The rules of the module, in every state."""
        table = self.table
        held = [s for row in table.slots for s in row if s is not None]
        places = [(s.slot, s.instance) for s in held]
        free = table._free
        assert len(set(free)) == len(free), "a free slot is listed twice"
        everything = {(slot, i) for i, row in enumerate(table.slots) for slot in range(len(row))}
        assert set(free) | set(places) == everything, "a slot was lost"
        assert not set(free) & set(places), "a slot is free and held"
        assert len(set(places)) == len(places), "a slot was given twice"
        backlog = [s for s in table._backlog if s.state != slots.GONE]
        assert not (free and backlog), "the backlog waits beside a free slot"
        for s in held:
            assert s.state in (slots.ACTIVE, slots.ENDING)
            assert table.slots[s.instance][s.slot] is s
            assert s.state == slots.ACTIVE or s.waiting or s.in_flight, "an ended sequence keeps its slot"
        for s in backlog:
            assert s.state in (slots.WAITING, slots.WAITING_ENDED) and s.waiting and s.in_flight is None
        live = [s for s in held + backlog if s.state in (slots.ACTIVE, slots.WAITING)]
        assert sorted(s.id for s in live) == sorted(table.live)
        assert all(table.live[s.id] is s for s in live)
        assert set(table._idle) == {s for s in held if s.state == slots.ACTIVE}
        for run in self.runs:
            assert self.ended[run] == (run.state == slots.GONE and run.slot >= 0), "released twice or never"
        for request in self.accepted:
            run = request.run
            spots = self.gone[request] + (run.in_flight is request) + list(run.waiting or ()).count(request)
            assert spots == 1, f"a request is in {spots} places"
        for run, issued in self.issued.items():
            mine = [r for r in self.accepted if r.run is run]
            assert issued == mine[: len(issued)], "issued out of order"
        offered = Counter(s for ready in table.ready for s in ready)
        for s in held:
            wants = bool(s.waiting) and s.in_flight is None
            assert offered[s] == 1 if wants else offered[s] <= 1
        stats = table.statistics()
        assert stats.slots_used == len(held) and stats.live == len(live)
        assert stats.backlog_sequences == len(backlog)
        assert stats.backlog_requests == sum(len(s.waiting) for s in backlog)
        assert stats.waiting == sum(len(s.waiting or ()) for s in held)
        assert stats.in_flight == sum(s.in_flight is not None for s in held)

    def drain(self, close_first: bool) -> None:
        """Executes everything and ends everything: no slot may stay held."""
        table = self.table
        if close_first:
            table.close(self.now)
            self.collect()
            self.check()
        for _ in range(200):
            busy = [s for row in table.slots for s in row if s is not None]
            if not any(s.waiting or s.in_flight for s in busy):
                if not table.live:
                    break
                table.close(self.now)
                self.collect()
            for number in range(sum(map(len, table.slots))):
                self.do(("issue", number))
                self.do(("finish", number))
        assert table.statistics().slots_used == 0 and not table.live and not table.backlog_sequences
        assert all(self.gone[r] == 1 for r in self.accepted)
        assert all(self.ended[run] == (run.slot >= 0) for run in self.runs)


EVENTS: list[tuple[str, Any]] = [
    *((name, i) for i in IDS for name in ("start", "middle", "end", "both", "cancel")),
    ("evict", "a"),
    ("idle", None),
    *((name, slot) for slot in (0, 1) for name in ("issue", "finish")),
]


def replay(path: tuple[tuple[str, Any], ...], instances: int, per_instance: int) -> World:
    world = World(instances, per_instance)
    for event in path:
        world.do(event)
    return world


def canonical(key: Any) -> Any:
    """The key with ids renamed by first appearance: ids are interchangeable (but "a", which is evicted)."""
    names: dict[str, int] = {"a": 0}

    def walk(item: Any) -> Any:
        if isinstance(item, tuple):
            return tuple(walk(x) for x in item)
        if isinstance(item, str):
            return names.setdefault(item, len(names))
        return item

    return walk(key)


SOAK = os.environ.get("NEPTRIO_SOAK") == "1"


@pytest.mark.parametrize(("instances", "per_instance", "depth"), [(1, 2, 6 + SOAK), (2, 1, 5 + 2 * SOAK)])
def test_every_order_of_events(instances: int, per_instance: int, depth: int) -> None:
    """Breadth first over every distinct state with at most 3 unfinished requests (7 deep in `make soak`)."""
    frontier: list[tuple[tuple[str, Any], ...]] = [()]
    seen = {canonical(World(instances, per_instance).key())}
    happened: set[tuple[int, int]] = set()
    original = SlotTable._apply

    def recorded(self: Any, sequence: Any, event: int, now_ns: int, request: Any = None) -> None:
        happened.add((sequence.state, event))
        original(self, sequence, event, now_ns, request)

    SlotTable._apply = recorded  # type: ignore[method-assign]
    try:
        for _ in range(depth):
            following = []
            for path in frontier:
                for event in EVENTS:
                    world = replay(path, instances, per_instance)
                    if not world.do(event):
                        continue
                    if sum(not world.gone[r] for r in world.accepted) > 3:
                        continue
                    key = canonical(world.key())
                    if key in seen:
                        continue
                    seen.add(key)
                    world.check()
                    following.append((*path, event))
                    world.drain(len(seen) % 2 == 0)
                    world.check()
            frontier = following
    finally:
        SlotTable._apply = original  # type: ignore[method-assign]
    assert len(seen) > 1000
    unseen = set(slots.TRANSITIONS) - happened
    # time in the backlog and disconnects have tests of their own below
    if depth > 5:
        assert {slots.EVENT_NAMES[e] for _, e in unseen} <= {"TIMEOUT", "DISCONNECT"}


def test_backlog_timeout_is_the_earliest_of_the_sequence_and_exact() -> None:
    world = World(1, 1)
    table = world.table
    table.accept("a", Request("a", True, False), 0)
    first, second = Request("b", True, False, 50), Request("b", False, False, 20)
    table.accept("b", first, 1000)
    table.accept("b", second, 2000)
    ended = Request("c", True, True, 1)
    table.accept("c", ended, 3000)
    assert table.next_deadline() == 4000
    table.expire(3999)
    assert not table.effects
    table.expire(4000)
    assert table.effects == [(slots.TIMED_OUT, ended)]
    table.effects.clear()
    assert table.next_deadline() == 22_000
    table.expire(22_000)
    assert table.effects == [(slots.TIMED_OUT, first), (slots.TIMED_OUT, second)]
    assert set(table.live) == {"a"} and table.backlog_sequences == 0 and table.backlog_requests == 0
    # with a slot the timeout means nothing
    table.accept("a", Request("a", False, False, 1), 30_000)
    table.expire(900_000)
    assert "a" in table.live


def test_idle_time_starts_when_the_slot_is_given() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    table.accept("a", Request("a", True, False), 0)
    table.accept("b", Request("b", True, False), 10)
    table.issue(table.live["a"], 20)
    table.finish(table.live["a"], 30)
    assert table.next_deadline() == IDLE_NS
    table.expire(IDLE_NS)
    assert set(table.live) == {"b"} and table.live["b"].slot == 0
    assert table.next_deadline() == 2 * IDLE_NS
    assert [(kind, s.reason) for kind, s in table.effects] == [(slots.ENDED, "idle")]


def test_queued_requests_run_after_the_idle_deadline() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    request = Request("a", True, False)
    sequence, _ = table.accept("a", request, 0)
    table.expire(IDLE_NS)
    assert not table.live and not table.effects and table.slots_used == 1
    assert table.issue(sequence, IDLE_NS + 1) is request
    table.finish(sequence, IDLE_NS + 2)
    assert table.slots_used == 0 and table.effects == [(slots.ENDED, sequence)]


def test_ids_are_typed() -> None:
    table = SlotTable(1, 4, IDLE_NS)
    table.accept(1, Request("1", True, False), 0)
    with pytest.raises(StartMissing):
        table.accept("1", Request("1", False, False), 0)
    table.accept("1", Request("1", True, False), 0)
    assert table.live[1] is not table.live["1"]


def test_slots_fill_lowest_number_across_instances_first() -> None:
    table = SlotTable(2, 2, IDLE_NS)
    given = [table.accept(i, Request("", True, False), 0)[0] for i in range(1, 5)]
    assert [(s.instance, s.slot) for s in given] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_disconnect_in_a_slot_and_in_the_backlog() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    first, _ = table.accept("a", Request("a", True, False), 0)
    waiting = Request("b", True, False)
    second, _ = table.accept("b", waiting, 0)
    assert table.end(second, slots.DISCONNECT, 1)
    assert table.effects == [(slots.CANCELLED, waiting)]
    table.issue(first, 1)
    assert table.end(first, slots.DISCONNECT, 2)
    table.finish(first, 3)
    assert table.effects[1:] == [(slots.ENDED, first)] and first.reason == "cancelled"


def test_a_retired_instance_gives_no_slots_and_keeps_its_sequences() -> None:
    table = SlotTable(2, 1, IDLE_NS)
    a, _ = table.accept("a", Request("a", True, False), 0)
    assert a.instance == 0 and not table.retire_instance(0) and table.statistics().slots == 1
    b, _ = table.accept("b", Request("b", True, False), 0)
    c, _ = table.accept("c", Request("c", True, True), 0)
    assert b.instance == 1 and c.slot == -1
    table.accept("a", Request("a", False, True), 1)
    for _ in range(2):
        table.issue(a, 2)
        table.finish(a, 3)
    assert a.state == slots.GONE and c.slot == -1, "a slot of the retired instance was given again"
    assert table.retire_instance(0)
    assert table.add_instance() == 2


def test_an_impossible_event_is_an_error() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    a, _ = table.accept("a", Request("a", True, True), 0)
    with pytest.raises(RuntimeError, match="REQUEST cannot happen in ENDING"):
        table._apply(a, slots.REQUEST, 0, Request("a", False, False))


def test_abandoned_backlog_entries_do_not_pile_up() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    table.accept("holder", Request("", True, False), 0)
    table.accept("first", Request("", True, False), 0)
    for i in range(1000):
        request = Request("", True, False, 10**9)
        sequence, _ = table.accept(i + 1, request, 0)
        table.cancel(sequence, request, 0)
        table.effects.clear()
    assert table.backlog_sequences == 1
    assert len(table._backlog) < 100 and len(table._timeouts) < 100
