"""Who of a model's instances may initialize, where only one at a time may.

The problem: whether they may at the same time is what the code in their processes says, when each has begun already. The choice:
a process that may not while another does asks for its turn, and waits for the answer.

Rules:
 1. Whoever asks has over() called when it has initialized, has failed, or has ended.
 2. The time that it waits does not count as that of its initialize().
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from neptrio.rings.message import Violation


class Turns:
    """The line of one model version. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: deque[tuple[Any, Callable[[], None]]] = deque()  # the first has its turn

    def ask(self, who: Any, begin: Callable[[], None]) -> None:
        """Calls `begin`, which must not block, when it is the turn of `who`. Raises Violation where that one is in line."""
        with self._lock:
            if any(other is who for other, _ in self._line):
                raise Violation("that it wants a turn while it has one or waits for it")
            self._line.append((who, begin))
            if len(self._line) == 1:
                begin()

    def over(self, who: Any) -> None:
        """Ends the turn of `who`, or its waiting. Nothing happens where it has not asked."""
        with self._lock:
            had = bool(self._line) and self._line[0][0] is who
            self._line = deque(row for row in self._line if row[0] is not who)
            if had and self._line:
                self._line[0][1]()
