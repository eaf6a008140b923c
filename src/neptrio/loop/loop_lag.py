"""Measures how long each pass of the loop takes, and finds out what made a pass long.

The problem: all decisions are made on one thread, so whatever keeps it busy delays everybody. An average of
latencies does not show that, and still less why. The choice: a pass is measured from the moment the wait for
sockets ends to the next look at them; nobody whose request came in between waited for the loop for longer.
Code that begins large work leaves a note (kind, model, bytes), and when a pass took too long the log names the
work that took most of it, and what its reader can do about it.

Rules:
 1. A pass costs two readings of the clock. Notes are left for work on many bytes only, so small requests make none.
 2. Passes are measured in wall-clock time: time that the system or another thread with the GIL took from the
    loop delays requests too. Then no note explains it, and the log says so.
 3. At most one line is logged in LINE_SECONDS; the next one says how many long passes had none.
 4. Where trio itself waits (loop/poller.py), only the rounds over the sockets are measured.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from neptrio.loop.loop_lag_core import BOUNDS_NS, LoopLagCore

__all__ = ["BOUNDS_NS", "LoopLag", "LoopLagStatistics"]

log = logging.getLogger("neptrio.loop")

LINE_SECONDS = 60.0
LARGE = "send large tensors as binary data or in shared memory, or give the protocols cores of their own (--frontends)"
ALONE = "give the server cores that other programs and models' threads leave alone; isolation 'process' keeps models off them"
MOST_OF = 0.5  # to be named, work must have taken this share of the pass


@dataclass(frozen=True)
class LoopLagStatistics:
    """Counts of all passes so far: `cumulative[i]` of them took at most BOUNDS_NS[i] nanoseconds."""

    count: int
    sum_ns: int
    max_ns: int
    cumulative: tuple[int, ...]


class LoopLag(LoopLagCore):
    """The measurements of one loop."""

    def __init__(self, warning_ms: float = 0) -> None:
        """Passes longer than `warning_ms` milliseconds are logged; 0: none are."""
        self.warning_ns = int(warning_ms * 1e6)
        self.told_ns = 0  # when the last line was logged, 0: none was
        self._untold = 0

    def statistics(self) -> LoopLagStatistics:
        """The counts so far."""
        return LoopLagStatistics(self.count, self.sum_ns, self.max_ns, tuple(self.cumulative(BOUNDS_NS)))

    def late(
        self, now: int, taken: int, notes: list[tuple[int, str, str, Any, int]], task: Any, task_ns: int
    ) -> None:
        """Logs a pass of `taken` ns that ended at `now`; called by waits()."""
        if self.told_ns and now - self.told_ns < LINE_SECONDS * 1e9:
            self._untold += 1
            return
        self.told_ns = now
        more = f"; so {self._untold} more times since the last line" if self._untold else ""
        self._untold = 0
        culprit, remedy = self._culprit(now, taken, notes, task, task_ns)
        log.warning(
            "all requests waited for %.0f ms because of %s%s%s",
            taken / 1e6,
            culprit,
            more,
            f" ({remedy})" if remedy else "",
        )

    def _culprit(
        self, now: int, taken: int, notes: list[tuple[int, str, str, Any, int]], task: Any, task_ns: int
    ) -> tuple[str, str]:
        """What took most of a pass, and what can be done about it ("": nothing by settings)."""
        ends = [note[0] for note in notes[1:]] + [now] * bool(notes)
        spans = [(end - note[0], note) for end, note in zip(ends, notes, strict=True)]
        longest, noted = max(spans, key=lambda span: span[0], default=(0, None))
        if noted is not None and longest >= MOST_OF * taken:
            _, kind, model, source, nbytes = noted
            of = f" of model '{model}'" if model else ""
            return f"{kind}{of}, {nbytes} bytes{_whose(source)}", LARGE
        if task_ns >= MOST_OF * taken:
            return (
                f"one step of the server itself, or the processor was taken away; the step is of {task.name}",
                ALONE,
            )
        last = f", at last{_whose(self.source)}" if self.source is not None else ""
        return f"many small things, or the processor was taken away{last}", ALONE


def _whose(source: Any) -> str:
    """The client's address when `source` is the callback of a connection, else ""."""
    sock = getattr(getattr(source, "__self__", None), "sock", None)
    try:
        name = sock.getpeername()  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return ""
    if isinstance(name, tuple):
        return f", connection {name[0]}:{name[1]}"
    return f", connection {name!r}" if name else ""
