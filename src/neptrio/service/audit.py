"""The audit log (--audit-log): a line of JSON for each change, and for each client that was refused access.

Rules:
 1. Verbs that change something (EVENTS) are recorded with their outcome, over REST and gRPC. So is every access,
    inference too, that was refused because of who asked (401, 403). Reading is not recorded.
 2. A thread writes the lines, so the loop never waits for the disk. Records are left out while more than HELD_BYTES
    wait to be written. Refusals, which anybody can cause, are also left out beyond REFUSALS_PER_SECOND; changes are
    not. The next record that is written says how many were left out, those that the disk did not take included.
 3. Text from clients is cut to LONGEST characters, and JSON escapes line breaks in it: one line is one record, also behind
    one that was written in part (line_file).
 4. The file can be read by its owner only. It is appended to, and opened again on SIGHUP.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from typing import Any

from neptrio.errors import Code, TritonError
from neptrio.loop import threads
from neptrio.service.line_file import LineFile

log = logging.getLogger("neptrio.audit")

HELD_BYTES = 1 << 20
REFUSALS_PER_SECOND = 50
LONGEST = 300
REFUSED = (Code.UNAUTHENTICATED, Code.DENIED, Code.FORBIDDEN)
# REST verb or gRPC method -> what happened
EVENTS = {
    "repository_load": "load",
    "repository_unload": "unload",
    "repository_check": "check",
    "label_setting": "labels",
    "trace_setting": "trace",
    "logging": "logging",
    "system_shm_register": "shared-memory-register",
    "cuda_shm_register": "shared-memory-register",
    "system_shm_unregister": "shared-memory-unregister",
    "cuda_shm_unregister": "shared-memory-unregister",
    "sequence_end": "sequence-end",
    "RepositoryModelLoad": "load",
    "RepositoryModelUnload": "unload",
    "TraceSetting": "trace",
    "LogSettings": "logging",
    "SystemSharedMemoryRegister": "shared-memory-register",
    "CudaSharedMemoryRegister": "shared-memory-register",
    "SystemSharedMemoryUnregister": "shared-memory-unregister",
    "CudaSharedMemoryUnregister": "shared-memory-unregister",
}


class AuditLog:
    """The log. record() is for the trio thread, close() and reopen() too."""

    def __init__(self, target: str) -> None:
        """`target`: a file's path, or `stderr`. Raises OSError when the file cannot be opened."""
        self._file = LineFile(target, 0o600)
        self._lines: deque[tuple[bytes, int]] = deque()  # and how many were left out before it
        self.held = 0
        self._left_out = 0
        self._refusals = float(REFUSALS_PER_SECOND)
        self._then = time.monotonic()
        self._news = threading.Condition()
        self._closing = False
        self._thread = threads.start(self._write, name="audit-writer")

    def record(
        self,
        what: str,
        protocol: str,
        address: str,
        token: str,
        *,
        certificate: str = "",
        model: str = "",
        target: str = "",
        error: TritonError | None = None,
    ) -> None:
        """Writes a record, unless rule 1 or 2 leaves it out.

        `what` is a REST verb or a gRPC method, `token` the name of the client's token ("" if it has none), `target` a
        memory region or a sequence, `error` why it failed or was refused.
        """
        refused = error is not None and error.code in REFUSED
        if what not in EVENTS and not refused:
            return
        if refused and not self._may_refuse():
            with self._news:
                self._left_out += 1
            return
        now = time.time()
        row: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(now))}.{int(now % 1 * 1000):03d}Z",
            "event": EVENTS.get(what, what),
            "outcome": "ok" if error is None else "refused" if refused else "failed",
            "protocol": protocol,
            "address": address,
            "token": token or None,
        }
        for key, value in (("certificate", certificate), ("model", model), ("target", target)):
            if value:
                row[key] = value[:LONGEST]
        if error is not None:
            row["error"] = str(error)[:LONGEST]
        self._put(row)

    def _may_refuse(self) -> bool:
        now = time.monotonic()
        grown = self._refusals + (now - self._then) * REFUSALS_PER_SECOND
        self._then = now
        self._refusals = min(float(REFUSALS_PER_SECOND), grown)
        if self._refusals < 1:
            return False
        self._refusals -= 1
        return True

    def _put(self, row: dict[str, Any]) -> None:
        with self._news:
            before, self._left_out = self._left_out, 0
            if before:
                row["left_out_before"] = before
            line = json.dumps(row).encode() + b"\n"
            if self.held + len(line) > HELD_BYTES:
                self._left_out = before + 1
                return
            self._lines.append((line, before))
            self.held += len(line)
            self._news.notify()

    def _write(self) -> None:
        told = False
        lost = 0  # records that were not written since the last one that was
        while True:
            with self._news:
                while not self._lines:
                    if self._closing:
                        return
                    self._news.wait()
                line, before = self._lines.popleft()
            size = len(line)
            if lost:
                line = json.dumps({**json.loads(line), "left_out_before": lost + before}).encode() + b"\n"
            try:
                self._file.write(line)
                told = False
                lost = 0
            except OSError as error:
                if not told:
                    log.error("--audit-log cannot be written: %s", error.strerror)
                told = True
                lost += before + 1
            with self._news:
                self.held -= size

    def reopen(self) -> None:
        """Opens the file again by its name, after it was moved. If that fails, raises OSError and keeps the old one."""
        self._file.reopen()

    def close(self, seconds: float = 1.0) -> None:
        """Waits up to `seconds` for the lines that are not written yet, and ends the writer's thread. The file stays open
        where that still waits for whoever reads it."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(seconds)
        if not self._thread.is_alive():
            self._file.close()
