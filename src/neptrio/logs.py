"""Logging as the flags ask for it: levels that can each be off, two line formats, a file.

Lines look like a Triton server's: `I1121 00:31:38.123456 4711 repository.py:12] text` or, with
--log-format=ISO8601, `2026-11-21T00:31:38Z I 4711 repository.py:12] text`. They know the levels E, W and I
alone: verbose records are I, as there.

The problem: much of what is logged is somebody else's doing (a model that fails on every request, a
request that a library chokes on), and whoever can provoke a line can provoke ten thousand a second,
until the disk is full. The choice: what one place in the code says of one subject (a model) is bounded
in number and each record in length; what is left out is counted in the next record that is not.

Rules:
 1. Each place and subject has a budget of BURST records, refilled by one in REFILL_SECONDS. The subject
    is the record's attribute of that name, else its first argument if that is text: the model's name.
 2. Verbose records and a model's own words (its logger, its process's output) are never left out:
    somebody asked for them.
 3. A record longer than LONGEST characters loses its middle.
 4. Only a record begins at the beginning of a line: what clients and models wrote is indented behind its line
    ends, and other characters that end lines or command terminals are shown as Python writes them.
 5. Nobody waits for whoever reads the log: what it cannot take is held up to HELD_BYTES and written by a
    thread; what is beyond that is left out and counted in the log.
"""

from __future__ import annotations

import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from neptrio.settings import Settings

HELD_BYTES = 1 << 20
PIECE_BYTES = 4096  # a pipe that can be written to takes as much without blocking (PIPE_BUF)
INDENT = "    "
# control characters but line feed and tab, and what Unicode counts as line ends
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
BURST = 20.0
REFILL_SECONDS = 10.0
LONGEST = 16 << 10
PLACES = 1024  # remembered at once; the one that was silent longest is forgotten first
OF_A_MODEL = "neptrio.model."  # logger names of what models say themselves


class LineFormat(logging.Formatter):
    """One line per record, in the `default` or the `ISO8601` form."""

    def __init__(self, iso: bool) -> None:
        super().__init__()
        self._iso = iso

    def format(self, record: logging.LogRecord) -> str:
        when = time.gmtime(record.created)
        letter = "E" if record.levelno >= logging.ERROR else "W" if record.levelno >= logging.WARNING else "I"
        where = f"{record.process} {record.filename}:{record.lineno}]"
        if self._iso:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', when)} {letter} {where}"
        else:
            micros = int(record.created % 1 * 1e6)
            head = f"{letter}{time.strftime('%m%d %H:%M:%S', when)}.{micros:06d} {where}"
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        text = f"{head} {_one_record(text)}"
        if len(text) > LONGEST:
            half = LONGEST // 2
            left = len(text) - 2 * half
            text = f"{text[:half].rstrip()}\n{INDENT}... ({left} characters left out) ...\n{INDENT}{text[-half:]}"
        left_out = getattr(record, "left_out", 0)
        return f"{text} ({left_out} records like this were left out before it)" if left_out else text


def _one_record(text: str) -> str:
    """Rule 4."""
    if text.isprintable():
        return text
    plain = CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    return plain.replace("\n", "\n" + INDENT)


