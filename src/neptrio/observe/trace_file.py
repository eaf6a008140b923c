"""Trace files, written by a thread of their own.

The problem: a trace file is read while the server runs and after it was killed, and a disk may be
slow or full, and no request may notice any of it. The choice: finished traces wait in a bounded
queue for a thread that turns them into text and replaces files as a whole.

Rules:
 1. On disk there is a complete JSON array at every moment: files are replaced by rename, never written
    in place. A file exists only if something was traced.
 2. log_frequency N > 0: every N traces become `FILE.INDEX`. log_frequency 0: traces are kept until a
    flush (settings updated, shutdown) and then join the array in FILE. A flush because the count is used
    up goes to `FILE.INDEX` in both cases.
 3. Text above SPILL_BYTES does not wait: it joins the file that it would be written to.
 4. The index of a file goes on over changes of settings; setting trace_file resets it.
 5. More than QUEUE_BYTES waiting: traces are dropped and counted, the path is never held up.
 6. An error ends writing with one logged message until settings are updated.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from neptrio.codec.json_infer import dump_json
from neptrio.observe.trace_settings import Scope

log = logging.getLogger("neptrio.trace")

SPILL_BYTES = 16 << 20
QUEUE_BYTES = 64 << 20
PART_BYTES = 2048  # what a part without tensors is reckoned as
END = b"\n]\n"


@dataclass(frozen=True)
class TraceWriterStatistics:
    """Traces so far: written to disk, dropped for want of room or of a disk."""

    written: int
    dropped: int
    failed: bool


@dataclass
class _Buffer:
    texts: list[bytes] = field(default_factory=list)
    nbytes: int = 0
    traces: int = 0  # since the last file was closed, spilled ones too


class TraceWriter:
    """Turns finished traces into files. Methods may be called from any thread and do not block,
    but for settle() and close()."""

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._waiting = 0
        self._written = 0
        self._dropped = 0
        self._failed = False
        # the thread's own
        self._buffers: dict[Scope, _Buffer] = {}
        self._index: dict[str, int] = {}
        self._begun: set[str] = set()

    def statistics(self) -> TraceWriterStatistics:
        """What has become of the traces so far."""
        return TraceWriterStatistics(self._written, self._dropped, self._failed)

    def _post(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="trace-writer", daemon=True)
            self._thread.start()
        self._queue.put(work)

    def put(self, scope: Scope, parts: list[Any]) -> None:
        """Takes a finished trace."""
        size = sum(PART_BYTES + 4 * sum(len(t.raw or b"") for t in part.tensors) for part in parts)
        with self._lock:
            full = self._failed or self._waiting + size > QUEUE_BYTES
            if full:
                self._dropped += 1
            else:
                self._waiting += size
        if full:
            for part in parts:
                part.tensors = []
            return
        self._post(lambda: self._take(scope, parts, size))

    def flush(self, scope: Scope, indexed: bool) -> None:
        """Writes what a scope has collected; `indexed`: to the next indexed file in any case."""
        if self._thread is not None:
            self._post(lambda: self._flush(scope, indexed))

    def reset(self, path: str) -> None:
        """The next indexed file of `path` is number 0; writing is tried again after a failure."""
        self._post(lambda: self._reset(path))

    def settle(self) -> None:
        """Blocks until everything asked for so far is done, and lets a failed writer try again."""
        if self._thread is not None:
            done = threading.Event()
            self._post(done.set)
            done.wait()
        self._failed = False

    def close(self) -> None:
        """Blocks until everything asked for so far is done, and ends the thread."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except OSError as error:
                self._fail(error)
            except Exception:
                log.exception("a trace could not be written")

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            self._failed = True
            log.error("tracing is disabled: cannot write trace file: %s", error)
            self._on_failure()
        self._dropped += sum(buffer.traces for buffer in self._buffers.values())
        self._buffers.clear()

    def _take(self, scope: Scope, parts: list[Any], size: int) -> None:
        try:
            text = b",\n".join(dump_json(document) for part in parts for document in part.document())
        finally:
            with self._lock:
                self._waiting -= size
        for part in parts:
            part.tensors = []
        if self._failed:
            self._dropped += 1
            return
        buffer = self._buffers.setdefault(scope, _Buffer())
        buffer.texts.append(text)
        buffer.nbytes += len(text)
        buffer.traces += 1
        if scope.frequency and buffer.traces >= scope.frequency:
            self._flush(scope, True)
        elif buffer.nbytes > SPILL_BYTES:
            self._append(self._indexed(scope.file) if scope.frequency else scope.file, buffer)

    def _reset(self, path: str) -> None:
        self._index[path] = 0

    def _indexed(self, path: str) -> str:
        return f"{path}.{self._index.setdefault(path, 0)}"

    def _flush(self, scope: Scope, indexed: bool) -> None:
        buffer = self._buffers.pop(scope, None)
        if buffer is None:
            return
        if not indexed and not scope.frequency:
            self._append(scope.file, buffer)
        elif buffer.texts or scope.frequency:
            target = self._indexed(scope.file)
            self._append(target, buffer)
            self._begun.discard(target)
            self._index[scope.file] += 1
        self._written += buffer.traces

    def _append(self, path: str, buffer: _Buffer) -> None:
        """Adds the buffer's texts to the array in `path`, which this server began, or begins it."""
        if not buffer.texts:
            return
        content = b",\n".join(buffer.texts)
        buffer.texts = []
        buffer.nbytes = 0
        temporary = f"{path}.{os.getpid()}.tmp"
        try:
            with open(temporary, "wb", buffering=0) as out:
                begun = path in self._begun and _copy(path, out)
                _write(out, (b",\n" if begun else b"[\n") + content + END)
            os.replace(temporary, path)
        except OSError:
            try:
                os.unlink(temporary)
            except OSError:
                pass
            raise
        self._begun.add(path)


def _write(out: Any, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[out.write(view) :]


def _copy(path: str, out: Any) -> bool:
    """Copies an array without its end; False when there is none (somebody moved the file away)."""
    if not os.path.exists(path):
        return False
    with open(path, "rb") as source:
        left = os.fstat(source.fileno()).st_size - len(END)
        source.seek(max(left, 0))
        if left <= 0 or source.read() != END:
            return False
        source.seek(0)
        while left:
            block = source.read(min(left, 1 << 20))
            if not block:
                raise OSError(f"{path} became shorter while it was read")
            _write(out, block)
            left -= len(block)
    return True
