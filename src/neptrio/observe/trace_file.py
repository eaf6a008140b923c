"""Trace files, written by a thread of their own.

The problem: a trace file is read while the server runs and after it was killed, and a disk may be
slow or full, and no request may notice any of it. The choice: records of finished traces gather in a
block of their scope (cext/observe/trace_block), and a thread that wakes up a few times a second takes the
blocks, makes their text and lets files grow (cext/observe/array_file).

Rules:
 1. On disk there is a complete JSON array at every moment, and a file exists only if something was
    traced.
 2. log_frequency N > 0: every N traces become `FILE.INDEX`. log_frequency 0: traces join the array in
    FILE within GATHER_SECONDS; those of a scope with a trace_count join the next `FILE.INDEX`, where
    they belong once the count is used up, and move to FILE if settings change before that.
 3. With log_frequency N, text above SPILL_BYTES does not wait for the Nth trace.
 4. The index of a file goes on over changes of settings; setting trace_file resets it.
 5. More than QUEUE_BYTES waiting: traces are dropped and counted, the path is never held up.
 6. An error ends writing with one logged message until settings are updated.
 7. No array begins in the place of something that is no trace file: an index that is taken is left out,
    FILE itself is an error.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from neptrio.codec.http_json import dump_json
from neptrio.observe.array_file import ArrayFile, sweep
from neptrio.observe.trace_block import TraceBlock
from neptrio.observe.trace_settings import Scope, holds_traces

log = logging.getLogger("neptrio.trace")

GATHER_SECONDS = 0.25
SPILL_BYTES = 16 << 20
QUEUE_BYTES = 64 << 20
FREE_BLOCKS = 4
UNLIMITED = 1 << 62
PART_BYTES = 1024  # what a part is reckoned as, without its tensors


@dataclass(frozen=True)
class TraceWriterStatistics:
    """Traces so far: written to disk, dropped for want of room or of a disk."""

    written: int
    dropped: int
    failed: bool


@dataclass
class _Buffer:
    pieces: list[bytes | TraceBlock] = field(default_factory=list)
    nbytes: int = 0
    waiting: int = 0  # traces in `pieces`
    traces: int = 0  # since the last file was closed
    home: str = ""  # the indexed file that this scope's traces grow in, once there is one


def group_text(parts: list[Any]) -> bytes:
    """The objects of a trace as they stand in the array."""
    texts = []
    for part in parts:
        texts.append(part.text())
        if part.tensors:
            texts += [dump_json(activity) for activity in part.activities()]
            part.tensors.clear()
    return b",\n".join(texts)


def _may_begin(path: str) -> bool:
    """True when an array may begin at `path`: there is no file, or it is empty or a trace file."""
    return not os.path.lexists(path) or holds_traces(path)


class TraceWriter:
    """Turns finished traces into files. put() and flush() are the trio thread's and do not block;
    settle() and close() do."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._inbox: deque[tuple[Scope, Any, int] | Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._awake = False  # the thread will look into the inbox once more
        self._closing = False
        self._put_bytes = 0  # put() alone adds to this, and the thread alone to _taken_bytes
        self._taken_bytes = 0
        self._refused = 0
        self._open: set[Scope] = set()  # those whose block the thread takes when it wakes up
        self._begun: dict[Scope, int] = {}  # with a log_frequency: traces in the file under way
        self._free: list[TraceBlock] = []  # blocks to be filled again: their memory is there already
        self._written = 0
        self._dropped = 0
        self._failed = False
        # the thread's own
        self._buffers: dict[Scope, _Buffer] = {}
        self._index: dict[str, int] = {}
        self._files: dict[str, ArrayFile] = {}
        self._swept: set[str] = set()

    def statistics(self) -> TraceWriterStatistics:
        """What has become of the traces so far."""
        return TraceWriterStatistics(self._written, self._dropped + self._refused, self._failed)

    def block(self, scope: Scope) -> TraceBlock:
        """Where the text of finished traces of `scope` is to go until the thread takes it."""
        block = self._free.pop() if self._free else TraceBlock()
        block.most = scope.frequency - self._begun.get(scope, 0) if scope.frequency else UNLIMITED
        return block

    def opened(self, scope: Scope) -> None:
        """A new block has its first trace."""
        if not scope.frequency:
            self._open.add(scope)
            if not self._awake:
                self._awaken()

    def full(self, scope: Scope) -> None:
        """The block of `scope` is large, or completes a file: the thread takes it now."""
        block = scope.take_block()
        if block is None:
            return
        self._open.discard(scope)
        if self._failed or self._put_bytes - self._taken_bytes + len(block) > QUEUE_BYTES:
            self._refused += block.traces
            return
        if scope.frequency:
            begun = self._begun.get(scope, 0) + block.traces
            self._begun[scope] = begun % scope.frequency
        self._put_bytes += len(block)
        self._inbox.append((scope, block, len(block)))
        if not self._awake:
            self._awaken()

    def put(self, scope: Scope, parts: list[Any]) -> None:
        """Takes a finished trace whose text the thread makes."""
        self.full(scope)  # what is before it
        size = PART_BYTES * len(parts)
        for part in parts:
            if part.tensors:
                size += 4 * sum(len(t.raw or b"") for t in part.tensors)
        if self._failed or self._put_bytes - self._taken_bytes + size > QUEUE_BYTES:
            self._refused += 1
            for part in parts:
                if part.tensors:
                    part.tensors.clear()
            return
        if scope.frequency:
            self._begun[scope] = (self._begun.get(scope, 0) + 1) % scope.frequency
        self._put_bytes += size
        self._inbox.append((scope, parts, size))
        if not self._awake:
            self._awaken()

    def _awaken(self) -> None:
        self._awake = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
            self._thread.start()
        self._wake.set()

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._urgent.set()
        self._awaken()

    def flush(self, scope: Scope, indexed: bool) -> None:
        """Closes what a scope has collected; `indexed`: as the next indexed file in any case."""
        self.full(scope)
        self._begun.pop(scope, None)
        if self._thread is not None:
            self._post(lambda: self._flush(scope, indexed))

    def reset(self, path: str) -> None:
        """The next indexed file of `path` is number 0."""
        self._post(lambda: self._index.__setitem__(path, 0))

    def settle(self) -> None:
        """Blocks until everything asked for so far is done, and lets a failed writer try again."""
        if self._thread is not None:
            done = threading.Event()
            self._post(self._collect)
            self._post(self._grow)
            self._post(done.set)
            done.wait()
        self._failed = False

    def close(self) -> None:
        """Blocks until everything asked for so far is done, and ends the thread."""
        if self._thread is not None:
            self._closing = True
            self._urgent.set()
            self._awaken()
            self._thread.join()
            self._thread = None
            self._closing = False

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            self._urgent.wait(GATHER_SECONDS)
            closing = self._closing
            # in this order: what is put after the look into the inbox wakes the thread again
            self._urgent.clear()
            self._wake.clear()
            self._awake = False
            until = time.monotonic() + GATHER_SECONDS  # more may come for ever; what is taken goes to disk
            while self._inbox and (closing or time.monotonic() < until):
                item = self._inbox.popleft()
                if callable(item):
                    self._guarded(item)
                else:
                    self._guarded(lambda item=item: self._take(*item))  # type: ignore[misc]
            self._collect()
            self._guarded(self._grow)
            if self._inbox and not closing:
                self._urgent.set()
                self._awaken()
        for file in self._files.values():
            file.rest()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            self._fail(error)
        except Exception:
            log.exception("a trace could not be written")

    def _fail(self, error: OSError) -> None:
        self._dropped += sum(buffer.waiting for buffer in self._buffers.values())
        self._buffers.clear()
        if not self._failed:
            self._failed = True
            log.error(
                "tracing is disabled: cannot write trace file: %s; an update of trace settings tries again",
                error,
            )
            self._on_failure()

    def _collect(self) -> None:
        """Takes the blocks of scopes whose traces need not wait for others (rule 2)."""
        for scope in list(self._open):
            self._open.discard(scope)
            block = scope.take_block()
            if block is not None:
                self._guarded(lambda scope=scope, block=block: self._take(scope, block, 0))  # type: ignore[misc]

    def _take(self, scope: Scope, made: Any, size: int) -> None:
        block = isinstance(made, TraceBlock)
        count = made.traces if block else 1
        try:
            piece = made if block else group_text(made)
        finally:
            self._taken_bytes += size
        if self._failed:
            self._dropped += count
            return
        buffer = self._buffers.get(scope)
        if buffer is None:
            buffer = self._buffers[scope] = _Buffer()
            if scope.file not in self._swept:
                self._swept.add(scope.file)
                sweep(scope.file)
        buffer.pieces.append(piece)
        buffer.nbytes += len(piece)
        buffer.waiting += count
        buffer.traces += count
        if scope.frequency and buffer.traces >= scope.frequency:
            self._flush(scope, True)
        elif buffer.nbytes > SPILL_BYTES:
            self._append(self._home(scope, buffer), buffer)

    def _grow(self) -> None:
        """Rule 2: what waits without a log_frequency goes to disk."""
        for scope, buffer in list(self._buffers.items()):
            if buffer.pieces and not scope.frequency:
                self._append(self._home(scope, buffer), buffer)

    def _home(self, scope: Scope, buffer: _Buffer) -> str:
        """The file that a scope's traces grow in: FILE, or an indexed one that it keeps."""
        if not scope.frequency and not scope.counted:
            return scope.file
        if not buffer.home:
            buffer.home = self._next(scope.file)
        return buffer.home

    def _next(self, path: str) -> str:
        index = self._index.get(path, 0)
        while not _may_begin(f"{path}.{index}"):  # rule 7
            log.warning("'%s.%d' exists and is no trace file: its number is left out", path, index)
            index += 1
        self._index[path] = index + 1
        return f"{path}.{index}"

    def _flush(self, scope: Scope, indexed: bool) -> None:
        buffer = self._buffers.get(scope)
        if buffer is not None:
            if indexed or scope.frequency:
                if buffer.pieces or buffer.home:
                    target = buffer.home or self._next(scope.file)
                    self._append(target, buffer)
                    self._files.pop(target).rest()
            else:
                if buffer.home:
                    self._move(buffer.home, scope.file)
                self._append(scope.file, buffer)
            del self._buffers[scope]
        if scope.file in self._files:
            self._files[scope.file].rest()

    def _move(self, home: str, path: str) -> None:
        """The count was not used up: what grew in an indexed file belongs to FILE."""
        self._file(path).take_over(self._files.pop(home))
        self._give_back(home)

    def _give_back(self, home: str) -> None:
        """An index that came to nothing is the next one again, if it was the last."""
        name, _, index = home.rpartition(".")
        if name in self._index and f"{self._index[name] - 1}" == index:
            self._index[name] -= 1

    def _file(self, path: str) -> ArrayFile:
        if path not in self._files:
            if not _may_begin(path):
                raise OSError(errno.EEXIST, "exists and is no trace file: it would be lost", path)
            self._files[path] = ArrayFile(path)
        return self._files[path]

    def _append(self, path: str, buffer: _Buffer) -> None:
        if buffer.pieces:
            try:
                self._file(path).append(*buffer.pieces)
            except OSError as error:
                if not os.path.exists(path):
                    self._give_back(path)
                raise OSError(error.errno, error.strerror, path) from None
            self._written += buffer.waiting
            for piece in buffer.pieces:
                if isinstance(piece, TraceBlock) and len(self._free) < FREE_BLOCKS:
                    piece.clear()
                    self._free.append(piece)
            buffer.pieces = []
            buffer.nbytes = buffer.waiting = 0
