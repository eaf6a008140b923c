"""Logging as the flags configure it: levels that can each be off, two line formats, a file.

Lines look like a Triton server's: `I1121 00:31:38.123456 4711 repository.py:12] text` or, with --log-format=ISO8601,
`2026-11-21T00:31:38Z I 4711 repository.py:12] text`. As there, only the levels E, W and I are shown: verbose records
are I.

The problem: much of the log is caused by others (a model that fails on every request, a request that a library cannot
handle), and whoever can cause one line can cause ten thousand a second, until the disk is full. The choice: records
from one place in the code about one subject (a model) are limited in number, and every record in length; records that
were left out are counted in the next one that is not.

Rules:
 1. Each place and subject may log BURST records, and one more every REFILL_SECONDS. The subject is the record's
    attribute `subject`, or else its first argument if that is text: the model's name.
 2. Verbose records are never left out: somebody asked for them. What a model itself logs or prints has a much larger
    allowance, MODEL_BURST records and MODEL_PER_SECOND more each second: a loop that prints fills no disk.
 3. A record longer than LONGEST characters loses its middle.
 4. Only records begin at the beginning of a line: further lines of texts from clients and models are indented, and
    other characters that end lines or control terminals are shown as Python escapes.
 5. Nobody waits for the log's reader: what it does not take at once is kept, up to HELD_BYTES, and written by a
    thread; beyond that records are left out, and counted in the log.
 6. What cannot be written (the disk is full) is left out and counted in the log when it can be. Of a log file that is said
    once, on stderr. A record that was written in part keeps its line.
 7. The lines that were logged last are kept in memory, for whoever asks the server for them (observe.log_tail).
"""

from __future__ import annotations

import errno
import logging
import os
import re
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neptrio.foreign import summary, text_of
from neptrio.loop import threads
from neptrio.observe.log_tail import LogTail
from neptrio.settings import Settings

HELD_BYTES = 1 << 20
PIECE_BYTES = 4096  # a pipe that is ready takes so many bytes without blocking (PIPE_BUF)
INDENT = "    "
# control characters except line feed and tab, and the line ends of Unicode
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
BURST = 20.0
REFILL_SECONDS = 10.0
MODEL_BURST = 20_000.0
MODEL_PER_SECOND = 1_000.0
LONGEST = 16 << 10
PLACES = 1024  # places remembered at once; the one that has been silent longest is forgotten first
OF_A_MODEL = "neptrio.model."  # logger names of models' own messages


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
        text = _said(record, self.formatException)
        if record.name.startswith(OF_A_MODEL):  # which instance of which model says it
            text = f"{record.name[len(OF_A_MODEL) :]}: {text}"
        text = f"{head} {_one_record(text)}"
        if len(text) > LONGEST:
            half = LONGEST // 2
            left = len(text) - 2 * half
            text = f"{text[:half].rstrip()}\n{INDENT}... ({left} characters left out) ...\n{INDENT}{text[-half:]}"
        left_out = getattr(record, "left_out", 0)
        return f"{text} ({left_out} records like this were left out before it)" if left_out else text


def level_of(record: logging.LogRecord) -> int:
    """The place of a record's level among those of log_tail.LEVELS."""
    return sum(record.levelno >= least for least in (logging.INFO, logging.WARNING, logging.ERROR))


def _said(record: logging.LogRecord, trace: Callable[[Any], str]) -> str:
    """The record's text and its exception's traceback, where these can be made: the texts of what is logged may be others' code."""
    try:
        text = record.getMessage()
    except BaseException:
        if not isinstance(record.args, tuple):
            raise
        text = str(record.msg) % tuple(map(text_of, record.args))
    if record.exc_info:
        try:
            text += "\n" + trace(record.exc_info)
        except BaseException as error:
            text += f"\n{text_of(record.exc_info[1])} (its traceback cannot be shown: {summary(error)})"
    return text


