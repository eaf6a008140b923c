"""Logging as the flags ask for it: levels that can each be off, two line formats, a file.

Lines look like a Triton server's: `I1121 00:31:38.123456 4711 repository.py:12] text` or, with
--log-format=ISO8601, `2026-11-21T00:31:38Z I 4711 repository.py:12] text`.
"""

from __future__ import annotations

import logging
import sys
import time

from neptrio.settings import Settings


class LineFormat(logging.Formatter):
    """One line per record, in the `default` or the `ISO8601` form."""

    def __init__(self, iso: bool) -> None:
        super().__init__()
        self._iso = iso

    def format(self, record: logging.LogRecord) -> str:
        when = time.gmtime(record.created)
        letter = record.levelname[0]
        where = f"{record.process} {record.filename}:{record.lineno}]"
        if self._iso:
            head = f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', when)} {letter} {where}"
        else:
            micros = int(record.created % 1 * 1e6)
            head = f"{letter}{time.strftime('%m%d %H:%M:%S', when)}.{micros:06d} {where}"
        text = f"{head} {record.getMessage()}"
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        return text


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


def start_logging(settings: Settings) -> logging.Handler:
    """Sends the package's log where the settings say. Raises OSError when the file cannot be opened."""
    handler: logging.Handler
    if settings.log_file:
        handler = logging.FileHandler(settings.log_file, encoding="utf-8")
    else:
        handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormat(settings.log_format == "ISO8601"))
    handler.addFilter(LevelFilter(settings))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger("neptrio").setLevel(logging.DEBUG)
    return handler
