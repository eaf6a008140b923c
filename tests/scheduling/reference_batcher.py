"""A slow, obvious batcher, written from the rules (spec E2) and not from the implementation.

It keeps plain lists, sorts them whenever it looks, tries every prefix and stops at every moment at
which anything could happen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neptrio.scheduling.policy import BatchingPolicy


@dataclass
class Waiting:
    id: str
    number: int
    size: int
    level: int
    width: int
    arrived: int
    deadline: int | None
    late: int | None = None
    cancelled: bool = False


@dataclass
class Reference:
    policy: BatchingPolicy
    instances: int
    now: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    running: list[list[list[Waiting]]] = field(default_factory=list)
    events: list[tuple[Any, ...]] = field(default_factory=list)
    everyone: dict[str, Waiting] = field(default_factory=dict)
    lates: int = 0

    def __post_init__(self) -> None:
        self.running = [[] for _ in range(self.instances)]

    def note(self, *event: Any) -> None:
        self.events.append((self.now, *event))

    # ------------------------------------------------------------ what happens to it

    def send(self, id: str, size: int, priority: int, timeout_us: int, width: int) -> None:
        levels = len(self.policy.levels)
        level = priority if levels > 1 and 1 <= priority <= levels else self.policy.default_level
        rules = self.policy.levels[level - 1]
        if rules.max_size and self.in_level(level) >= rules.max_size:
            self.settle()
        if rules.max_size and self.in_level(level) >= rules.max_size:
            self.note("refused", id, f"[request id: {id}] Exceeds maximum queue size")
            self.settle()
            return
        timeout = rules.timeout_us
        if rules.override and timeout and 0 < timeout_us < timeout:
            timeout = timeout_us
        deadline = self.now + timeout * 1000 if timeout else None
        request = Waiting(id, len(self.everyone), size, level, width, self.now, deadline)
        self.everyone[id] = request
        self.waiting.append(request)
        self.settle()

    def in_level(self, level: int) -> int:
        return len([r for r in self.waiting if r.level == level])

    def cancel(self, id: str) -> None:
        request = self.everyone.get(id)
        if request is None or request.cancelled:
            return
        request.cancelled = True
        if request in self.waiting:
            self.waiting.remove(request)
            self.note("answer", id, "request cancelled")
        for batches in self.running:
            for batch in batches[1:]:
                if request in batch:
                    batch.remove(request)
                    if not batch:
                        batches.remove(batch)
                    self.note("answer", id, "request cancelled")
        self.settle()

    def finish(self, instance: int) -> None:
        if self.running[instance]:
            for request in self.running[instance].pop(0):
                self.note("answer", request.id, "request cancelled" if request.cancelled else "ok")
            self.settle()

    def advance(self, ns: int) -> None:
        end = self.now + ns
        moments = set()
        for request in self.waiting:
            moments.add(request.arrived + self.policy.delay_ns)
            if request.deadline is not None:
                moments.add(request.deadline)
        for moment in sorted(m for m in moments if self.now < m <= end):
            self.now = moment
            self.settle()
        self.now = end

    def oversleep(self, ns: int) -> None:
        self.now += ns
        self.settle()

    # ------------------------------------------------------------ what it does

    def settle(self) -> None:
        due = [
            r for r in self.waiting if r.deadline is not None and r.late is None and r.deadline <= self.now
        ]
        for request in sorted(due, key=lambda r: (r.deadline, r.number)):
            if self.policy.levels[request.level - 1].delay:
                self.lates += 1
                request.late = self.lates
            else:
                self.waiting.remove(request)
                self.note("answer", request.id, "Request timeout expired")
        while True:
            chosen, reason, best_possible = self.choose()
            if not chosen:
                return
            loads = [len(batches) for batches in self.running]
            least = loads.index(min(loads))
            if loads[least] == 0 or (loads[least] == 1 and best_possible and not self.policy.exact):
                for request in chosen:
                    self.waiting.remove(request)
                self.running[least].append(list(chosen))
                wait = self.now - min(r.arrived for r in chosen)
                self.note("batch", [r.id for r in chosen], reason, wait)
            else:
                return

    def choose(self) -> tuple[list[Waiting], str, bool]:
        """(requests of the next batch, why, whether waiting could not make it better)."""
        line = sorted(self.waiting, key=lambda r: (r.level, r.late is not None, r.late or r.number))
        if not line:
            return [], "", False

        def total(some: list[Waiting]) -> int:
            return sum(r.size for r in some)

        possible = [
            line[:k]
            for k in range(1, len(line) + 1)
            if total(line[:k]) <= self.policy.max_batch_size and len({r.width for r in line[:k]}) == 1
        ]
        longest = possible[-1]
        after = line[len(longest)] if len(longest) < len(line) else None
        if total(longest) == self.policy.max_batch_size:
            stopped = "full"
        elif after is None:
            stopped = ""
        elif total(longest) + after.size > self.policy.max_batch_size:
            stopped = "full"
        else:
            stopped = "shape"
        oldest = min(r.arrived for r in longest)
        if self.policy.delay_ns and self.now - oldest >= self.policy.delay_ns:
            return longest, stopped or "delay", bool(stopped)
        liked = [some for some in possible if total(some) in self.policy.preferred]
        if liked:
            most = liked[-1]
            reason = "full" if total(most) == self.policy.max_batch_size else "preferred"
            return most, reason, bool(stopped) or total(most) == max(self.policy.preferred)
        for some in possible:
            if len(some) < len(line) and total(some) + line[len(some)].size > max(self.policy.preferred):
                return some, stopped if stopped and some == longest else "preferred", True
        if stopped:
            return longest, stopped, True
        if total(longest) > max(self.policy.preferred):
            return longest, "preferred", True
        if self.policy.delay_ns == 0:
            return longest, "idle", False
        return [], "", False
