"""The slot table: which sequence holds which slot, which one waits, and when each of them ends.

The problem: a sequence's requests must all reach the same slot of the same instance, in order, while clients
start, end, vanish, cancel, time out and start again at any moment. A slot that is lost, given twice or released
twice corrupts some sequence's state for good. The choice: a sequence is a small record with a state, every change
of it is a row of TRANSITIONS (sequence_transitions.py), and nothing else touches a slot. The table does no I/O:
time is an argument, and what must happen outside is returned as effects.

Rules (E1.n is docs/protocol/rules.md):
 1. An id is live from its START to its END (at enqueue, not at execution), its idle deadline, its
    cancellation or its eviction, whichever comes first (E1.4, E1.7, E1.13).
 2. START on a live id continues in the same slot or backlog place (E1.3).
 3. A free slot is given lowest number first, then lowest instance; without one, a new sequence waits
    in the backlog. When a slot becomes free, the oldest one there moves in with all its requests (E1.4, E1.5).
 4. At most one request of a sequence is under way.
 5. A slot is released once: when its sequence is ENDING, none of its requests waits and none is under way.
 6. The backlog is empty while any slot is free.
 7. A cancelled request acts when it is the first one waiting of its slot: every waiting request of the
    sequence is cancelled. In the backlog any cancelled request does (E1.5, E1.13).
 8. Idle time is counted from the last accepted request, or from the moment the slot was given if that
    is later; sequences in the backlog do not expire (E1.7). All sequences of a table have the same
    limit, so order of last activity is order of deadlines: one ordered dict replaces every timer.
 9. `timeout` of a request counts in the backlog only; the earliest one of a sequence rejects all its
    requests (E1.8).
10. A refused request changes nothing.
11. A sequence whose state is lost with its instance's process ends, and its waiting requests are refused: nothing could
    continue it rightly.
12. A retired instance gives no slot again; its sequences stay until they end, and it is forgotten,
    once, when the last of them has gone (E1.15). Its index is then another instance's to have.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from neptrio.scheduling.sequence_transitions import (
    ACTIVE,
    CANCEL,
    CLOSE,
    EMPTY,
    END,
    ENDING,
    EVENT_NAMES,
    FINISH,
    GONE,
    IDLE,
    ISSUE,
    LOSE,
    REASONS,
    REQUEST,
    SLOT,
    STATE_NAMES,
    TIMEOUT,
    TRANSITIONS,
    WAITING,
    WAITING_ENDED,
)

# kinds of effects
CANCELLED, TIMED_OUT, LOST, ENDED, DRAINED = range(5)


# what a live sequence is found by: its id; with its owner's name in front where clients say who they are
Key = int | str | tuple[str, int | str]


class StartMissing(Exception):
    """A request without START names an id that is not live."""


class Sequence:
    """One life of a sequence id, from START to its end. Small, as there may be tens of thousands."""

    __slots__ = (
        "corrid",
        "created_ns",
        "expires_ns",
        "id",
        "in_flight",
        "instance",
        "key",
        "last_ns",
        "offered",
        "owner",
        "reason",
        "shown",
        "slot",
        "started",
        "state",
        "states",
        "stream",
        "waiting",
    )

    def __init__(self, key: Key, now_ns: int) -> None:
        self.key = key
        self.owner: str | None = None
        self.id: int | str
        if isinstance(key, tuple):
            self.owner, self.id = key
        else:
            self.id = key
        self.shown: int | str | None = None  # its id for the model (scheduling.sequence_ids)
        self.state = WAITING
        self.instance = -1
        self.slot = -1
        self.created_ns = now_ns
        self.last_ns = now_ns
        self.expires_ns = 0
        self.waiting: deque[Any] | None = None  # None when empty, because a deque is larger than all the rest
        self.in_flight: Any = None
        self.offered = False
        self.started = False  # an instance has been given a request of it
        self.reason = ""
        self.states: list[Any] | None = None  # implicit state, owned by scheduling.sequence_state
        self.corrid: Any = None  # its CORRID tensor
        self.stream: Any = None  # the gRPC stream on which it was started, if its end ends the sequence

    def __repr__(self) -> str:
        return f"Sequence({self.id!r}, {STATE_NAMES[self.state]}, slot={self.instance}/{self.slot})"


@dataclass(frozen=True)
class SlotTableStatistics:
    """What the table holds at the moment."""

    live: int  # ids that a request may continue
    slots: int
    slots_used: int
    backlog_sequences: int
    backlog_requests: int
    waiting: int  # requests in slots that were not issued yet
    in_flight: int


class SlotTable:
    """The slots of every instance of one model, the backlog, and the ids that are live.

    `effects` collects what the caller must do, in order: (CANCELLED | TIMED_OUT | LOST, request), (ENDED, sequence) and
    (DRAINED, instance index). The rest of the state is plain as well, so that whoever explores its states can tell two of
    them apart; only the methods change it. With `offers`, `ready[instance]` lists the sequences that have a request to issue,
    in the order in which they got one; entries may be stale (see drop_stale()).
    """

    def __init__(self, instances: int, slots_per_instance: int, idle_ns: int, offers: bool = False) -> None:
        self.live: dict[Key, Sequence] = {}
        self.slots: list[list[Sequence | None]] = []
        self.held: list[int] = []  # per instance: slots that are held
        self.waiting: list[int] = []  # per instance: requests in its slots that were not issued yet
        self.ready: list[deque[Sequence]] = []
        self.effects: list[tuple[int, Any]] = []
        self.idle_ns = idle_ns
        self.slots_used = 0
        self.backlog_sequences = 0
        self.backlog_requests = 0
        self.in_flight = 0
        self._per_instance = slots_per_instance
        self._offers = offers
        self.free: list[tuple[int, int]] = []  # heap of (slot, instance)
        self.retired: set[int] = set()  # retired instances that still have sequences
        self.vacant: list[int] = []  # indices of forgotten instances, to be used again
        self.backlog: deque[Sequence] = deque()  # in order of arrival; may contain sequences that are GONE
        self.idle: OrderedDict[Sequence, None] = OrderedDict()
        self.timeouts: list[tuple[int, int, Sequence]] = []
        self.order = itertools.count()
        for _ in range(instances):
            self.add_instance()

    # ------------------------------------------------------------ events

    def accept(self, key: Key, request: Any, now_ns: int) -> tuple[Sequence, bool]:
        """Queues a request; returns (its sequence, whether its START hit a live id).

        `request` has `sequence_start`, `sequence_end`, `timeout_us` and `cancelled`. Raises
        StartMissing.
        """
        sequence = self.live.get(key)
        conflict = False
        event = END if request.sequence_end else REQUEST
        if sequence is not None:
            conflict = bool(request.sequence_start)
            self.apply(sequence, event, now_ns, request)
        else:
            if not request.sequence_start:
                raise StartMissing
            sequence = self.live[key] = Sequence(key, now_ns)
            self.backlog_sequences += 1
            self.backlog.append(sequence)
            self.apply(sequence, event, now_ns, request)
            self._fill(now_ns)
        return sequence, conflict

    def issue(self, sequence: Sequence, now_ns: int) -> Any:
        """Removes and returns the sequence's first waiting request, to be executed."""
        self.apply(sequence, ISSUE, now_ns)
        request = sequence.in_flight
        self._check_head(sequence, now_ns)
        return request

    def finish(self, sequence: Sequence, now_ns: int) -> None:
        """The request that issue() returned has left the instance."""
        self.apply(sequence, FINISH, now_ns)

    def requeue(self, sequence: Sequence, request: Any, now_ns: int) -> bool:
        """Queues an iterative sequence's request again; False when the id is no longer live."""
        if sequence.state != ACTIVE:
            return False
        self.apply(sequence, REQUEST, now_ns, request)
        self._check_head(sequence, now_ns)
        return True

    def cancel(self, sequence: Sequence, request: Any, now_ns: int) -> None:
        """Acts on `request`, which is marked as cancelled: now, or when it becomes the first one waiting (rule 7)."""
        if sequence.state in (WAITING, WAITING_ENDED):
            self.apply(sequence, CANCEL, now_ns)
        elif sequence.state in (ACTIVE, ENDING):
            self._check_head(sequence, now_ns)

    def end(self, sequence: Sequence, event: int, now_ns: int) -> bool:
        """Ends a live sequence for the reason `event`: EVICT, DISCONNECT, CLOSE, or END of an iterative sequence.

        Returns False when its id is not live.
        """
        if (sequence.state, event) == (ACTIVE, END):
            event, sequence.reason = CLOSE, "ended"
        if (sequence.state, event) not in TRANSITIONS:
            return False
        self.apply(sequence, event, now_ns)
        return True

    def lose(self, instance: int, now_ns: int) -> None:
        """The state of the sequences that an instance has been given requests of is gone (rule 11)."""
        for sequence in list(self.slots[instance]):
            if sequence is not None and sequence.started:
                sequence.started = False  # whoever comes in the place of what is gone has not heard of it
                self.apply(sequence, LOSE, now_ns)

    def expire(self, now_ns: int) -> None:
        """Ends sequences that were idle for too long and rejects requests that waited for too long."""
        limit = now_ns - self.idle_ns
        while self.idle:
            sequence = next(iter(self.idle))
            if sequence.last_ns > limit:
                break
            self.apply(sequence, IDLE, now_ns)
        while self.timeouts and self.timeouts[0][0] <= now_ns:
            when, _, sequence = heapq.heappop(self.timeouts)
            if sequence.state in (WAITING, WAITING_ENDED) and sequence.expires_ns == when:
                self.apply(sequence, TIMEOUT, now_ns)

    def next_deadline(self) -> int | None:
        """When expire() next has something to do; None: never."""
        when = None
        if self.idle:
            when = next(iter(self.idle)).last_ns + self.idle_ns
        while self.timeouts:
            expires, _, sequence = self.timeouts[0]
            if sequence.state not in (WAITING, WAITING_ENDED) or sequence.expires_ns != expires:
                heapq.heappop(self.timeouts)
                continue
            when = expires if when is None else min(when, expires)
            break
        return when

    def close(self, now_ns: int) -> None:
        """Ends every live sequence; accepted requests still run."""
        for sequence in list(self.live.values()):
            self.apply(sequence, CLOSE, now_ns)

    # ------------------------------------------------------------ instances

    def add_instance(self, now_ns: int = 0) -> int:
        """Adds an instance, whose free slots go to the backlog first; returns its index.

        Must be called when all effects have been carried out, since they name instances by index.
        """
        if self.effects:
            raise RuntimeError("an instance was added while effects name instances by index")
        if self.vacant:
            instance = self.vacant.pop()
        else:
            instance = len(self.slots)
            self.slots.append([])
            self.held.append(0)
            self.waiting.append(0)
            self.ready.append(deque())
        self.slots[instance] = [None] * self._per_instance
        for slot in range(self._per_instance):
            heapq.heappush(self.free, (slot, instance))
        self._fill(now_ns)
        return instance

    def retire_instance(self, instance: int) -> None:
        """Gives it no new sequences. Live ones keep their slots; (DRAINED, instance) follows after the last."""
        if instance in self.retired or not self.slots[instance]:
            raise RuntimeError(f"instance {instance} was retired twice")
        self.retired.add(instance)
        self.free = [entry for entry in self.free if entry[1] != instance]
        heapq.heapify(self.free)
        self._forget_if_empty(instance)

    def _forget_if_empty(self, instance: int) -> None:
        if not self.held[instance]:
            self.retired.remove(instance)
            self.slots[instance] = []
            self.ready[instance].clear()
            self.vacant.append(instance)
            self.effects.append((DRAINED, instance))

    # ------------------------------------------------------------ looking

    def withdraw(self, instance: int) -> None:
        """Removes the first entry of `ready[instance]`."""
        self.ready[instance].popleft().offered = False

    def drop_stale(self, instance: int) -> None:
        """Removes entries of `ready[instance]` that no longer have a request to issue."""
        kept: deque[Sequence] = deque()
        for sequence in self.ready[instance]:
            if sequence.waiting and sequence.in_flight is None and sequence.state != GONE:
                kept.append(sequence)
            else:
                sequence.offered = False
        self.ready[instance] = kept

    def holders(self) -> Iterator[Sequence]:
        """Every sequence that holds a slot or waits for one."""
        for slots in self.slots:
            for sequence in slots:
                if sequence is not None:
                    yield sequence
        for sequence in self.backlog:
            if sequence.state != GONE:
                yield sequence

    def statistics(self) -> SlotTableStatistics:
        """What is held now."""
        retired = sum(len(self.slots[i]) for i in self.retired)
        return SlotTableStatistics(
            live=len(self.live),
            slots=sum(map(len, self.slots)) - retired,
            slots_used=self.slots_used,
            backlog_sequences=self.backlog_sequences,
            backlog_requests=self.backlog_requests,
            waiting=sum(self.waiting),
            in_flight=self.in_flight,
        )

    # ------------------------------------------------------------ the machine

    def apply(self, sequence: Sequence, event: int, now_ns: int, request: Any = None) -> None:
        """Does what TRANSITIONS has for the event in the sequence's state. RuntimeError: nothing."""
        row = _ROWS[sequence.state][event]
        if row is None:
            raise RuntimeError(
                f"sequence {sequence.id!r}: {EVENT_NAMES[event]} cannot happen in {STATE_NAMES[sequence.state]}"
            )
        if not sequence.reason and event in REASONS:
            sequence.reason = REASONS[event]
        sequence.state = row[0]
        for action in row[1]:
            action(self, sequence, now_ns, request)

    def _check_head(self, sequence: Sequence, now_ns: int) -> None:
        if sequence.waiting and sequence.waiting[0].cancelled:
            self.apply(sequence, CANCEL, now_ns)

    def _fill(self, now_ns: int) -> None:
        """Gives free slots to sequences in the backlog (rule 6)."""
        while self.free and self.backlog:
            sequence = self.backlog.popleft()
            if sequence.state != GONE:
                self.apply(sequence, SLOT, now_ns)

    # ------------------------------------------------------------ actions

    def _queue(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        if sequence.waiting is None:
            sequence.waiting = deque((request,))
        else:
            sequence.waiting.append(request)
        if sequence.slot < 0:
            self.backlog_requests += 1
        else:
            self.waiting[sequence.instance] += 1

    def _note_timeout(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        if request.timeout_us:
            expires = now_ns + request.timeout_us * 1000
            if not sequence.expires_ns or expires < sequence.expires_ns:
                sequence.expires_ns = expires
                if len(self.timeouts) > 4 * self.backlog_sequences + 64:
                    self.timeouts = [
                        e
                        for e in self.timeouts
                        if e[2].slot < 0 and e[2].state != GONE and e[2].expires_ns == e[0]
                    ]
                    heapq.heapify(self.timeouts)
                heapq.heappush(self.timeouts, (expires, next(self.order), sequence))

    def _unmap(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        del self.live[sequence.key]

    def _leave_backlog(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        self.backlog_sequences -= 1
        if len(self.backlog) > 2 * self.backlog_sequences + 64:
            self.backlog = deque(s for s in self.backlog if s.state != GONE)

    def _occupy(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        slot, instance = heapq.heappop(self.free)
        if self.slots[instance][slot] is not None:
            raise RuntimeError(f"slot {slot} of instance {instance} was given twice")
        sequence.slot, sequence.instance = slot, instance
        self.slots[instance][slot] = sequence
        self.held[instance] += 1
        self.slots_used += 1
        self.backlog_sequences -= 1
        moved = len(sequence.waiting or ())
        self.backlog_requests -= moved
        self.waiting[instance] += moved
        self._offer(sequence, now_ns, request)

    def _start_idle(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        sequence.last_ns = now_ns
        self.idle[sequence] = None

    def _touch(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        sequence.last_ns = now_ns
        self.idle.move_to_end(sequence)

    def _stop_idle(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        del self.idle[sequence]

    def _offer(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        if self._offers and sequence.waiting and sequence.in_flight is None and not sequence.offered:
            sequence.offered = True
            ready = self.ready[sequence.instance]
            ready.append(sequence)
            # cancelled requests have left many stale entries
            if len(ready) > 2 * self.held[sequence.instance] + 64:
                self.drop_stale(sequence.instance)

    def _take(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        if sequence.in_flight is not None or not sequence.waiting:
            raise RuntimeError(f"{sequence!r} has nothing to issue")
        sequence.in_flight = sequence.waiting.popleft()
        if not sequence.waiting:
            sequence.waiting = None
        sequence.started = True
        self.waiting[sequence.instance] -= 1
        self.in_flight += 1

    def _land(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        if sequence.in_flight is None:
            raise RuntimeError(f"{sequence!r} has nothing in flight")
        sequence.in_flight = None
        self.in_flight -= 1

    def _cancel_waiting(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        self._drop_waiting(sequence, CANCELLED)

    def _reject_waiting(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        self._drop_waiting(sequence, TIMED_OUT)

    def _lose_waiting(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        self._drop_waiting(sequence, LOST)

    def _drop_waiting(self, sequence: Sequence, effect: int) -> None:
        for request in sequence.waiting or ():
            self.effects.append((effect, request))
            if sequence.slot < 0:
                self.backlog_requests -= 1
            else:
                self.waiting[sequence.instance] -= 1
        sequence.waiting = None

    def _settle(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        if not sequence.waiting and sequence.in_flight is None:
            self.apply(sequence, EMPTY, now_ns)

    def _release(self, sequence: Sequence, now_ns: int, request: Any) -> None:
        instance, slot = sequence.instance, sequence.slot
        if self.slots[instance][slot] is not sequence:
            raise RuntimeError(f"slot {slot} of instance {instance} was released twice")
        self.slots[instance][slot] = None
        self.held[instance] -= 1
        self.slots_used -= 1
        self.effects.append((ENDED, sequence))
        if instance in self.retired:
            self._forget_if_empty(instance)
        else:
            heapq.heappush(self.free, (slot, instance))
            self._fill(now_ns)


_ROWS: list[list[Any]] = [
    [
        (row[0], tuple(getattr(SlotTable, "_" + name) for name in row[1]))
        if (row := TRANSITIONS.get((state, event))) is not None
        else None
        for event in range(len(EVENT_NAMES))
    ]
    for state in range(len(STATE_NAMES))
]
