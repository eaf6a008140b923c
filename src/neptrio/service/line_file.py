"""A file of lines that a thread of a log appends to: opened again by its name on SIGHUP, or a stream of the process.

Rules:
 1. Where lines were written in part, which a full disk can cause, what is written next begins a new line.
 2. Writing blocks until all of it is taken, also where somebody else has made the stream non-blocking.
"""

from __future__ import annotations

import os
import select
import sys
import threading
from pathlib import Path

from neptrio.logs import append_to

STREAMS = ("stdout", "stderr")


class LineFile:
    """The file. write() is for one thread; reopen() and close() for any."""

    def __init__(self, target: str, mode: int) -> None:
        """`target`: a file's path, or a stream's name; `mode`: the permissions of a file that is made. Raises OSError when
        it cannot be opened."""
        self._stream = target if target in STREAMS else ""
        self._path = Path(target)
        self._mode = mode
        self._fd = self._open()
        self._cut = False
        self._replacing = threading.Lock()  # held while the descriptor becomes another file, or none

    def _open(self) -> int:
        if self._stream:
            return os.dup((sys.stdout if self._stream == "stdout" else sys.stderr).fileno())
        return append_to(self._path, self._mode)

    @property
    def shared(self) -> bool:
        """Whether it is a stream, which others may write to between any two pieces."""
        return bool(self._stream)

    def write(self, lines: bytes) -> None:
        """Appends whole lines. Raises OSError."""
        if self._cut:
            lines = b"\n" + lines
        at = 0
        try:
            while at < len(lines):
                try:
                    at += os.write(self._fd, lines[at:] if at else lines)
                except BlockingIOError:
                    self._until_taken()
            self._cut = False
        except OSError:
            self._cut = self._cut if at == 0 else lines[at - 1 : at] != b"\n"
            raise

    def _until_taken(self) -> None:
        """Waits until the stream takes more."""
        poll = select.poll()  # select() takes no descriptor from 1024 on
        poll.register(self._fd, select.POLLOUT)
        poll.poll()

    def reopen(self) -> None:
        """Opens the file again by its name, after it was moved. If that fails, raises OSError and keeps the old one."""
        if self._stream or self._fd < 0:
            return
        new = self._open()  # may take as long as the disk does
        with self._replacing:
            if self._fd >= 0:
                os.dup2(new, self._fd, inheritable=False)
        os.close(new)

    def close(self) -> None:
        """Closes it; nothing is written any more."""
        with self._replacing:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
