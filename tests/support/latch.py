"""A file that a model under test reads; the read returns only after the test has opened the latch."""

from __future__ import annotations

import os
from pathlib import Path


class Latch:
    """`path.read_text()` of any reader returns after the test has called `open()`, and from then on at once.

    It is a named pipe whose writing end the test holds; opening replaces it by a plain file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        self._end: int | None = os.open(path, os.O_RDWR)

    def open(self) -> None:
        """Lets all readers go on, now and later."""
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
