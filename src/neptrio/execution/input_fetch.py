"""Copies a batch's inputs from devices to the host, for instances that cannot read them where they lie.

The problem: a copy takes as long as the device has other work, or for ever while a kernel hangs, and the trio thread must
not wait for it. The choice: the device's own thread copies, and the batch begins when it has.

Rules:
 1. Batches of an instance begin in the order of their submission: those behind one that is fetched wait in line.
 2. Where a tensor cannot be copied (its device has failed), the batch fails as one that could not be prepared does.
 3. The requests are changed on the trio thread only.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import neptrio.request.device_memory as device_memory
from neptrio.errors import Internal, Reason, TritonError
from neptrio.execution.batch import Batch
from neptrio.foreign import text_of
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import MemoryKind, Tensor, monotonic_ns

if TYPE_CHECKING:
    from neptrio.execution.instance import Instance

GPU = int(MemoryKind.GPU_MEMORY)


class InputFetch(WorkItem):
    """One batch's copies: start() and deliver() on the trio thread, copy() on the device's."""

    def __init__(self, instance: Instance, batch: Batch) -> None:
        self._instance = instance
        self._batch = batch
        self._found: list[list[Tensor]] = []
        self._error: TritonError | None = None

    def start(self) -> None:
        """Has the copies made, by the thread of the first tensor's device."""
        self._instance.line = deque()
        device = next(t.memory_id for r in self._batch.requests for t in r.inputs if t.memory_kind == GPU)
        pool = device_memory.pools.get(device)
        if (
            pool is None or pool.post is None
        ):  # it is not open: nothing waits, and the copy says what is wrong
            self.copy()
        else:
            pool.post(self.copy)

    def copy(self) -> None:
        """Copies, and sends the item back."""
        try:
            self._found = [[device_memory.on_host(t) for t in r.inputs] for r in self._batch.requests]
        except TritonError as error:
            self._error = error
        except Exception as error:  # without an answer the batch would wait for ever
            self._error = Internal(
                f"inputs could not be copied to the host: {text_of(error)}", reason=Reason.BACKEND
            )
        self._instance.mailbox.completions.post(self)

    def deliver(self) -> None:
        """Begins the batch and those behind it."""
        instance, batch = self._instance, self._batch
        if self._error is None:
            for request, inputs in zip(batch.requests, self._found, strict=True):
                request.inputs = inputs
            place = instance.under_way.index(batch)
            batch = instance.make_batch(batch.requests, batch.close_reason, batch.oldest_wait_ns)
            instance.under_way[place] = batch
        else:
            batch.error, batch.count_execution, batch.fetching = self._error, False, False
            batch.compute_start = batch.compute_end = monotonic_ns()
        instance.begin_line(batch)
