"""EXECUTE_TIMEOUT_SECONDS of ONNX models on a GPU: a run that does not return is answered without it.

The problem: ONNX Runtime waits for the device by itself, so a kernel that hangs keeps the instance's thread for ever, and
nothing can end that. The choice: the trio thread looks, answers the batch in place of the thread and leaves it behind.

Rules:
 1. Either the thread ends a run or the trio thread gives it up, decided under a lock. A batch that was given up is answered
    by another one with the same requests; when its run returns after all, nothing of it is used.
 2. Batches that wait behind it are answered at the same time: the thread will not come to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from neptrio.errors import TritonError
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import monotonic_ns

if TYPE_CHECKING:
    from neptrio.execution.instance import Instance
    from neptrio.loop.timers import Timers

LOOKS = 8  # how often it is looked, within the limit, whether a run has begun


class RunBatch(Batch):
    """A batch that may be answered before its run returns."""

    given_up = False

    def deliver(self) -> None:
        if not self.given_up:
            super().deliver()


class RunLimit:
    """Watches the runs of one instance. begin() and end() on the instance's thread, the rest on the trio thread."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        """`late` is called when a run takes longer than `seconds`."""
        self.seconds = seconds
        self._late = late
        self._lock = threading.Lock()
        self._running: tuple[Batch, int] | None = None  # the batch, and when it began (monotonic ns)
        self._ended = 0
        self._timer = False

    def begin(self, batch: Batch) -> None:
        """A run begins."""
        self._running = (batch, monotonic_ns())

    def end(self) -> None:
        """The run has returned."""
        with self._lock:
            self._running = None
            self._ended += 1

    @property
    def running(self) -> bool:
        """Whether a run has begun and not returned."""
        return self._running is not None

    def progress(self) -> tuple[int, int]:
        """How many runs are under way, and how many have ended (Device.queues). Any thread."""
        return int(self.running), self._ended

    def watch(self, instance: Instance, timers: Timers) -> None:
        """A batch was made: from now on it is looked, until there is none."""
        if not self._timer:
            self._timer = True
            self._again(monotonic_ns() + int(self.seconds / LOOKS * 1e9), instance, timers)

    def _again(self, when_ns: int, instance: Instance, timers: Timers) -> None:
        timers.at(when_ns, partial(self._look, instance, timers))

    def _look(self, instance: Instance, timers: Timers) -> None:
        limit, now, running = int(self.seconds * 1e9), monotonic_ns(), self._running
        if running is not None and now - running[1] >= limit:
            self._timer = False
            self._late()
        elif running is not None:
            self._again(running[1] + limit, instance, timers)
        elif instance.under_way:
            self._again(now + limit // LOOKS, instance, timers)
        else:
            self._timer = False

    def give_up(self, error: TritonError, behind: TritonError) -> None:
        """Answers the batch whose run has not returned with `error`, and those that wait behind it with another."""
        with self._lock:
            running = self._running
            if running is None or running[0].given_up:  # type: ignore[attr-defined]
                return
            batch = running[0]
            batch.given_up = True  # type: ignore[attr-defined]
        instance = batch.instance
        waiting = [other for other in instance.under_way if other is not batch]
        removed = [other for other in waiting if instance.mailbox.replace(other)]
        _answer(instance, batch, error)
        for other in waiting:
            if other in removed:
                _answer(instance, other, behind)
            else:  # it waits for a grant of the rate limiter, and is answered when it has one
                other.error, other.count_execution = behind, False
                other.compute_start = other.compute_end = monotonic_ns()


def _answer(instance: Instance, batch: Batch, error: TritonError) -> None:
    """Answers a batch by another one, since the thread may still use it."""
    made = Batch(batch.model, batch.requests, batch.close_reason, batch.oldest_wait_ns)
    made.instance, made.error = instance, error
    made.count_execution = batch.compute_start != 0
    made.compute_end = monotonic_ns()
    made.compute_start = batch.compute_start or made.compute_end
    for request in batch.requests:
        request.batch = made
    instance.under_way[instance.under_way.index(batch)] = made
    made.deliver()
