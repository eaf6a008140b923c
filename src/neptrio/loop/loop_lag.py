"""How long the loop looks at nothing else, and who made it so.

The problem: one thread decides, and whatever keeps it keeps everybody; an average of latencies does not say
that, still less why. The choice: a pass is measured from the moment at which the wait for sockets ends to the
next look at them: longer than that nobody who came in between has waited for the loop. Whoever begins large
work leaves a note (kind, model, bytes); of a pass that took too long, the log names the work that took most.

Rules:
 1. A pass costs two readings of the clock. Notes are for work of many bytes only, so small requests make none.
 2. A pass is counted in wall-clock time: what the system or another thread with the interpreter's lock took
    from the loop is the loop's lag too. Then nothing long is found among the notes, and the log says that.
 3. At most one line in LINE_SECONDS; the next one says how many passes had none.
 4. Where trio waits itself (loop/poller.py), only the rounds over the sockets are measured.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from neptrio.loop.loop_lag_core import BOUNDS_NS, LoopLagCore

__all__ = ["BOUNDS_NS", "LoopLag", "LoopLagStatistics"]

log = logging.getLogger("neptrio.loop")

LINE_SECONDS = 1.0
MOST_OF = 0.5  # the share of a pass that the one who is named must have taken


@dataclass(frozen=True)
class LoopLagStatistics:
    """All passes so far. `cumulative[i]` of them took at most BOUNDS_NS[i]."""

    count: int
    sum_ns: int
    max_ns: int
    cumulative: tuple[int, ...]


class LoopLag(LoopLagCore):
    """The measure of one loop."""

    def __init__(self, warning_ms: float = 0) -> None:
        """`warning_ms`: a longer pass is logged; 0: none is."""
        self.warning_ns = int(warning_ms * 1e6)
        self._told_ns = 0
        self._untold = 0

    def statistics(self) -> LoopLagStatistics:
        """What was counted."""
        return LoopLagStatistics(self.count, self.sum_ns, self.max_ns, tuple(self.cumulative(BOUNDS_NS)))

    def late(
        self, now: int, taken: int, notes: list[tuple[int, str, str, Any, int]], task: Any, task_ns: int
    ) -> None:
        """Logs a pass of `taken` ns that ended at `now`; called by waits()."""
        if self._told_ns and now - self._told_ns < LINE_SECONDS * 1e9:
            self._untold += 1
            return
        self._told_ns = now
        more = f"; {self._untold} more such passes since the last line" if self._untold else ""
        self._untold = 0
        log.warning(
            "the loop did nothing else for %.0f ms: %s%s",
            taken / 1e6,
            self._culprit(now, taken, notes, task, task_ns),
            more,
        )

    def _culprit(
        self, now: int, taken: int, notes: list[tuple[int, str, str, Any, int]], task: Any, task_ns: int
    ) -> str:
        ends = [note[0] for note in notes[1:]] + [now] * bool(notes)
        spans = [(end - note[0], note) for end, note in zip(ends, notes, strict=True)]
        longest, noted = max(spans, key=lambda span: span[0], default=(0, None))
        if noted is not None and longest >= MOST_OF * taken:
            _, kind, model, source, nbytes = noted
            of = f" of model '{model}'" if model else ""
            return f"{kind}{of}, {nbytes} bytes{_whose(source)}"
        if task_ns >= MOST_OF * taken:
            return f"the task '{task.name}'"
        if self.source is not None:
            return f"many small things, or the processor was taken away, at last{_whose(self.source)}"
        return "many small things, or the processor was taken away"


def _whose(source: Any) -> str:
    """The client's address where `source` is the callback of a connection."""
    sock = getattr(getattr(source, "__self__", None), "sock", None)
    try:
        name = sock.getpeername()  # type: ignore[union-attr]
    except (OSError, AttributeError):
        return ""
    if isinstance(name, tuple):
        return f", connection {name[0]}:{name[1]}"
    return f", connection {name!r}" if name else ""
