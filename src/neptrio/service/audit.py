"""Who changed what, and who was refused: a line of JSON each (--audit-log).

Rules:
 1. Recorded are verbs that change something (EVENTS) with their outcome, over REST and gRPC, and every access that was
    refused for who asked (401, 403), inference included. Reading is not recorded.
 2. The loop never waits: lines are written by a thread. Beyond HELD_BYTES of lines that are not written yet, and beyond
    REFUSALS_PER_SECOND of refused access, which anybody can cause, records are left out; the next one that is
    written says how many. Changes are not bounded by the rate of refusals.
 3. What clients send is cut to LONGEST characters, and JSON escapes what it might contain: a line is one record.
 4. A file is made for its owner alone, appended to, and opened again on SIGHUP.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from neptrio.errors import Code, TritonError

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
STDERR = "stderr"


class AuditLog:
    """The log. record() is for the trio thread, close() and reopen() too."""

    def __init__(self, target: str) -> None:
        """`target`: a file's path, or `stderr`. Raises OSError when the file cannot be opened."""
        self._path = None if target == STDERR else Path(target)
        self._fd = self._open()
        self._lines: deque[bytes] = deque()
        self._held = 0
        self._left_out = 0
        self._refusals = float(REFUSALS_PER_SECOND)
        self._then = time.monotonic()
        self._news = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._write, name="audit-writer", daemon=True)
        self._thread.start()

    def _open(self) -> int:
        if self._path is None:
            return os.dup(sys.stderr.fileno())
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return os.open(self._path, flags, 0o600)

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
        """One record. `what`: a REST verb or gRPC method; `token`: the name of who asked, "" for nobody known;
        `target`: a region or a sequence. Refused access is an event for every verb, others only for EVENTS."""
        refused = error is not None and error.code in REFUSED
        if what not in EVENTS and not refused:
            return
        if refused and not self._may_refuse():
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
            if self._left_out:
                row["left_out_before"] = self._left_out
            line = json.dumps(row).encode() + b"\n"
            if self._held + len(line) > HELD_BYTES:
                self._left_out += 1
                return
            self._left_out = 0
            self._lines.append(line)
            self._held += len(line)
            self._news.notify()

    def _write(self) -> None:
        told = False
        while True:
            with self._news:
                while not self._lines:
                    if self._closing:
                        return
                    self._news.wait()
                line = self._lines.popleft()
                fd = self._fd
            try:
                at = 0
                while at < len(line):
                    at += os.write(fd, line[at:])
            except OSError as error:
                if not told:
                    log.error("--audit-log cannot be written: %s", error.strerror)
                told = True
            with self._news:
                self._held -= len(line)

    def reopen(self) -> None:
        """Opens the file again by its name. Raises OSError; the old one is written to then."""
        if self._path is None:
            return
        new = self._open()
        with self._news:
            os.dup2(new, self._fd, inheritable=False)
        os.close(new)

    def close(self, seconds: float = 1.0) -> None:
        """What is not written yet has so long."""
        with self._news:
            self._closing = True
            self._news.notify()
        self._thread.join(seconds)
