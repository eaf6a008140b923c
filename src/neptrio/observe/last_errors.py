"""The errors that requests for a model met last: which texts, how often, since when.

The problem: counters say that requests fail, and the log, which limits repetitions, may say why among much else. Whoever
looks at the server wants the texts themselves, with how often each came. The choice: each model version has a small table
of distinct texts, written where a failure is counted and nowhere else, so that requests that succeed never meet it.

Rules:
 1. A table holds the MOST texts that came last. A new one takes the place of the one that has not come for longest.
 2. A text is cut to LONGEST characters. The id of a request at its beginning is left out: it would make each text
    another one.
 3. Counted are accepted requests that failed or were cancelled, and those that were `refused`: they were wrong, or there was
    no place for them. The statistics extension counts the first two as failed and the last nowhere.
 4. A text holds what its client was told, so it may quote inputs; readers are those who may see recent traces.
 5. What a terminal would obey is shown as escapes, where the table is read.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from neptrio import terminal
from neptrio.errors import TritonError
from neptrio.limits import LAST_ERRORS as MOST
from neptrio.limits import LONGEST_LAST_ERROR as LONGEST
from neptrio.limits import shown

ID = "[request id: "


@dataclass(slots=True)
class _Entry:
    count: int
    first_ms: int
    last_ms: int


class LastErrors:
    """The table of one model version. Trio thread only."""

    def __init__(self) -> None:
        # (text, code, reason, refused) -> its entry, the one that came last at the end
        self._found: dict[tuple[str, str, str, bool], _Entry] = {}

    def note(self, error: TritonError, refused: bool = False) -> None:
        """A request ended with this error, or was not accepted because of it."""
        text = error.message
        if text.startswith(ID):
            _, end, rest = text.partition("] ")
            text = rest if end else text
        key = (shown(text, LONGEST), error.code.title, error.reason.value, refused)
        now = time.time_ns() // 1_000_000
        entry = self._found.pop(key, None)
        if entry is None:
            entry = _Entry(0, now, now)
            if len(self._found) >= MOST:
                del self._found[next(iter(self._found))]
        entry.count += 1
        entry.last_ms = now
        self._found[key] = entry

    def rows(self) -> list[dict[str, Any]]:
        """What is in it, the one that came last first. Times are milliseconds since the epoch."""
        return [
            {
                "text": terminal.shown(text),
                "code": code,
                "reason": reason,
                "refused": refused,
                "count": entry.count,
                "first": entry.first_ms,
                "last": entry.last_ms,
            }
            for (text, code, reason, refused), entry in reversed(self._found.items())
        ]
