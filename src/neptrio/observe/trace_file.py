"""Trace files, written by a thread of their own.

The problem: a trace file is read while the server runs and after it was killed; the disk may be slow or full; and no
request may notice any of this. The choice: records of finished traces are collected in a block per scope
(cext/observe/trace_block). A thread that wakes up a few times a second takes the blocks, makes text of them and
appends it to files (cext/observe/array_file). Traces with tensors take it a fraction of a millisecond each: it makes their
text as they come, some milliseconds apart. Those of a quarter of a second at a time would keep a processor for a tenth of
one, and whoever woke there meanwhile, the server's loop most of all, would wait for the next tick of the clock. For the same
reason it offers its core between two traces and, without the interpreter's lock, while it prints and writes (loop/yielding).

Rules:
 1. A file on disk is a complete JSON array at every moment, and exists only if something was traced.
 2. log_frequency N > 0: every N traces become `FILE.INDEX`. log_frequency 0: traces are appended to the array in
    FILE within GATHER_SECONDS. Those of a scope with a trace_count are appended to the next `FILE.INDEX`, where
    they belong once the count is used up; if settings change before that, they are moved to FILE.
 3. With log_frequency N, text above SPILL_BYTES is written without waiting for the Nth trace; so is that of all scopes, of which
    there may be thousands, once it is above HELD_BYTES together.
 4. The index of files goes on over changes of settings; setting trace_file resets it. An index whose file another scope
    still appends to is skipped.
 5. When more than QUEUE_BYTES wait, further traces are dropped and counted; requests are never delayed.
 6. After an error nothing is written until settings are updated; one message is logged.
 7. A file that is no trace file is never overwritten: an index that is taken by one is skipped, and if it is FILE
    itself that is an error.
 8. A file has one name here, however settings spell it (`t` and `./t`, relative and absolute): two arrays under one name would
    take each other's place.
 9. Files in the folder in which clients may name them take no more than --trace-max-bytes together: what is there is
    counted, whoever made it.
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

from neptrio.loop import threads
from neptrio.loop.yielding import yield_cpu
from neptrio.observe.array_file import ArrayFile, sweep
from neptrio.observe.trace_block import TraceBlock
from neptrio.observe.trace_settings import Scope, holds_traces

log = logging.getLogger("neptrio.trace")

GATHER_SECONDS = 0.25
APART_SECONDS = 0.002  # between two looks for traces with tensors
SPILL_BYTES = 16 << 20
QUEUE_BYTES = 64 << 20
HELD_BYTES = 64 << 20
FREE_BLOCKS = 4
UNLIMITED = 1 << 62
JOIN_BYTES = 32768  # texts of a trace up to this size are one piece
PART_BYTES = 1024  # assumed size of a trace's part, without its tensors


@dataclass(frozen=True)
class TraceWriterStatistics:
    """Traces so far: written to disk, and dropped because the queue was full or the disk failed."""

    written: int
    dropped: int
    failed: bool


@dataclass
class _Buffer:
    file: str  # FILE by its one name (rule 8)
    pieces: list[tuple[bytes, ...] | TraceBlock] = field(default_factory=list)
    nbytes: int = 0
    waiting: int = 0  # traces whose text is in `pieces`
    traces: int = 0  # traces since the last file was finished
    home: str = ""  # the indexed file that this scope's traces are appended to; "": none yet


def group_text(parts: list[Any]) -> tuple[bytes, ...]:
    """The JSON objects of one trace as they stand in the array, in pieces: large texts of tensors are not copied."""
    pieces = []
    for part in parts:
        pieces += [b",\n", part.text()]
        if part.tensors is not None:
            for activity in part.activities():
                pieces += [b",\n", *activity]
            part.drop_tensors()
    del pieces[0]
    return tuple(pieces) if sum(map(len, pieces)) > JOIN_BYTES else (b"".join(pieces),)


def _one_name(path: str) -> str:
    """The name of a file that has several (rule 8). A link at its place is not followed: the file takes that place."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name) if name.strip(".") else os.path.realpath(path)


def _may_begin(path: str) -> bool:
    """True when an array may be started at `path`: there is no file, or it is empty or a trace file."""
    return not os.path.lexists(path) or holds_traces(path)


def _size(path: str) -> int:
    """The size of a file, 0 when it is gone: spare files come and go."""
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


