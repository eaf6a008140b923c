"""EXECUTE_TIMEOUT_SECONDS: a model's process whose oldest batch takes too long is killed.

Rules:
 1. The time of a batch counts from when it was sent to the process. An async model executes what it was sent at once, any
    other one batch after the other: there it counts from when the one before was answered, or the part before of a batch
    that is executed in parts.
 2. Only the batch that was late fails with the time limit as its cause; the others fail with the end of the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from neptrio.backends.python.process import Process
from neptrio.errors import Code, Reason, TritonError
from neptrio.execution.batch import Batch
from neptrio.loop.timers import Timers
from neptrio.request.infer_request import monotonic_ns

LOOKS = 8  # how often a running batch is checked within its time limit


def _none() -> None:
    """No batch runs."""


class ExecuteTimeout:
    """Watches the batches of one instance. Trio thread, but for `late` and error()."""

    def __init__(
        self,
        name: str,
        seconds: float | None,
        first: Callable[[], tuple[Batch, int, Process] | None],
        timers: Timers,
    ) -> None:
        """`seconds` None: no limit. `first` tells the running batch that was sent first, when (monotonic ns), and its process."""
        self._name = name
        self._seconds = seconds
        self._first: Callable[[], tuple[Batch, int, Process] | None] = first
        self._timers = timers
        self._timer: Any = None
        self._oldest: tuple[Batch | None, int] = (None, 0)  # the oldest running batch, and since when (ns)
        self.late: Batch | None = None  # the batch that was late, for which the process was killed

    @property
    def limited(self) -> bool:
        """Whether there is a limit."""
        return self._seconds is not None

    def watch(self, capacity: int) -> None:
        """Called when a batch begins: starts the checks for late batches. `capacity`: how many the process takes at a time."""
        if self._seconds is not None and self._timer is None:
            self._look(capacity, self._seconds)

    def _look(self, capacity: int, seconds: float) -> None:
        """Checks at an interval whether the oldest batch is late, and kills the process if so."""
        self._timer = None
        found = self._first()
        if found is None:
            self._oldest = (None, 0)
            return
        batch, begun, process = found
        now = monotonic_ns()
        if batch is not self._oldest[0]:
            self._oldest = (batch, begun if capacity > 1 or self._oldest[0] is None else now)
        elif begun > self._oldest[1]:
            self._oldest = (batch, begun)
        if now - self._oldest[1] >= seconds * 1e9:
            self.late = batch
            process.killed_for = self._text()
            process.kill()
            return
        again = now + int(seconds / LOOKS * 1e9)
        self._timer = self._timers.at(again, lambda: self._look(capacity, seconds))

    def stop(self) -> None:
        """The instance is gone, and nothing is watched any more."""
        self._first = _none
        self._oldest = (None, 0)
        if self._timer is not None:
            self._timer.cancel()

    def _text(self) -> str:
        return f"execute() did not return within {self._seconds:g} s (EXECUTE_TIMEOUT_SECONDS)"

    def error(self) -> TritonError:
        """What the batch that was late fails with."""
        text = f"the model instance '{self._name}' failed: its process was killed: {self._text()}"
        return TritonError(text, Code.TIMED_OUT, Reason.BACKEND)