def _one_record(text: str) -> str:
    """The text so that only the record begins a line (rule 4)."""
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
    """Limits the number of records (rules 1 and 2). Any thread. Time is taken from the records."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()  # a finalizer may come in between, on the same thread, and log
        # (place and subject) -> (records it may log now, time of that number, records left out since the last one)
        self._places: dict[tuple[str, int, str, str], tuple[float, float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.INFO:
            return True
        if record.name.startswith(OF_A_MODEL):
            return self._passes(record, (record.name, 0, "", ""), MODEL_BURST, MODEL_PER_SECOND)
        # Compiled code has no line numbers, so format strings distinguish its places. Text without arguments may
        # contain anything, so it is not used.
        text, subject = "", getattr(record, "subject", "")
        if record.args and isinstance(record.args, tuple):
            text = str(record.msg)
            subject = subject or (record.args[0] if isinstance(record.args[0], str) else "")
        return self._passes(record, (record.name, record.lineno, text, subject), BURST, 1 / REFILL_SECONDS)

    def _passes(
        self, record: logging.LogRecord, key: tuple[str, int, str, str], burst: float, per_second: float
    ) -> bool:
        with self._lock:
            budget, then, left_out = self._places.pop(key, (burst, record.created, 0))
            budget = min(burst, budget + max(0.0, record.created - then) * per_second)
            passes = budget >= 1
            if passes:
                record.left_out, budget, left_out = left_out, budget - 1, 0
            else:
                left_out += 1
            if len(self._places) >= PLACES:
                self._places.pop(next(iter(self._places)), None)
            self._places[key] = budget, record.created, left_out
        return passes


@dataclass(frozen=True)
class LogStatistics:
    """The state of a log whose reader may be slow."""

    bytes: int
    left_out: int


class LineHandler(logging.StreamHandler[Any]):
    """Writes records to a stream without ever waiting for its reader (rule 5). Any thread.

    A line is written to the descriptor directly as long as that takes it, so that nothing is lost when the process
    dies. A stream without a descriptor, as in tests, is written to as usual.
    """

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.tail: LogTail | None = None  # what is written is kept there as well
        self._waiting: deque[bytes] = deque()
        self._held = 0
        self._left_out = 0
        self._failed = 0  # records that could not be written since the last one that was
        self._cut = False  # the last one was written in part
        self._news = threading.Condition()
        self._busy = False  # a thread writes what could not be written at once
        self._poll = select.poll()
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError, AttributeError):
            self._fd = -1
        else:
            self._poll.register(self._fd, select.POLLOUT)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if self.tail is not None:
            self.tail.add(int(record.created * 1000), level_of(record), text)
        return text

    def emit(self, record: logging.LogRecord) -> None:
        if self._fd < 0:
            super().emit(record)
            return
        try:
            line = (self.format(record) + self.terminator).encode("utf-8", "backslashreplace")
        except Exception:
            self.handleError(record)
            return
        with self._news:
            try:
                if not self._busy:
                    line = line[self._write_now(line) :]
                if line:
                    self._keep(line)
            except OSError as error:
                self._failed += 1
                first, reason = self._failed == 1, error.strerror or str(error)
            except Exception:
                self.handleError(record)
                return
            else:
                return
        if first:
            self.cannot_write(reason)

    def cannot_write(self, reason: str) -> None:
        """Called with the first of the records in a row that cannot be written."""

    def _write_now(self, line: bytes) -> int:
        """Writes as many bytes as there is room for; returns how many. Raises OSError."""
        if self._failed:
            note = f"{INDENT}... {self._failed} records were left out: they could not be written ...\n"
            head = ("\n" if self._cut else "") + note
            if not any(event & select.POLLOUT for _, event in self._poll.poll(0)):
                return 0
            self._write_piece(head.encode())
            self._failed = 0
        at = 0
        while at < len(line) and any(event & select.POLLOUT for _, event in self._poll.poll(0)):
            at += self._write_piece(line[at : at + PIECE_BYTES])
        return at

    def _write_piece(self, piece: bytes) -> int:
        try:
            sent = os.write(self._fd, piece)
        except BlockingIOError:  # whoever shares the descriptor has made it non-blocking
            return 0
        if sent:
            self._cut = piece[sent - 1 : sent] != b"\n"
        return sent

    def _keep(self, line: bytes) -> None:
        if self._held + len(line) > HELD_BYTES:
            self._left_out += 1
            return
        if not self._busy:
            try:
                threads.start(self._write_later, name="log-writer")
            except threads.NoThread:
                self._left_out += 1
                return
            self._busy = True
        self._waiting.append(line)
        self._held += len(line)
        self._news.notify_all()

    def _write_later(self) -> None:
        """Writes the kept bytes, however long that takes; returns when there are none."""
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
                    except BlockingIOError:  # whoever shares the descriptor has made it non-blocking
                        select.select([], [self._fd], [])
            except OSError:  # the reader has closed its end
                self._failed += 1
                self._cut = self._cut or at > 0
            with self._news:
                self._held -= len(line)
                if self._left_out and not self._waiting:
                    note = f"{INDENT}... {self._left_out} records were left out: nobody read the log ...\n"
                    self._left_out = 0
                    self._waiting.append(note.encode())
                    self._held += len(note)

    def flush(self) -> None:
        """Does nothing: there is no buffer to flush."""

    def statistics(self) -> LogStatistics:
        """The bytes that wait for the reader, and the records left out since nothing waited."""
        with self._news:
            return LogStatistics(self._held, self._left_out)

    def settle(self, seconds: float) -> None:
        """Waits for up to `seconds` until the kept bytes are written: the process is about to end."""
        with self._news:
            self._news.wait_for(lambda: not self._busy, seconds)


def append_to(path: str | os.PathLike[str], mode: int = 0o666) -> int:
    """A descriptor that appends to a file, which is made with these permissions where it is missing. Raises OSError, also for a
    named pipe that nobody reads: waiting for a reader would hold the start, or whoever opens a log again, without a word."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        opened = os.open(path, flags, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise OSError(error.errno, "nobody reads this named pipe", os.fspath(path)) from None
        raise
    os.set_blocking(opened, True)
    return opened


