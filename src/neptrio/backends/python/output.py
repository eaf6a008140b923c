"""Turns what a model's process prints into records of the log: one per line, but only one per traceback.

The process writes a traceback line by line, and nothing marks its end: after the line of the exception another one may
follow ("During handling of the above exception ..."). So a traceback is complete when a line comes that cannot belong
to it, or when the process prints nothing for a moment.
"""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

TRACEBACK = "Traceback (most recent call last):"
OPENS = ("Exception in thread ", "Exception ignored in")  # and a traceback follows
FATAL = "Fatal Python error: "
CHAINS = ("During handling of the above exception", "The above exception was the direct cause")
GOES_ON = (" ", "\t", *CHAINS, "Current thread 0x", "Thread 0x", "Extension modules: ")
SILENCE_MS = 50  # after a line that may be the last of a traceback
PAUSE_MS = 1000  # within a traceback: the process may wait for a free core
MOST_LINES = 1000
CHUNK = 65536


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


def records(descriptor: int) -> Iterator[tuple[str, list[str]]]:
    """Yields each record with its lines of what a pipe brings, until its other end is closed."""
    found = Records()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    left = b""
    chunk = b"."
    while chunk:
        if not poll.poll(found.patience_ms):
            made = list(found.end())
        else:
            chunk = os.read(descriptor, CHUNK)
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
