"""Rests between the portions of a burst of large responses, where processors are few and others are served.

The problem: a decoupled model that sends megabytes at once keeps three processors busy for some ten milliseconds: its own
process, the loop and the client work as fast as each can. On two, a small request to another model's process then waits at
each of its four wake-ups. The choice: the loop takes a burst in portions and rests behind each. The process runs into
its window meanwhile and the client has read everything, so all three leave the processors to others.

Rules:
 1. A portion is what was taken since the process was waited for last, so only who is ahead of the loop is paced.
 2. Nobody rests who is alone: it is done for OTHERS_NS after another process of a model has rung.
 3. Where there is a processor for others nobody rests: with ENOUGH_PROCESSORS or more.
 4. Nothing is lost or overtaken: what is not taken stays in the ring, and is taken at once when the process ends.
"""

from __future__ import annotations

from neptrio.cores import usable_cores

REST_NS = 1_000_000  # the shortest that the loop's timers know
OTHERS_NS = 20_000_000
ENOUGH_PROCESSORS = 4


class BurstPause:
    """The rests of one process."""

    def __init__(self, processors: int | None = None) -> None:
        self._few = (usable_cores() if processors is None else processors) < ENOUGH_PROCESSORS
        self._turns = 0
        self._looked = -OTHERS_NS
        self._others_until = 0

    def after_portion(self, now: int, turns: int) -> int:
        """For how many nanoseconds to rest behind a portion that ended at `now`; `turns`: Doorbells.turns then."""
        if turns != self._turns and now - self._looked < OTHERS_NS:
            self._others_until = now + OTHERS_NS
        self._turns, self._looked = turns, now
        return REST_NS if self._few and now < self._others_until else 0
