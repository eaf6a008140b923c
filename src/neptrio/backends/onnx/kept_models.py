"""Optimised ONNX models that are kept for their next load, in --model-cache-directory.

The problem: ONNX Runtime rewrites a model's graph for this machine each time a session is made, which is a quarter to three
quarters of the load of a real model. A model that is put away and loaded again pays for that again and again. The choice: at
the first load what it makes of the model is written, in ONNX Runtime's own format, and sessions are made of that.

Rules:
 1. An entry counts for the same files of the model (their places, sizes, times and numbers), the same release of ONNX Runtime, the
    same processor and the same options only: all that is part of its name.
 2. What an entry says is run: it is used only where nobody but this user can have written it. It is opened once, looked at, and
    read through that descriptor; a sum at its end tells whether it is whole.
 3. An entry is written under another name, by one session at a time, and takes its name when it is complete and on the disk.
 4. An entry that cannot be used is removed, and the model loaded as if there had been none. A model that cannot be written is
    loaded all the same.
 5. What is kept has at most MOST_BYTES: what was used longest ago goes first.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import platform
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neptrio.backends.onnx.api import OrtError
from neptrio.backends.onnx.session import OnnxSession

if TYPE_CHECKING:
    from neptrio.backends.onnx.options import Options

log = logging.getLogger("neptrio.onnx")

FOLDER = "onnx"  # in --model-cache-directory
SUFFIX, UNFINISHED = ".ort", ".part"
FORMAT = 1  # of the names
MOST_BYTES = 4 << 30
LARGEST_MODEL = 1 << 30  # bytes of its files; the format ends at 2 GiB
SUM_BYTES = 4  # at the end of an entry
PIECE_BYTES = 1 << 20
STALE_SECONDS = 3600.0  # after which a session that writes an entry must have died
# entries with which nothing is kept: they say where models are written and read, or have sessions use the bytes that they were
# made of later, too, which are gone then (rule 2)
OWN_WAYS = (
    *("session.save_model_format", "session.load_model_format", "session.optimized_model"),
    "session.use_ort_model_bytes_for_initializers",
)

READS = (("session.load_model_format", "ORT"), ("session.use_ort_model_bytes_directly", "1"))
WRITES = (("session.save_model_format", "ORT"), ("session.disable_prepacking", "1"))


def session(directory: Path, version: str, path: Path, options: Options) -> OnnxSession | None:
    """A session made of what is kept of a model, which is written first if need be. None where nothing can be."""
    if options.libraries or any(key.startswith(OWN_WAYS) for key, _ in options.entries):
        return None  # operators of a library are no part of the format
    try:
        name = _name(path, options, version)
        folder = _own_folder(directory / FOLDER)
    except OSError as error:
        _unusable(f"no optimised models are kept in '{directory}': {error}")
        return None
    if name is None:
        return None
    entry = folder / (name + SUFFIX)
    found = _read(entry, options)
    if found is None:
        _write(entry, path, options)
        found = _read(entry, options)
    return found


def _name(path: Path, options: Options, version: str) -> str | None:
    """The name of a model's entry (rule 1); None for one that is too large. Raises OSError."""
    files, size = [], 0
    for folder, folders, names in os.walk(path.parent):  # weights may lie beside the model's file
        folders.sort()
        for each in sorted(names):
            state = os.stat(os.path.join(folder, each))
            files.append(
                (
                    folder,
                    each,
                    state.st_size,
                    state.st_mtime_ns,
                    state.st_ctime_ns,
                    state.st_ino,
                    state.st_dev,
                )
            )
            size += state.st_size
    if size > LARGEST_MODEL:
        return None
    parts = [FORMAT, version, processor(), str(path.resolve()), files, repr(options)]
    return hashlib.blake2b(json.dumps(parts).encode(errors="surrogateescape"), digest_size=20).hexdigest()


@cache
def processor() -> str:
    """What a graph may be made for."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = platform.processor()
    first = text.partition("\n\n")[0].splitlines()
    told = [line for line in first if line.startswith(("model name", "flags", "Features", "CPU "))]
    return "\n".join([platform.machine(), *(told or first[:1])])


@cache
def _unusable(text: str) -> None:
    """Says it once."""
    log.warning("%s", text)


def _own_folder(folder: Path) -> Path:
    """The folder of entries, made if need be. Raises OSError where others may write there."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode) or not _only_ours(state):
        raise PermissionError(f"'{folder}' is not a folder that only this user can write to")
    return folder


def _only_ours(state: os.stat_result) -> bool:
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


@contextmanager
def _content(entry: Path) -> Iterator[Any]:
    """What ONNX Runtime wrote of an entry (rule 2). Raises OSError, and ValueError for what is damaged."""
    descriptor = os.open(entry, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        state = os.fstat(descriptor)
        if not stat.S_ISREG(state.st_mode) or not _only_ours(state) or state.st_nlink != 1:
            raise PermissionError(f"'{entry}' is not a file that only this user can write to")
        with suppress(OSError):  # of a file system that is mounted to be read, nothing is removed
            os.utime(descriptor)  # rule 5
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as whole:
            with whole[:-SUM_BYTES] as content:
                if zlib.crc32(content).to_bytes(SUM_BYTES, "little") != whole[-SUM_BYTES:]:
                    raise ValueError("it is damaged")
                yield content
    finally:
        os.close(descriptor)


def _read(entry: Path, options: Options) -> OnnxSession | None:
    """The session of an entry, None where there is none that can be used."""
    kept = replace(options, level=0, entries=(*options.entries, *READS))
    try:
        with _content(entry) as content:
            return OnnxSession(entry, kept, content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OrtError) as error:
        log.info("what was kept of model '%s' cannot be used and is made anew: %s", options.model, error)
        with suppress(OSError):
            entry.unlink()
        return None


def _write(entry: Path, path: Path, options: Options) -> None:
    """Writes the entry, unless another session does so."""
    unfinished = entry.with_suffix(UNFINISHED)
    with suppress(OSError):
        if time.time() - unfinished.lstat().st_mtime > STALE_SECONDS:
            unfinished.unlink()
    try:
        os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError:
        return
    try:
        writing = replace(options, entries=(*options.entries, *WRITES), saved_as=unfinished)
        OnnxSession(path, writing).close()  # it held all weights twice: nobody is to be served by it
        with open(unfinished, "r+b") as file:
            total = 0
            while piece := file.read(PIECE_BYTES):
                total = zlib.crc32(piece, total)
            file.write(total.to_bytes(SUM_BYTES, "little"))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(entry)
        _prune(entry.parent)
    except (OSError, OrtError) as error:
        log.info("model '%s' is not kept for its next load: %s", options.model, error)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _prune(folder: Path) -> None:
    """Removes what was used longest ago while there is too much. Raises OSError."""
    found = []
    with closing(os.scandir(folder)) as entries:
        for entry in entries:
            if entry.name.endswith(SUFFIX):
                with suppress(OSError):
                    state = entry.stat(follow_symlinks=False)
                    found.append((state.st_mtime_ns, state.st_size, entry.path))
    total = sum(size for _, size, _ in found)
    for _, size, file in sorted(found):
        if total <= MOST_BYTES:
            break
        with suppress(FileNotFoundError):
            os.unlink(file)
        total -= size
