"""A JSON array on disk that grows, and is complete at every moment, also after `kill -9`.

The problem: replacing the bracket at an array's end by more text is not one step (a killed write may
end at any page), and writing the whole file anew for every addition costs its size each time. The
choice: two files take turns. The spare one, which nobody sees, gets what it lacks and the new text,
and then changes places with the one that is shown: a hard link keeps the shown one as the next
spare, and a rename shows the new one. Every text is written twice, whatever the file's size.

Rules:
 1. What is at `path` is a complete array, from the first rename on.
 2. A reader who keeps the file open may see the next change but one; what it has read stays true.
 3. A file that somebody moved, removed or changed is left alone: a new array begins at `path`.
 4. rest() removes the spare file; the next addition copies the array once. So does every addition on
    a file system without hard links.
 5. Spare files of servers that are gone are removed when an array begins.
"""

from __future__ import annotations

import glob
import os
from typing import Any

END = b"\n]\n"
BLOCK = 1 << 20


class ArrayFile:
    """One growing array. Not for several threads at once."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._spare = f"{path}.{os.getpid()}.tmp"
        self._shown: tuple[int, int] | None = None  # inode and size of what is at `path`
        self._spare_size = 0  # 0: there is no spare file
        self._lacks = b""  # what the spare file lacks

    def append(self, content: bytes) -> None:
        """Adds objects (JSON, joined by commas). Raises OSError; the array is then what it was."""
        if self._shown != self._there():
            self.rest()
            self._shown = None
        if self._shown is None:
            self._sweep()
        try:
            kept = self._change_places(self._write(content))
        except OSError:
            self.rest()
            raise
        self._spare_size, self._lacks = (kept, content) if kept else (0, b"")

    def take_over(self, other: ArrayFile) -> None:
        """Adds what another array holds, and removes that one."""
        other.rest()
        with open(other.path, "rb") as source:
            content = source.read()
        self.append(content[2 : -len(END)])
        os.unlink(other.path)

    def rest(self) -> None:
        """Removes the spare file."""
        self._spare_size, self._lacks = 0, b""
        for path in (self._spare, self._spare + "2"):
            try:
                os.unlink(path)
            except OSError:
                pass

    def _there(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_size

    def _write(self, content: bytes) -> tuple[int, int]:
        """Brings the spare file up to date; returns its inode and size."""
        if self._spare_size:
            with open(self._spare, "r+b", buffering=0) as out:
                out.seek(self._spare_size - len(END))
                _write(out, b",\n".join((b"", self._lacks, content)) + END)
                return os.fstat(out.fileno()).st_ino, out.tell()
        with open(self._spare, "wb", buffering=0) as out:
            if self._shown is not None:
                _copy(self.path, out)
            _write(out, (b"[\n" if self._shown is None else b",\n") + content + END)
            return os.fstat(out.fileno()).st_ino, out.tell()

    def _change_places(self, made: tuple[int, int]) -> int:
        """Shows the spare file; returns the size of the one that is spare now, 0 for none."""
        before = self._shown
        kept = 0
        if before is not None:
            try:
                os.link(self.path, self._spare + "2")
                kept = before[1]
            except OSError:  # no hard links here: there will be no spare file
                pass
        os.replace(self._spare, self.path)
        self._shown = made
        if kept:
            os.replace(self._spare + "2", self._spare)
        return kept

    def _sweep(self) -> None:
        for path in glob.glob(glob.escape(self.path) + ".*.tmp*"):
            owner = path[len(self.path) + 1 :].partition(".")[0]
            if owner.isdigit() and int(owner) != os.getpid() and not os.path.exists(f"/proc/{owner}"):
                try:
                    os.unlink(path)
                except OSError:
                    pass


def _write(out: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[out.write(view) :]


def _copy(path: str, out: Any) -> None:
    """Copies an array without its end."""
    with open(path, "rb") as source:
        left = os.fstat(source.fileno()).st_size - len(END)
        while left:
            block = source.read(min(left, BLOCK))
            if not block:
                raise OSError(f"{path} became shorter while it was read")
            _write(out, block)
            left -= len(block)
