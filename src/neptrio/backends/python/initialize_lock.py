"""The lock of a model's instances of which only one at a time may initialize.

The problem: whether they may at the same time is what the code in their processes says, when each has begun already. The choice:
a process that may not while another does asks for the lock, and waits for the answer.

Rules:
 1. Whoever asks has release() called when it has initialized, has failed, or has ended.
 2. The time that it waits does not count as that of its initialize().
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from neptrio.rings.message import Violation


class InitializeLock:
    """That of one model version; who asks first has it first. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[tuple[Any, Callable[[], None]]] = deque()  # the first has the lock

    def acquire(self, who: Any, begin: Callable[[], None]) -> None:
        """Calls `begin`, which must not block, when `who` has the lock. Raises Violation where that one is in line."""
        with self._lock:
            if any(other is who for other, _ in self._line):
                raise Violation("that it wants a lock which it has or waits for")
            self._line.append((who, begin))
            if len(self._line) == 1:
                begin()

    def release(self, who: Any) -> None:
        """Takes the lock from `who`, or ends its waiting. Nothing happens where it has not asked."""
        with self._lock:
            had = bool(self._line) and self._line[0][0] is who
            self._line = deque(row for row in self._line if row[0] is not who)
            if had and self._line:
                self._line[0][1]()
