"""States of the slot table as keys: what a table holds, without clock and identities, and back again.

Ids are named in the order in which they appear, times are ranks, instances and the slots of one instance
stand in a fixed order, because which of two equal ones it is makes no difference to what follows.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from neptrio.scheduling import sequence_transitions as transitions
from neptrio.scheduling.sequence_slots import Sequence, SlotTable

NOW = 10**9
FAR = 10**15
RANK_NS = 1_000_000  # between one deadline in the backlog and the next

Key = tuple[tuple[Any, ...], tuple[Any, ...]]  # instances, backlog


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


def encode(table: SlotTable) -> Key:
    """The table's key."""
    idle = {s: i for i, s in enumerate(table.idle)}
    ready = {s: i for row in table.ready for i, s in enumerate(r for r in row if r.state != transitions.GONE)}
    waiting_until = sorted(
        {s.expires_ns for s in table.backlog if s.state != transitions.GONE and s.expires_ns}
    )
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
            rows.append((instance in table.retired, sorted(map(plain, row))))
    rows.sort(key=_nameless)
    backlog = [plain(s) for s in table.backlog if s.state != transitions.GONE]
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
        if state in (transitions.ENDING, transitions.WAITING_ENDED):
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
            heapq.heappush(table.timeouts, (s.expires_ns, next(table.order), s))
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
                table.free.remove((slot, instance))
                if p[5] >= 0:
                    ready[p[5]] = s
                    s.offered = True
        if retired:
            table.retired.add(instance)
            table.free = [entry for entry in table.free if entry[1] != instance]
        table.ready[instance].extend(ready[i] for i in sorted(ready))
        heapq.heapify(table.free)
    for p in backlog:
        s = made(p)
        table.backlog.append(s)
        table.backlog_sequences += 1
        table.backlog_requests += len(s.waiting or ())
    for rank in sorted(idle):
        idle[rank].last_ns = 1000 + rank
        table.idle[idle[rank]] = None
    return table


def tally(table: SlotTable) -> tuple[int, ...]:
    """Every number that the table keeps; tables with equal keys must agree in them."""
    return (
        len(table.free),
        len(table.live),
        len(table.idle),
        len(table.retired),
        table.slots_used,
        table.backlog_sequences,
        table.backlog_requests,
        table.in_flight,
        sum(table.waiting),
        sum(table.held),
    )