class TraceWriter:
    """Turns finished traces into files. put() and flush() are called on the trio thread and do not block; settle() and
    close() block."""

    def __init__(self, on_failure: Callable[[], None], folder: str = "", max_bytes: int = 0) -> None:
        """Files in `folder` may take `max_bytes` together ("": no folder is limited)."""
        self._on_failure = on_failure
        self._folder = folder
        self._max_bytes = max_bytes
        self._inbox: deque[tuple[Scope, Any, int] | Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._urgent = threading.Event()
        self._news = threading.Event()  # a trace with tensors has come, or somebody is in a hurry
        self._awake = False  # the thread will look into the inbox again before it sleeps
        self._closing = False
        self._put_bytes = 0  # only put() adds to this, only the thread to _taken_bytes: no lock is needed
        self._taken_bytes = 0
        self._refused = 0
        self._open: set[Scope] = set()  # scopes whose block the thread takes when it next wakes up
        self._begun: dict[Scope, int] = {}  # with a log_frequency: traces in the unfinished file
        self._free: list[TraceBlock] = []  # used again, because their memory is allocated already
        self._written = 0
        self._dropped = 0
        self._failed = False
        # used by the thread only
        self._buffers: dict[Scope, _Buffer] = {}
        self._held_bytes = 0  # in the buffers together
        self._index: dict[str, int] = {}
        self._files: dict[str, ArrayFile] = {}
        self._swept: set[str] = set()

    def statistics(self) -> TraceWriterStatistics:
        """Counts of traces so far."""
        return TraceWriterStatistics(self._written, self._dropped + self._refused, self._failed)

    def block(self, scope: Scope) -> TraceBlock:
        """The block that collects finished traces of `scope` until the thread takes it."""
        block = self._free.pop() if self._free else TraceBlock()
        block.most = scope.frequency - self._begun.get(scope, 0) if scope.frequency else UNLIMITED
        return block

    def opened(self, scope: Scope) -> None:
        """To be called after the first trace was added to a new block."""
        if not scope.frequency:
            self._open.add(scope)
            if not self._awake:
                self._awaken()

    def full(self, scope: Scope) -> None:
        """Gives the block of `scope` to the thread now: it is large, or completes a file."""
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
        """Queues a finished trace that does not fit into a block (it has tensors): the thread makes its text."""
        self.full(scope)  # traces that finished before this one come first
        size = PART_BYTES * len(parts)
        for part in parts:
            if part.tensors is not None:
                size += 4 * part.tensors.size
        if self._failed or self._put_bytes - self._taken_bytes + size > QUEUE_BYTES:
            self._refused += 1
            for part in parts:
                part.drop_tensors()
            return
        if scope.frequency:
            self._begun[scope] = (self._begun.get(scope, 0) + 1) % scope.frequency
        self._put_bytes += size
        self._inbox.append((scope, parts, size))
        if not self._awake:
            self._awaken()
        if not self._news.is_set():
            self._news.set()

    def _awaken(self) -> None:
        self._awake = True
        if self._thread is None:
            try:
                self._thread = threads.start(self._run, name="trace-writer")
            except threads.NoThread:
                self._awake = False  # the next trace tries again
                return
        self._wake.set()

    def _hurry(self) -> None:
        """Has the thread look into the inbox at once."""
        self._urgent.set()
        self._news.set()
        self._awaken()

    def _post(self, work: Callable[[], None]) -> None:
        self._inbox.append(work)
        self._hurry()

    def flush(self, scope: Scope, indexed: bool) -> None:
        """Writes what a scope has collected and closes its file; `indexed`: to the next indexed file in any case."""
        self.full(scope)
        self._begun.pop(scope, None)
        if self._thread is not None:
            self._post(lambda: self._flush(scope, indexed))

    def reset(self, path: str) -> None:
        """Restarts the indexed files of `path` at 0."""
        self._post(lambda: self._index.__setitem__(_one_name(path), 0))

    def settle(self) -> None:
        """Blocks until all work so far is done, and lets a writer that has failed try again."""
        if self._thread is not None:
            done = threading.Event()
            self._post(self._collect)
            self._post(self._grow)
            self._post(done.set)
            done.wait()
        self._failed = False

    def close(self) -> None:
        """Blocks until all work so far is done, and ends the thread."""
        if self._thread is not None:
            self._closing = True
            self._hurry()
            self._thread.join()
            self._thread = None
            self._closing = False

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        closing = False
        while not closing:
            self._wake.wait()
            self._gather(time.monotonic() + GATHER_SECONDS)
            # in this order, so that whatever is posted after the look into the inbox, and a close(), wakes the thread again
            self._urgent.clear()
            self._wake.clear()
            self._awake = False
            closing = self._closing
            # more may come without end, but what was taken must get to disk
            until = time.monotonic() + GATHER_SECONDS
            while self._inbox and (closing or time.monotonic() < until):
                item = self._inbox.popleft()
                if callable(item):
                    self._guarded(item)
                else:
                    self._guarded(lambda item=item: self._take(*item))  # type: ignore[misc]
                if not closing:  # nobody is served any more, and the exit waits
                    yield_cpu()
            self._collect()
            self._guarded(self._grow)
            if self._inbox and not closing:
                self._hurry()
        for file in self._files.values():
            file.rest()

    def _gather(self, until: float) -> None:
        """Waits until then, or until somebody is in a hurry; makes the text of traces with tensors that come meanwhile."""
        while not self._urgent.is_set():
            left = until - time.monotonic()
            if left <= 0 or not self._news.wait(left):
                break
            self._news.clear()
            while self._inbox and not callable(self._inbox[0]) and time.monotonic() < until:
                item = self._inbox.popleft()
                self._guarded(lambda item=item: self._take(*item))  # type: ignore[misc]
                yield_cpu()
            self._urgent.wait(APART_SECONDS)

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
        self._held_bytes = 0
        if not self._failed:
            self._failed = True
            log.error(
                "tracing is disabled: cannot write trace file: %s; an update of trace settings tries again",
                error,
            )
            self._on_failure()

    def _collect(self) -> None:
        """Takes the blocks of scopes whose traces are written without waiting for others (rule 2)."""
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
            nbytes = len(piece) if block else sum(map(len, piece))
        finally:
            self._taken_bytes += size
        if self._failed:
            self._dropped += count
            return
        buffer = self._buffers.get(scope)
        if buffer is None:
            buffer = self._buffers[scope] = _Buffer(_one_name(scope.file))
            if buffer.file not in self._swept:
                self._swept.add(buffer.file)
                sweep(buffer.file)
        buffer.pieces.append(piece)
        buffer.nbytes += nbytes
        self._held_bytes += nbytes
        buffer.waiting += count
        buffer.traces += count
        if scope.frequency and buffer.traces >= scope.frequency:
            self._flush(scope, True)
        elif buffer.nbytes > SPILL_BYTES:
            self._append(self._home(scope, buffer), buffer)
        if self._held_bytes > HELD_BYTES:
            self._spill()

    def _spill(self) -> None:
        """Writes all that waits (rule 3)."""
        for scope, buffer in list(self._buffers.items()):
            if buffer.pieces:
                self._append(self._home(scope, buffer), buffer)

    def _grow(self) -> None:
        """Writes traces that wait without a log_frequency (rule 2)."""
        for scope, buffer in list(self._buffers.items()):
            if buffer.pieces and not scope.frequency:
                self._append(self._home(scope, buffer), buffer)

    def _home(self, scope: Scope, buffer: _Buffer) -> str:
        """The file to which a scope's traces are appended: FILE, or its own indexed file."""
        if not scope.frequency and not scope.counted:
            return buffer.file
        if not buffer.home:
            buffer.home = self._next(buffer.file)
        return buffer.home

    def _next(self, path: str) -> str:
        index = self._index.get(path, 0)
        taken = {name for buffer in self._buffers.values() for name in (buffer.file, buffer.home)}
        while (found := f"{path}.{index}") in taken or not _may_begin(found):  # rules 4 and 7
            if found not in taken:
                log.warning("'%s' exists and is no trace file: its number is left out", found)
            index += 1
        self._index[path] = index + 1
        return found

    def _flush(self, scope: Scope, indexed: bool) -> None:
        buffer = self._buffers.get(scope)
        path = _one_name(scope.file) if buffer is None else buffer.file
        if buffer is not None:
            if indexed or scope.frequency:
                if buffer.pieces or buffer.home:
                    target = buffer.home or self._next(path)
                    self._append(target, buffer)
                    self._files.pop(target).rest()
            else:
                if buffer.home:
                    self._move(buffer.home, path)
                self._append(path, buffer)
            del self._buffers[scope]
        if path in self._files:
            self._files[path].rest()

    def _move(self, home: str, path: str) -> None:
        """Moves traces from an indexed file to FILE: settings changed before the count was used up."""
        self._file(path).take_over(self._files.pop(home))
        self._give_back(home)

    def _give_back(self, home: str) -> None:
        """Makes the last index available again when nothing was written to its file."""
        name, _, index = home.rpartition(".")
        if name in self._index and f"{self._index[name] - 1}" == index:
            self._index[name] -= 1

    def _file(self, path: str) -> ArrayFile:
        if path not in self._files:
            if not _may_begin(path):
                raise OSError(errno.EEXIST, "exists and is no trace file: it would be lost", path)
            self._files[path] = ArrayFile(path)
        return self._files[path]

    def _look_for_room(self, path: str, nbytes: int) -> None:
        """Raises OSError where the folder's files would take more than they may (rule 9)."""
        if self._folder and os.path.realpath(path).startswith(self._folder + os.sep):
            found = os.walk(self._folder)
            used = sum(_size(os.path.join(place, name)) for place, _, names in found for name in names)
            if used + nbytes > self._max_bytes:
                raise OSError(
                    errno.EDQUOT,
                    f"the files in '{self._folder}' take {used} bytes, and may take {self._max_bytes} (--trace-max-bytes)",
                )

    def _append(self, path: str, buffer: _Buffer) -> None:
        if buffer.pieces:
            try:
                self._look_for_room(path, buffer.nbytes)
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
            self._held_bytes -= buffer.nbytes
            buffer.nbytes = buffer.waiting = 0
