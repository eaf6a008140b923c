"""What models held when they were loaded, kept in a file for the server's next start.

The problem: before a model was loaded once, what it takes is a guess by its files, and every start of the server begins with
guesses: a model whose code takes a gigabyte is let in as if it took some MiB, and a small one waits for room that it does not
need. The choice: a file beside the models' folders (or in --model-cache-directory) has a line for each model, with what its
files were then.

Rules:
 1. A line counts only for a folder that is still what it was: the same files, of the same sizes and times.
 2. A file that cannot be read or is not what this server writes is left out of account, with one warning, and is replaced.
    One that cannot be written is given up, with one warning.
 3. The file is replaced as a whole, and keeps what others have written of models that this server has not loaded.
 4. It has at most MOST lines: those that were measured longest ago go first.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from neptrio.repository.putting_away import HOST

log = logging.getLogger("neptrio.repository")

HIDDEN = ".neptrio-model-sizes"  # beside models' folders: names with a dot are no models
SHOWN = "model-sizes"  # in --model-cache-directory
HEAD = {"neptrio_model_sizes": 1}
MOST = 20_000
MOST_BYTES = 32 << 20  # of a file that is read
LARGEST = 1 << 50  # bytes that anything may hold
LONGEST = 1e6  # seconds


@dataclass(frozen=True, slots=True)
class Size:
    """What a model was like when it was last loaded."""

    files: str  # scan.digest() of its folder then
    held: int  # bytes of the host
    seconds: float  # its load
    devices: Mapping[int, int] = field(default_factory=dict)  # GPU -> bytes


class Remembered:
    """What models held. Trio thread only, but for read() and write()."""

    def __init__(self, file: Path | None) -> None:
        """`file`: None to remember until the server ends."""
        self._file = file
        self._sizes: dict[str, Size] = {}  # measured longest ago first
        self.changed = False

    def of(self, name: str, files: str) -> Size | None:
        """What is known of a model with these files."""
        size = self._sizes.get(name)
        return size if size is not None and files and size.files == files else None

    def note(self, name: str, files: str, held: Mapping[int, int], seconds: float) -> None:
        """The model was loaded from these files, and holds so many bytes of each place."""
        if not files:
            return
        devices = {place: size for place, size in held.items() if place != HOST and size}
        size = Size(files, held.get(HOST, 0), round(seconds, 3), devices)
        if self._sizes.pop(name, None) != size:
            self.changed = True
        self._sizes[name] = size
        if len(self._sizes) > MOST:
            del self._sizes[next(iter(self._sizes))]

    @property
    def due(self) -> bool:
        """Whether there is something to write."""
        return self.changed and self._file is not None

    def snapshot(self) -> dict[str, Size]:
        """What is to be written; it counts as written from then on."""
        self.changed = False
        return dict(self._sizes)

    def take(self, found: dict[str, Size]) -> None:
        """What read() has found; what was measured since is newer."""
        self._sizes = _bounded({**found, **self._sizes})

    def read(self) -> dict[str, Size]:
        """What the file says, {} where there is none or it says nothing. On another thread."""
        if self._file is None:
            return {}
        try:
            # not is_file(), which hides from Python 3.14 on that it may not look
            return _read(self._file) if stat.S_ISREG(self._file.stat().st_mode) else {}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            log.warning(
                "what models hold is not taken from '%s', it is measured again: %s", self._file, error
            )
            return {}

    def write(self, sizes: dict[str, Size]) -> None:
        """Writes what snapshot() has given. On another thread, one at a time."""
        file = self._file
        if file is None:
            return
        try:
            before = _read(file) if file.is_file() else {}
        except (OSError, ValueError):
            before = {}
        others = {name: size for name, size in before.items() if name not in sizes}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _write(file, _bounded({**others, **sizes}))
        except OSError as error:
            self._file = None
            log.warning(
                "what models hold is not remembered for the next start, --model-cache-directory names another folder: %s",
                error,
            )


def _bounded(sizes: dict[str, Size]) -> dict[str, Size]:
    return dict(list(sizes.items())[-MOST:])


def _read(file: Path) -> dict[str, Size]:
    """Raises OSError, or ValueError for anything that _write() does not write."""
    if file.stat().st_size > MOST_BYTES:
        raise ValueError("the file is too large")
    found: dict[str, Size] = {}
    with file.open(encoding="utf-8") as lines:
        if _parsed(next(lines, "null")) != HEAD:
            raise ValueError("the file is not one of this server's")
        for line in lines:
            entry = _parsed(line)
            found[_text(entry, "name")] = Size(
                _text(entry, "files"),
                int(_number(entry, "held", LARGEST)),
                _number(entry, "seconds", LONGEST),
                _devices(entry),
            )
    return _bounded(found)


def _parsed(line: str) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("a line is nested too deeply") from None


def _text(entry: Any, key: str) -> str:
    value = entry.get(key) if isinstance(entry, dict) else None
    if not isinstance(value, str) or not value:
        raise ValueError(f"'{key}' of a line is missing or no text")
    return value


def _number(entry: Any, key: str, most: float) -> float:
    value = entry.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= most:
        raise ValueError(f"'{key}' of a line is missing or no number that it may be")
    return value


def _devices(entry: Any) -> dict[int, int]:
    rows = entry.get("gpus", {})
    if not isinstance(rows, dict) or not all(key.isdecimal() and len(key) < 5 for key in rows):
        raise ValueError("'gpus' of a line has something else than numbers of GPUs")
    return {int(key): int(_number(rows, key, LARGEST)) for key in rows}


def _write(file: Path, sizes: dict[str, Size]) -> None:
    """Replaces the file as a whole. Raises OSError."""
    descriptor, made = tempfile.mkstemp(prefix=f"{file.name}-", dir=file.parent)
    try:
        with open(descriptor, "w", encoding="utf-8") as out:
            out.write(f"{json.dumps(HEAD)}\n")
            for name, size in sizes.items():  # one at a time: the loop goes on meanwhile
                entry = {"name": name, "files": size.files, "held": size.held, "seconds": size.seconds}
                entry |= {"gpus": size.devices} if size.devices else {}
                out.write(f"{json.dumps(entry)}\n")
        os.chmod(made, 0o644)  # servers of other users may have the same repository
        os.replace(made, file)
    except BaseException:
        os.unlink(made)
        raise
