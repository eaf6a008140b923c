"""A file that a model under test reads, and that lets nobody pass before the test opens it."""

from __future__ import annotations

import os
from pathlib import Path


class Latch:
    """`open(path).read()` returns once the test has called `open()`; from then on at once.

    A named pipe whose writing end the test holds; a plain file takes its place when it is opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self._end: int | None = os.open(path, os.O_RDWR)

    def open(self) -> None:
        """Lets everybody pass, now and later."""
        if self._end is not None:
            empty = self.path.with_name(self.path.name + ".open")
            empty.touch()
            empty.replace(self.path)
            os.close(self._end)
            self._end = None

    def __enter__(self) -> Latch:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()
