"""Logger: a model's lines in the server's log."""

from __future__ import annotations

import sys
from enum import IntEnum

from . import _checks, _host
from ._foreign import valid

_NAMES = ("INFO", "WARNING", "ERROR", "VERBOSE")


class Logger:
    """`Logger.log_info("...")` and friends; no instance is needed. Thread-safe."""

    class LogLevel(IntEnum):
        """The levels."""

        INFO = 0
        WARNING = 1
        ERROR = 2
        VERBOSE = 3

    INFO = LogLevel.INFO
    WARNING = LogLevel.WARNING
    ERROR = LogLevel.ERROR
    VERBOSE = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: LogLevel = LogLevel.INFO) -> None:
        """One line at a level: Logger.INFO, WARNING, ERROR or VERBOSE."""
        _checks.member(level, Logger.LogLevel, "level of Logger.log()", "Logger")
        _write(int(level), message)

    @staticmethod
    def log_info(message: str) -> None:
        """One line at level INFO."""
        _write(0, message)

    @staticmethod
    def log_warn(message: str) -> None:
        """One line at level WARNING."""
        _write(1, message)

    @staticmethod
    def log_error(message: str) -> None:
        """One line at level ERROR."""
        _write(2, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        """One line that shows only when the server logs verbosely."""
        _write(3, message)


def _write(level: int, message: str) -> None:
    frame = sys._getframe(2)
    file, line = frame.f_code.co_filename, frame.f_lineno
    host, text = _host.find(), valid(_checks.text(message, "message of Logger"))
    if host is None:
        print(f"{_NAMES[level]} {file}:{line} {text}", file=sys.stderr)
    else:
        host.log(level, text, file, line)
