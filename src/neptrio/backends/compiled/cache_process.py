"""The process in which a cache's library runs (cext/backends/compiled/cache_serve.cpp): its start, its messages, its end.

Rules:
 1. Whoever makes one calls end() exactly once, on the same thread. That leaves no child, thread or descriptor behind.
 2. The thread that makes one outlives it: the kernel kills the process when that thread ends.
 3. What the process sends is not believed. An answer to a question that nobody has asked, or of a size that cannot be, ends it;
    so no more is held here than was asked for.
 4. send() blocks while the process does not read, answers() while it does not write. kill() ends both. send_now() never blocks.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from neptrio.backends.python.children import Started
from neptrio.backends.python.limits import inherited
from neptrio.backends.python.printed_lines import records
from neptrio.loop import process_ends, threads
from neptrio.loop.process_ends import ends

log = logging.getLogger("neptrio.cache")

LOOKUP, INSERT = 1, 2  # questions
BEGUN, ANSWERED, NUMBERS = 1, 2, 3  # answers
FINE, NOT_FOUND, ALREADY_EXISTS = -1, 2, 6  # codes
QUESTION = struct.Struct("<IIQQ")  # kind, bytes of the key, number, bytes of the value
ANSWER = struct.Struct("<IiQQ")  # kind, code, number, bytes of the value or of the error's text
GAUGES = struct.Struct("<ddd")
MOST_BYTES = 64 << 20  # of a value
MOST_TEXT = 4096
THREADS = 4  # that ask the library at a time
LAST_LINES = 12  # of its output that are part of the reason why it ended
BEGIN_SECONDS = 60.0  # for the library to be ready
FINISH_SECONDS = 5.0  # for the library to end in good order
LEVELS = {"[E] ": logging.ERROR, "[W] ": logging.WARNING, "[I] ": logging.INFO, "[V] ": logging.DEBUG}
BOOTSTRAP = """
import ctypes, sys
abi, *numbers = sys.argv[1:6]
sock, server, most, threads = map(int, numbers)
title, library = [text.encode("utf-8", "surrogateescape") for text in sys.argv[6:]]
serve = ctypes.CDLL(abi, ctypes.RTLD_GLOBAL).neptrio_cache_serve
sys.exit(serve(sock, server, title, library, sys.stdin.buffer.read(), ctypes.c_size_t(most), threads))
"""


class Message(NamedTuple):
    """What the process has sent."""

    kind: int
    code: int
    number: int
    value: bytearray


class Violation(Exception):
    """The process has sent what cannot be."""


class CacheProcess:
    """One process, from its start to its end."""

    def __init__(self, name: str, abi: str, library: Path, settings: dict[str, str]) -> None:
        """`abi` is the library that exports the interface. Raises OSError, or NoThread."""
        self.open: set[int] = set()  # questions without an answer; whoever sends one adds its number before
        self.begun = False  # set by whoever reads the answers
        self.killed_for = ""
        self._name = name
        self._sending = threading.Lock()
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._child: Started | None = None
        self._output = None
        settings_file = os.memfd_create("cache-settings")  # nobody's to read: there may be a password
        try:
            os.write(settings_file, json.dumps(settings).encode())
            os.lseek(settings_file, 0, os.SEEK_SET)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        except BaseException:
            os.close(settings_file)
            raise
        self._socket = ours
        try:
            ends.prepare()
            numbers = [str(theirs.fileno()), str(os.getpid()), str(MOST_BYTES), str(THREADS)]
            self._child = Started(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    BOOTSTRAP,
                    abi,
                    *numbers,
                    f"cache:{name}"[:15],
                    str(library),
                ],
                stdin=settings_file,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                env=inherited(["*"]),
                process_group=0,  # Ctrl-C in the terminal is for the server only
            )
            self._child.begin()
            self._output = threads.start(self._read_output, self._child, name=f"cache-{name}-output")
            ends.watch(self._child, self._hang_up)
        except BaseException:
            self.end(0)
            raise
        finally:
            os.close(settings_file)
            theirs.close()
        self.pid = self._child.pid

    def _hang_up(self) -> None:
        """It has ended: what it has sent is still read, and then the end, whoever else holds its socket."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed

    def send(self, kind: int, number: int, key: bytes, value: bytearray | None) -> None:
        """Sends a question. Raises OSError when it has ended."""
        size = 0 if value is None else len(value)
        with self._sending:
            self._socket.sendall(QUESTION.pack(kind, len(key), number, size) + key)
            if value is not None:
                self._socket.sendall(value)

    def send_now(self, number: int, key: bytes) -> bool:
        """Sends a lookup if that does not block; whether it did."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            question = QUESTION.pack(LOOKUP, len(key), number, 0) + key
            # so few bytes are taken in whole or not at all; if not, the process sees no question that it could answer
            return self._socket.send(question, socket.MSG_DONTWAIT) == len(question)
        except OSError:
            return False
        finally:
            self._sending.release()

    def answers(self) -> Iterator[Message]:
        """What it sends, until it ends. Raises Violation (rule 3), and where the first does not come within BEGIN_SECONDS."""
        head = bytearray(ANSWER.size)
        self._socket.settimeout(BEGIN_SECONDS)
        while self._receive(memoryview(head)):
            kind, code, number, size = ANSWER.unpack(head)
            if kind == ANSWERED:
                if number not in self.open:
                    raise Violation(f"it has answered question {number}, which is not open")
                self.open.discard(number)
            most = MOST_BYTES if kind == ANSWERED and code == FINE else max(MOST_TEXT, GAUGES.size)
            if kind not in (BEGUN, ANSWERED, NUMBERS) or size > most:
                raise Violation(f"it has sent a message of kind {kind} and {size} bytes")
            if not self.begun and kind != BEGUN:
                raise Violation(f"it has sent a message of kind {kind} before it was ready")
            value = bytearray(size)
            if not self._receive(memoryview(value)):
                return
            if not self.begun:
                self._socket.settimeout(None)
            yield Message(kind, code, number, value)

    def _receive(self, room: memoryview) -> bool:
        """Fills `room`; False at the end."""
        while room:
            try:
                got = self._socket.recv_into(room)
            except TimeoutError:
                raise Violation(f"it was not ready within {BEGIN_SECONDS:g} s") from None
            except OSError:
                return False
            if not got:
                return False
            room = room[got:]
        return True

    def _read_output(self, child: Started) -> None:
        assert child.stdout is not None
        for record, lines in records(child.stdout.fileno(), child.pidfd):
            level = LEVELS.get(record[:4])
            self._lines.extend(lines)
            log.log(
                logging.INFO if level is None else level,
                "%s: %s",
                self._name,
                record if level is None else record[4:],
            )
        child.stdout.close()

    def kill(self, why: str) -> None:
        """Kills it. Any thread; does nothing when it has ended."""
        self.killed_for = self.killed_for or why
        if self._child is not None:
            self._child.kill()

    def finish(self) -> None:
        """Asks it to end in good order. Any thread."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it has ended

    def end(self, seconds: float = 0.0) -> str:
        """Waits so long for its end, then kills it; returns why it has ended."""
        child = self._child
        if child is None:
            self._socket.close()
            return ""
        if not process_ends.wait(child, seconds):
            child.kill()
            process_ends.wait(child, None)
        ends.forget(child)
        self._hang_up()  # whoever sends gets an error, then nobody has the descriptor
        with self._sending:
            self._socket.close()
        if self._output is not None:
            self._output.join(FINISH_SECONDS)
        elif child.stdout is not None:
            child.stdout.close()
        child.close()
        status = child.returncode
        if self.killed_for:
            return self.killed_for
        why = f"its process exited with status {status}"
        if status < 0:
            why = f"its process was killed by signal {-status} ({signal.strsignal(-status)})"
        printed = "; ".join(self._lines)
        return f"{why}; it printed last: {printed}" if printed else why
