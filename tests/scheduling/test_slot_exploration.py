"""The slot table, explored until nothing new is found: every order of every event.

A state is written down as a `Key` (slot_keys.py). From a key a real SlotTable is built, one event is
applied to it (slot_steps.py), every rule is checked, and the key of the result is new or known. Breadth first, the set of keys closes: there is no reachable state that was not
checked, whatever the length of the history.

Bounds: three ids; so many runs of ids at once that hold a slot or wait for one (`runs`; an id whose
END is queued may start again, so runs and ids differ); two unfinished requests per run; one instance
more than at the start, while a retired one still has sequences. Requests that would go beyond are not
sent, nothing else is left out. `NEPTRIO_SOAK=1` explores more runs.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest

from neptrio.scheduling import sequence_transitions as transitions
from neptrio.scheduling.sequence_slots import Sequence, SlotTable
from tests.scheduling.slot_keys import FAR, NOW, Bounds, Key, decode, encode, tally
from tests.scheduling.slot_steps import PER_RUN, Event, Step, events


def check(table: SlotTable, oldest: bool) -> None:
    """Rules 1, 4, 5, 6 and 11 of sequence_slots, and that every number is the count it claims to be."""
    held: list[Sequence] = []
    everything: set[tuple[int, int]] = set()
    taken: set[tuple[int, int]] = set()
    requests = flights = 0
    for i, row in enumerate(table.slots):
        assert bool(row) != (i in table.vacant)
        offered = [s for s in table.ready[i] if s.state != transitions.GONE]
        wants, here, queued = [], 0, 0
        for slot, s in enumerate(row):
            if i not in table.retired:
                everything.add((slot, i))
            if s is None:
                continue
            taken.add((slot, i))
            held.append(s)
            here += 1
            assert (s.instance, s.slot) == (i, slot)
            assert s.state == transitions.ACTIVE or (
                s.state == transitions.ENDING and (s.waiting or s.in_flight)
            ), "an ended sequence keeps its slot"
            if s.waiting:
                assert not s.waiting[0].cancelled, "a cancelled request heads its queue"
                queued += len(s.waiting)
                if s.in_flight is None:
                    wants.append(s)
            flights += s.in_flight is not None
        requests += queued
        assert (table.held[i], table.waiting[i]) == (here, queued)
        assert i not in table.retired or here, "a retired instance was not let go"
        if oldest:
            assert len(offered) == len(wants) and set(offered) == set(wants)
    free = table.free
    assert len(set(free)) == len(free), "a free slot is listed twice"
    assert set(free) == everything - taken, "a slot was lost, or is free and held"
    assert len(set(held)) == len(held), "a sequence holds two slots"
    backlog = [s for s in table.backlog if s.state != transitions.GONE]
    assert not (free and backlog), "the backlog waits beside a free slot"
    behind = 0
    for s in backlog:
        assert (
            s.state in (transitions.WAITING, transitions.WAITING_ENDED) and s.waiting and s.in_flight is None
        )
        assert s.slot < 0 and not any([r.cancelled for r in s.waiting])
        behind += len(s.waiting)
    live = 0
    last = 0
    for s in held + backlog:
        if s.state in (transitions.ACTIVE, transitions.WAITING):
            live += 1
            assert table.live[s.id] is s and not s.reason, "an id is live twice, or not as it should be"
        else:
            assert s.reason
        assert (s in table.idle) == (s.state == transitions.ACTIVE)
    assert len(table.live) == live
    for s in table.idle:
        assert last <= s.last_ns, "the idle order is not the order of the deadlines"
        last = s.last_ns
    stats = table.statistics()
    assert (stats.slots_used, stats.live, stats.slots) == (len(held), live, len(everything))
    assert (stats.backlog_sequences, stats.backlog_requests) == (len(backlog), behind)
    assert (stats.waiting, stats.in_flight) == (requests, flights)


def take(key: Key, event: Event, bounds: Bounds) -> tuple[SlotTable, bool]:
    """The table after the event, and whether it took it; what became of every request was checked."""
    table = decode(key, bounds)
    step = Step(table, bounds)
    step.leaves.update(table.retired)
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
    original = SlotTable.apply

    def recorded(self: Any, sequence: Any, event: int, now_ns: int, request: Any = None) -> None:
        used.add((sequence.state, event))
        original(self, sequence, event, now_ns, request)

    SlotTable.apply = recorded  # type: ignore[method-assign]
    try:
        first = encode(SlotTable(bounds.instances, bounds.per_instance, FAR, bounds.oldest))
        seen, frontier, taken = {first: tally(decode(first, bounds))}, [first], 0
        while frontier:
            following = []
            for key in frontier:
                for event in events(*key, bounds):
                    table, changed = take(key, event, bounds)
                    taken += 1
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
        SlotTable.apply = original  # type: ignore[method-assign]
    return seen, taken, used


# ------------------------------------------------------------ tests

SOAK = os.environ.get("NEPTRIO_SOAK") == "1"
# bounds -> (states, transitions)
EXPLORED = {
    Bounds(1, 2, oldest=False, scaling=False, runs=3): (3168, 64888),
    Bounds(1, 2, oldest=True, scaling=False, runs=3): (3417, 67879),
    Bounds(2, 1, oldest=True, scaling=True, runs=2): (2178, 37338),
}
if SOAK:
    EXPLORED |= {
        Bounds(1, 1, oldest=False, scaling=False, runs=3): (4032, 76644),
        Bounds(2, 1, oldest=False, scaling=True, runs=2): (2178, 37338),
        Bounds(1, 2, oldest=False, scaling=True, runs=3): (44250, 986561),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "bounds", EXPLORED, ids=lambda b: f"{'oldest' if b.oldest else 'direct'}-{b[:2]}-{b.runs}"
)
def test_every_reachable_state(bounds: Bounds) -> None:
    """The exploration ends, every row of the table is used, and every rule holds in every transition."""
    seen, taken, used = explore(bounds)
    print(f"{bounds}: {len(seen)} states, {taken} transitions")
    assert used == set(transitions.TRANSITIONS)
    assert (len(seen), taken) == EXPLORED[bounds]
    walk(bounds, seen)


def walk(bounds: Bounds, seen: dict[Key, tuple[int, ...]]) -> None:
    """A table that is never taken apart goes through explored states only: keys leave nothing out."""
    chance = random.Random(4)
    table = SlotTable(bounds.instances, bounds.per_instance, FAR, bounds.oldest)
    now = NOW
    visited = set()
    for _ in range(8000):
        rows, backlog = raw(table)
        event = chance.choice(list(events(rows, backlog, bounds)))
        step = Step(table, bounds, now)
        step.leaves.update(table.retired)
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
        idle = 0 if s in table.idle else -1
        return (s.state, int(s.in_flight is not None), waiting, expires, idle, 0 if s in ready else -1, s.id)

    rows = [(i in table.retired or not row, [plain(s) for s in row]) for i, row in enumerate(table.slots)]
    return rows, [plain(s) for s in table.backlog if s.state != transitions.GONE]
