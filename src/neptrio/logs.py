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
"""

from __future__ import annotations

import logging
import sys
import threading
import time

from neptrio.settings import Settings

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
        text = f"{head} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        if len(text) > LONGEST:
            half = LONGEST // 2
            text = f"{text[:half]}\n... ({len(text) - 2 * half} characters left out) ...\n{text[-half:]}"
        left_out = getattr(record, "left_out", 0)
        return f"{text} ({left_out} records like this were left out before it)" if left_out else text


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


def start_logging(settings: Settings) -> logging.Handler:
    """Sends the package's log where the settings say. Raises OSError when the file cannot be opened."""
    handler: logging.Handler
    if settings.log_file:
        handler = logging.FileHandler(settings.log_file, encoding="utf-8", errors="backslashreplace")
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormat(settings.log_format == "ISO8601"))
    handler.addFilter(LevelFilter(settings))  # first: what is not logged costs no budget
    handler.addFilter(FloodFilter())
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("neptrio").setLevel(logging.DEBUG)
    return handler
