"""Copies the large tensors of traces, on a thread of its own.

The problem: the loop must not copy them (observe.tensor_copy), and they must be copied soon: until then their memory is kept
from whoever it belongs to, a model's process most of all, and batches for Python models wait. The writer of traces may have
milliseconds of text before it. The choice: one thread that does nothing else.

Rules:
 1. What was put here is done in this order. So whoever puts a call behind copies is called when they are made.
 2. put() and behind() are called on the trio thread, and do not block.
 3. When more than MOST_BYTES wait, a tensor is left out of its trace, which says so.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from neptrio.loop import threads
from neptrio.observe.tensor_copy import TensorCopy

log = logging.getLogger("neptrio.trace")

MOST_BYTES = (
    256 << 20
)  # of tensors that wait; the thread copies a few hundred megabytes in a tenth of a second


class TensorCopier:
    """A thread, started with the first tensor."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[Callable[[], None], int] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._put_bytes = (
            0  # only the trio thread adds to this, only the copier's to _done_bytes: no lock is needed
        )
        self._done_bytes = 0
        self._put = 0
        self.done = 0  # how many of what was put here is done

    def put(self, copy: TensorCopy) -> int:
        """Has a tensor copied; returns its number: it is copied once `done` is as high."""
        waiting = self._put_bytes - self._done_bytes
        if waiting and waiting + copy.nbytes > MOST_BYTES:
            copy.omit(f"{waiting} bytes of other tensors waited to be copied")
            return self.done
        try:
            number = self._add(copy.make, copy.nbytes)
        except threads.NoThread as error:
            copy.omit(str(error))
            return self.done
        self._put_bytes += copy.nbytes
        return number

    def behind(self, call: Callable[[], None]) -> None:
        """Has `call` called, on the copier's thread, when all tensors so far are copied."""
        try:
            self._add(call, 0)
        except threads.NoThread:
            call()  # no tensor waits

    def close(self) -> None:
        """Blocks until everything is copied, and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _add(self, call: Callable[[], None], nbytes: int) -> int:
        if self._thread is None:
            self._thread = threads.start(self._run, name="tensor-copier")
        self._put += 1
        self._queue.put((call, nbytes))
        return self._put

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            call, nbytes = item
            try:
                call()
            except Exception:
                log.exception("a tensor could not be traced")
            self._done_bytes += nbytes
            self.done += 1
            del item, call  # what was copied must not be kept until the next comes
