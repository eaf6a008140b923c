"""Has a batch for a Python model wait until the large inputs of its traced requests are copied.

The problem: a trace shows inputs as they came, and the model may write to their memory as soon as it has them. Large inputs
are not copied when the request comes, but by a thread a moment later (observe.tensor_copier). Most batches find that
done. The choice: one that does not waits in line, as it would for inputs on a device (execution.input_fetch).

Rules:
 1. Batches of an instance begin in the order of their submission: those behind one that waits wait, too.
 2. Only Python models wait; no other backend writes to inputs.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from neptrio.execution.batch import Batch
from neptrio.loop.mailbox import WorkItem

if TYPE_CHECKING:
    from neptrio.execution.instance import Instance


class TracedInputs(WorkItem):
    """One batch's wait: start() and deliver() on the trio thread, copied() on the copier's."""

    def __init__(self, instance: Instance, batch: Batch) -> None:
        self._instance = instance
        self._batch = batch

    def start(self) -> None:
        """The batch waits, and those that are begun behind it."""
        self._instance.line = deque()
        trace = next(r.trace for r in self._batch.requests if r.trace is not None)
        trace.when_copied(self.copied)

    def copied(self) -> None:
        """Everything is copied: sends the item back."""
        self._instance.mailbox.completions.post(self)

    def deliver(self) -> None:
        """Begins the batch and those behind it."""
        self._batch.copying = False
        self._instance.begin_line(self._batch)
