"""Trace files, written by a thread of their own.

The problem: a trace file is read while the server runs and after it was killed, and a disk may be
slow or full, and no request may notice any of it. The choice: finished traces wait in a bounded
queue for a thread that wakes up a few times a second and lets files grow (observe.array_file).

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
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from neptrio.codec.json_infer import dump_json
from neptrio.observe.array_file import ArrayFile
from neptrio.observe.trace_settings import Scope

log = logging.getLogger("neptrio.trace")

GATHER_SECONDS = 0.25
SPILL_BYTES = 16 << 20
QUEUE_BYTES = 64 << 20
PART_BYTES = 1024  # what a part is reckoned as, without its tensors


@dataclass(frozen=True)
class TraceWriterStatistics:
    """Traces so far: written to disk, dropped for want of room or of a disk."""

    written: int
    dropped: int
    failed: bool


@dataclass
class _Buffer:
    texts: list[bytes] = field(default_factory=list)  # of a trace each
    nbytes: int = 0
    traces: int = 0  # since the last file was closed
    home: str = ""  # the indexed file that this scope's traces grow in, once there is one


def group_text(parts: list[Any]) -> bytes:
    """The objects of a trace as they stand in the array."""
    if len(parts) == 1 and not parts[0].tensors:
        text: bytes = parts[0].text()
        return text
    texts = []
    for part in parts:
        texts.append(part.text())
        if part.tensors:
            texts += [dump_json(activity) for activity in part.activities()]
            part.tensors.clear()
    return b",\n".join(texts)


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
        self._written = 0
        self._dropped = 0
        self._failed = False
        # the thread's own
        self._buffers: dict[Scope, _Buffer] = {}
        self._index: dict[str, int] = {}
        self._files: dict[str, ArrayFile] = {}

    def statistics(self) -> TraceWriterStatistics:
        """What has become of the traces so far."""
        return TraceWriterStatistics(self._written, self._dropped + self._refused, self._failed)

    def put(self, scope: Scope, parts: list[Any]) -> None:
        """Takes a finished trace."""
        size = PART_BYTES * len(parts)
        made: Any = parts
        plain = True
        for part in parts:
            if part.tensors:
                plain = False
                size += 4 * sum(len(t.raw or b"") for t in part.tensors)
        if self._failed or self._put_bytes - self._taken_bytes + size > QUEUE_BYTES:
            self._refused += 1
            for part in parts:
                if part.tensors:
                    part.tensors.clear()
            return
        if plain:
            made = group_text(parts)
        self._put_bytes += size
        self._inbox.append((scope, made, size))
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
        if self._thread is not None:
            self._post(lambda: self._flush(scope, indexed))

    def reset(self, path: str) -> None:
        """The next indexed file of `path` is number 0."""
        self._post(lambda: self._index.__setitem__(path, 0))

    def settle(self) -> None:
        """Blocks until everything asked for so far is done, and lets a failed writer try again."""
        if self._thread is not None:
            done = threading.Event()
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
            while self._inbox:
                item = self._inbox.popleft()
                if callable(item):
                    self._guarded(item)
                else:
                    self._guarded(lambda item=item: self._take(*item))  # type: ignore[misc]
            self._guarded(self._grow)
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
        self._dropped += sum(len(buffer.texts) for buffer in self._buffers.values())
        self._buffers.clear()
        if not self._failed:
            self._failed = True
            log.error("tracing is disabled: cannot write trace file: %s", error)
            self._on_failure()

    def _take(self, scope: Scope, made: Any, size: int) -> None:
        try:
            text = made if isinstance(made, bytes) else group_text(made)
        finally:
            self._taken_bytes += size
        if self._failed:
            self._dropped += 1
            return
        buffer = self._buffers.get(scope)
        if buffer is None:
            buffer = self._buffers[scope] = _Buffer()
        buffer.texts.append(text)
        buffer.nbytes += len(text)
        buffer.traces += 1
        if scope.frequency and buffer.traces >= scope.frequency:
            self._flush(scope, True)
        elif buffer.nbytes > SPILL_BYTES:
            self._append(self._home(scope, buffer), buffer)

    def _grow(self) -> None:
        """Rule 2: what waits without a log_frequency goes to disk."""
        for scope, buffer in list(self._buffers.items()):
            if buffer.texts and not scope.frequency:
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
        self._index[path] = index + 1
        return f"{path}.{index}"

    def _flush(self, scope: Scope, indexed: bool) -> None:
        buffer = self._buffers.get(scope)
        if buffer is not None:
            if indexed or scope.frequency:
                if buffer.texts or buffer.home:
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
            self._files[path] = ArrayFile(path)
        return self._files[path]

    def _append(self, path: str, buffer: _Buffer) -> None:
        if buffer.texts:
            try:
                self._file(path).append(b",\n".join(buffer.texts))
            except OSError:
                if not os.path.exists(path):
                    self._give_back(path)
                raise
            self._written += len(buffer.texts)
            buffer.texts = []
            buffer.nbytes = 0