class LevelFilter(logging.Filter):
    """Drops the levels that are off. Its attributes may be changed while the server runs."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.info = settings.log_info
        self.warning = settings.log_warning
        self.error = settings.log_error
        self.verbose = settings.log_verbose

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.ERROR:
            return self.error
        if record.levelno >= logging.WARNING:
            return self.warning
        if record.levelno >= logging.INFO:
            return self.info
        return self.verbose > 0


class FloodFilter(logging.Filter):
    """Rules 1 and 2. Any thread. The clock is that of the records."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        # place and subject -> records it may have now, when that was, records left out since one passed
        self._places: dict[tuple[str, int, str, str], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO or record.name.startswith(OF_A_MODEL):
            return True
        # compiled code has no line of its own, so its format strings tell its places apart; text
        # without arguments may be of anybody's making
        text, subject = "", getattr(record, "subject", "")
        if record.args and isinstance(record.args, tuple):
            text = str(record.msg)
            subject = subject or (record.args[0] if isinstance(record.args[0], str) else "")
        key = record.name, record.lineno, text, subject
        with self._lock:
            budget, then, left_out = self._places.pop(key, (BURST, record.created, 0))
            budget = min(BURST, budget + max(0.0, record.created - then) / REFILL_SECONDS)
            passes = budget >= 1
            if passes:
                record.left_out, budget, left_out = left_out, budget - 1, 0
            else:
                left_out += 1
            if len(self._places) >= PLACES:
                del self._places[next(iter(self._places))]
            self._places[key] = budget, record.created, left_out
        return passes


@dataclass(frozen=True)
class LogStatistics:
    """Of a log whose reader may be slow."""

    bytes: int
    left_out: int


class LineHandler(logging.StreamHandler[Any]):
    """Writes records to a stream without ever waiting for its reader (rule 5). Any thread.

    A line goes straight to the descriptor while that takes it, so that nothing is lost when the process dies.
    A stream without a descriptor, as tests have it, is written to as it is.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._waiting: deque[bytes] = deque()
        self._held = 0
        self._left_out = 0
        self._news = threading.Condition()
        self._busy = False  # a thread writes what waits
        self._poll = select.poll()
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError, AttributeError):
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLOUT)

    def emit(self, record: logging.LogRecord) -> None:
        if self._fd < 0:
            super().emit(record)
            return
        try:
            line = (self.format(record) + self.terminator).encode("utf-8", "backslashreplace")
            with self._news:
                if not self._busy:
                    line = line[self._write_now(line) :]
                if line:
                    self._keep(line)
        except Exception:
            self.handleError(record)

    def _write_now(self, line: bytes) -> int:
        """Writes as much as there is room for; how much that was."""
        at = 0
        while at < len(line) and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            at += os.write(self._fd, line[at : at + PIECE_BYTES])
        return at

    def _keep(self, line: bytes) -> None:
        if self._held + len(line) > HELD_BYTES:
            self._left_out += 1
            return
        self._waiting.append(line)
        self._held += len(line)
        if not self._busy:
            self._busy = True
            threading.Thread(target=self._write_later, name="log-writer", daemon=True).start()
        self._news.notify_all()

    def _write_later(self) -> None:
        """Writes what waits, however long that takes; ends when there is nothing."""
        while True:
            with self._news:
                if not self._waiting:
                    self._busy = False
                    self._news.notify_all()
                    return
                line = self._waiting.popleft()
            try:
                at = 0
                while at < len(line):
                    try:
                        at += os.write(self._fd, line[at:])
                    except BlockingIOError:  # somebody who shares the descriptor has set it so
                        select.select([], [self._fd], [])
            except OSError:
                pass  # nobody reads any more
            with self._news:
                self._held -= len(line)
                if self._left_out and not self._waiting:
                    note = f"{INDENT}... {self._left_out} records were left out: nobody read the log ...\n"
                    self._left_out = 0
                    self._waiting.append(note.encode())
                    self._held += len(note)

    def flush(self) -> None:
        """Nothing is buffered here: what waits is on its way."""

    def statistics(self) -> LogStatistics:
        """What waits for the reader now, and what was left out since it last read all."""
        with self._news:
            return LogStatistics(self._held, self._left_out)

    def settle(self, seconds: float) -> None:
        """Gives what waits so long to be written: the process is about to end."""
        with self._news:
            self._news.wait_for(lambda: not self._busy, seconds)


def reopen() -> bool:
    """Opens the log file again, by its name: it may have been moved away. False where there is none.

    Raises OSError when it cannot be opened; the log goes on in the old one then.
    """
    found = False
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            name = handler.baseFilename
            stream = open(name, "a", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115 the handler's
            old = handler.setStream(stream)
            if old is not None:
                old.close()
            found = True
    return found


def settle(seconds: float = 1.0) -> None:
    """At the end of the process: what is not written yet has so long."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.settle(seconds)


def start_logging(settings: Settings) -> logging.Handler:
    """Sends the package's log where the settings say. Raises OSError when the file cannot be opened."""
    handler: logging.Handler
    if settings.log_file:
        handler = logging.FileHandler(settings.log_file, encoding="utf-8", errors="backslashreplace")
    else:
        handler = LineHandler(sys.stderr)
    handler.setFormatter(LineFormat(settings.log_format == "ISO8601"))
    handler.addFilter(LevelFilter(settings))  # first: what is not logged costs no budget
    handler.addFilter(FloodFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("neptrio").setLevel(logging.DEBUG)
    return handler