class LogFile(LineHandler):
    """Writes records to a file, to which others may append too. Any thread. Raises OSError when it cannot be opened."""

    def __init__(self, path: str, instead: logging.Handler | None = None) -> None:
        """`instead` is told when the file cannot be written."""
        self.path = os.path.abspath(path)
        self._instead = instead
        super().__init__(os.fdopen(append_to(self.path), "ab", buffering=0))

    def reopen(self) -> None:
        """Opens the file again by its name. Raises OSError when that fails, and goes on with the old one."""
        new = append_to(self.path)
        with self._news:
            os.dup2(new, self._fd, inheritable=False)
        os.close(new)

    def cannot_write(self, reason: str) -> None:
        if self._instead is not None:
            text = f"the log file '{self.path}' cannot be written: {reason}; what is logged is lost meanwhile"
            self._instead.handle(logging.LogRecord(__name__, logging.ERROR, __file__, 0, text, (), None))

    def close(self) -> None:
        super().close()
        self.stream.close()


def reopen() -> bool:
    """Opens the log file again by its name, since it may have been renamed. Returns False when there is none.

    Raises OSError when it cannot be opened; then logging continues in the old file.
    """
    found = False
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LogFile):
            handler.reopen()
            found = True
    return found


def tail() -> LogTail | None:
    """The lines that were logged last; None where the log is another program's."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler) and handler.tail is not None:
            return handler.tail
    return None


def settle(seconds: float = 1.0) -> None:
    """To be called at the end of the process: waits for up to `seconds` until everything is written."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineHandler):
            handler.settle(seconds)


def start_logging(settings: Settings) -> logging.Handler:
    """Sends the package's log to where the settings say. Raises OSError when the file cannot be opened."""
    handler = LineHandler(sys.stderr)
    form = LineFormat(settings.log_format == "ISO8601")
    if settings.log_file:
        handler.setFormatter(form)
        handler = LogFile(settings.log_file, handler)
    handler.setFormatter(form)
    handler.tail = LogTail()
    handler.addFilter(LevelFilter(settings))  # first, so that records that are not logged count nowhere
    handler.addFilter(FloodFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("neptrio").setLevel(logging.DEBUG)
    return handler
