"""The lines that were logged last, for whoever asks the server for them (service.recent_log).

The problem: who looks at a server in a browser, or from another machine, cannot read its stderr. The choice: the handler
that writes the log keeps its last lines in memory, as they were written.

Rules:
 1. At most MOST lines are kept, and KEPT_CHARACTERS; a line, which may be a whole traceback, is cut to LONGEST.
 2. Every line has a number, one more than that of the line before it, so that who asks again can ask for what is new, and
    sees how many are gone meanwhile.
 3. Lines of front ends come a moment later than their time says (frontend.front), and stand where they came.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from neptrio.limits import shown

MOST = 1000
KEPT_CHARACTERS = 512 << 10
LONGEST = 4096
LEVELS = ("verbose", "info", "warning", "error")


class Line(NamedTuple):
    """A record of the log."""

    number: int
    time_ms: int
    level: int  # of LEVELS
    text: str


class LogTail:
    """The last lines. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may come in between, on the same thread, and log
        self._lines: deque[Line] = deque()
        self._size = 0
        self._number = 0

    def add(self, time_ms: int, level: int, text: str) -> None:
        """Another line was logged."""
        text = shown(text, LONGEST)
        with self._lock:
            self._number += 1
            self._lines.append(Line(self._number, time_ms, level, text))
            self._size += len(text)
            while len(self._lines) > MOST or self._size > KEPT_CHARACTERS:
                self._size -= len(self._lines.popleft().text)

    @property
    def last(self) -> int:
        """The number of the last line, 0 before the first."""
        return self._number

    def since(self, number: int) -> list[Line]:
        """Those of the kept lines that came after the one with that number, oldest first."""
        with self._lock:
            if number >= self._number:
                return []
            return [line for line in self._lines if line.number > number]
