"""Looks for what is about to come, for a moment, before the loop sleeps.

The problem: a request that comes alone through a front end wakes two processes, one after the other, and its answer wakes
one of them again. Each wake-up costs more than the request itself: tens of microseconds on a virtual machine, whose
processors are given back while they have nothing to do. The choice: a side that has reason to expect something looks at
its rings for a while before it sleeps. Nobody need ring for it then, and the processor stays awake.

Rules:
 1. It is done for no longer than asked for, and not where there is one processor: who looks would keep what comes from coming.
 2. After each step the processor is offered to whoever waits for it, and every descriptor that would have ended the sleep is
    looked at: who looks is late for none by more than a step. Only timers may be late by as long as is asked for.
 3. A look that was in vain is followed by 1, 3, 7 and so on up to MOST_IN_VAIN sleeps without one, until one is not.
 4. It is for messages that come one by one. Where more than FEW came since the last sleep, another sleep costs little: the
    next wake-up brings several, too. What a side expects is for its owner to say (`expects`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from neptrio.cores import usable_cores

STEP_NS = 10_000
FEW = 4
MOST_IN_VAIN = 63

Ready = list[tuple[int, int]]  # descriptors and their events, as an epoll tells them


class Incoming(Protocol):
    """A ring, seen by whoever takes from it."""

    @property
    def received(self) -> int: ...

    def comes(self, spin_ns: int) -> bool: ...


def granted_ns(microseconds: int) -> int:
    """How long to look: what is asked for, 0 where there is one processor (rule 1)."""
    return 1000 * microseconds if usable_cores() > 1 else 0


class BusyPoll:
    """The rings of one loop, each with the descriptor that is rung for it."""

    def __init__(self, nanoseconds: int, expects: Callable[[], bool]) -> None:
        self._steps = -(-nanoseconds // STEP_NS)
        self._expects = expects
        self._rings: dict[int, Incoming] = {}
        self._received = 0
        self._in_vain = 0
        self.not_now = 0  # for so many sleeps there is no look (rule 3)

    def add(self, bell: int, ring: Incoming) -> None:
        """`ring` is looked at, too; when something has come, that is told as if `bell` had been rung."""
        self._rings[bell] = ring

    def remove(self, bell: int) -> None:
        """Undoes add(), if it was called."""
        self._rings.pop(bell, None)

    def look(self, poll: Callable[[], Ready], readable: int) -> Ready:
        """What has come, as an epoll would tell it: (bell, `readable`), or what `poll()` returned. Empty: it is time to
        sleep."""
        rings = self._rings
        received = sum(ring.received for ring in rings.values())
        few, self._received = received - self._received <= FEW, received
        if not few or not rings or not self._expects():
            return []
        if self.not_now:
            self.not_now -= 1
            return []
        each = STEP_NS // len(rings)
        for _ in range(self._steps):
            for bell, ring in rings.items():
                if ring.comes(each):
                    self._in_vain = 0
                    return [(bell, readable)]
            os.sched_yield()
            ready = poll()
            if ready:
                return ready
        self._in_vain = self.not_now = min(2 * self._in_vain + 1, MOST_IN_VAIN)
        return []
