"""Looks for what is about to come, for a moment, before the loop sleeps.

The problem: a request that comes alone wakes the process that serves it, through a front end two of them one after the
other, and its answer wakes one of them again. Each wake-up costs more than the request itself: tens of microseconds on a
virtual machine, whose processors are given back while they have nothing to do. The choice: a side that has reason to
expect something looks at its rings and sockets for a while before it sleeps. Nobody need ring for it then, and the
processor stays awake.

Rules:
 1. It is done for no longer than asked for, and not where there is one processor: who looks would keep what comes from coming.
 2. After each step every descriptor that would have ended the sleep is looked at: who looks is late for none by more than a
    step. Only timers may be late by as long as is asked for.
 3. A look that was in vain is followed by 1, 3, 7 and so on up to MOST_IN_VAIN sleeps without one, until one is not.
 4. Between rings it is for messages that come one by one. Where more than FEW came since the last sleep, another sleep costs
    little: the next wake-up brings several, too. What a side expects is for its owner to say (`expects`).
 5. Between rings the processor is offered to others after each step: engine, front end and client are three for two
    processors, and each waits for the others. A loop without rings offers nothing, because who takes the processor may be a model
    that computes for milliseconds, and who gave it away waits longer than who sleeps.
 6. A loop without rings does not look for PAUSE_NS where there is more to do than small requests one by one: where the
    processor was taken away (a look at the sockets took TAKEN_NS), and where what a look had found took MUCH_NS, which are
    large bodies or many clients at once. Looking would buy them nothing, and the system takes the processor sooner from
    who always computes. Each time the pause is twice as long, up to LONGEST_PAUSE_NS; what took less halves it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from neptrio.cores import usable_cores
from neptrio.request.infer_request import monotonic_ns

STEP_NS = 10_000
FEW = 4
MOST_IN_VAIN = 63
TAKEN_NS = 50_000  # a look at the sockets takes about one microsecond
MUCH_NS = 150_000  # a small request takes 20 to 60 microseconds
PAUSE_NS = 1_000_000
LONGEST_PAUSE_NS = 2_000_000_000

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
    """The rings of one loop, each with the descriptor that is rung for it; or its sockets alone."""

    def __init__(
        self,
        nanoseconds: int,
        expects: Callable[[], bool],
        sockets: bool = False,
        clock: Callable[[], int] = monotonic_ns,
    ) -> None:
        """`sockets`: looks at the sockets where there is no ring, too."""
        self._steps = -(-nanoseconds // STEP_NS)
        self._expects = expects
        self._sockets = sockets
        self._clock = clock
        self._rings: dict[int, Incoming] = {}
        self._received = 0
        self._in_vain = 0
        self.not_now = 0  # for so many sleeps there is no look (rule 3)
        self._pause = PAUSE_NS  # the next one (rule 6)
        self._paused_until = 0
        self._found_at = 0  # when the last look found something; 0: it did not

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
        if not few or not (rings or self._sockets) or not self._expects():
            return []
        if self.not_now:
            self.not_now -= 1
            return []
        if not rings:
            return self._listen(poll)
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
        self._was_in_vain()
        return []

    def _listen(self, poll: Callable[[], Ready]) -> Ready:
        """look() at sockets alone."""
        now = self._clock()
        found_at, self._found_at = self._found_at, 0
        if found_at:
            if now - found_at > MUCH_NS:
                self._take_pause(now)
            else:
                self._pause = max(self._pause // 2, PAUSE_NS)
        if now < self._paused_until:
            return []
        end = now + self._steps * STEP_NS
        while now < end:
            ready, before, now = poll(), now, self._clock()
            if now - before > TAKEN_NS:
                self._take_pause(now)
                return ready
            if ready:
                self._in_vain, self._found_at = 0, now
                return ready
        self._was_in_vain()
        return []

    def _take_pause(self, now: int) -> None:
        self._paused_until = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE_NS)

    def _was_in_vain(self) -> None:
        self._in_vain = self.not_now = min(2 * self._in_vain + 1, MOST_IN_VAIN)
