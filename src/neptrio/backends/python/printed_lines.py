"""Turns what a model's process prints into records of the log: one per line, but only one per traceback.

The process writes a traceback line by line, and nothing marks its end: after the line of the exception another one may
follow ("During handling of the above exception ..."). So a traceback is complete when a line comes that cannot belong
to it, or when the process prints nothing for a moment.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Iterator

TRACEBACK = "Traceback (most recent call last):"
OPENS = ("Exception in thread ", "Exception ignored in")  # and a traceback follows
FATAL = "Fatal Python error: "
CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
GOES_ON = (" ", "\t", *CHAINS, "Current thread 0x", "Thread 0x", "Extension modules: ")
SILENCE_MS = 50  # after a line that may be the last of a traceback
LAST_MS = 500
PAUSE_MS = 1000  # within a traceback: the process may wait for a free core
MOST_LINES = 1000
CHUNK = 65536
PIPE_BYTES = 1 << 20  # more than a pipe holds


class Records:
    """Takes lines and returns records."""

    def __init__(self) -> None:
        self._block: list[str] = []  # lines of a traceback that may go on
        self._told = False  # its exception has come

    @property
    def patience_ms(self) -> int | None:
        """How many milliseconds to wait for the next line before end() is called; None for no limit."""
        if not self._block:
            return None
        return SILENCE_MS if self._told else PAUSE_MS

    def line(self, line: str) -> Iterator[str]:
        """Takes the next line; returns the records that are complete now."""
        if self._block and len(self._block) < MOST_LINES and self._belongs(line):
            self._block.append(line)
            return
        yield from self.end()
        if line.startswith((TRACEBACK, FATAL, *OPENS)):
            self._block.append(line)
        else:
            yield line

    def _belongs(self, line: str) -> bool:
        if line.startswith(TRACEBACK):
            before = next(filter(None, reversed(self._block)))
            belongs = before.startswith((*CHAINS, *OPENS))
            self._told = self._told and not belongs
            return belongs
        if not line or line.startswith(GOES_ON):
            return True
        if self._told:
            return False
        self._told = self._block[-1].startswith((" ", "\t", TRACEBACK))  # the exception follows the frames
        return self._told

    def end(self) -> Iterator[str]:
        """Returns the incomplete traceback, if there is one."""
        block, self._block, self._told = self._block, [], False
        if block:
            yield "\n".join(block).rstrip("\n")


def records(descriptor: int, pidfd: int = -1) -> Iterator[tuple[str, list[str]]]:
    """Yields each record with its lines of what a pipe brings, until its other end is closed.

    `pidfd` is the process's. When it has ended, other processes that it has started may hold the pipe. What they write is
    waited for LAST_MS at most, and what is in the pipe then is the last.
    """
    found = Records()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    if pidfd >= 0:
        poll.register(pidfd, select.POLLIN)
    left = b""
    chunk = b"."
    until: float | None = None  # it has ended
    late = 0  # bytes that came since
    while chunk:
        patience = found.patience_ms
        if until is not None:
            rest = int(max(0.0, until - time.monotonic()) * 1000)
            patience = rest if patience is None else min(patience, rest)
        ready = [number for number, _ in poll.poll(patience)]
        if pidfd in ready:
            poll.unregister(pidfd)
            until = time.monotonic() + LAST_MS / 1000
        if until is not None and time.monotonic() >= until and (descriptor not in ready or late > PIPE_BYTES):
            chunk = b""
            made = [*found.line(left.decode("utf-8", "replace")), *found.end()] if left else list(found.end())
        elif not ready:
            made = list(found.end())
        elif descriptor not in ready:
            continue
        else:
            chunk = os.read(descriptor, CHUNK)
            if until is not None:
                late += len(chunk)
            lines = (left + chunk).split(b"\n")
            left = lines.pop()
            if len(left) > CHUNK or (left and not chunk):  # a very long line, or the last one
                lines.append(left)
                left = b""
            made = [one for raw in lines for one in found.line(raw.decode("utf-8", "replace"))]
            if not chunk:
                made += found.end()
        for record in made:
            yield record, record.split("\n")
