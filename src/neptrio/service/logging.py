"""The logging extension: what is logged can be read and changed while the server runs.

Source: docs/protocol/observed.md 12. Beyond that, a wrong JSON type is refused with 400 (docs/protocol/README.md),
and so is an integer out of range, which the observed server wraps.
"""

from __future__ import annotations

import logging
from typing import Any

from neptrio.errors import InvalidArgument, Unavailable, Unsupported
from neptrio.execution.log_levels import LogLevels
from neptrio.limits import shown
from neptrio.logs import LevelFilter, LineFormat
from neptrio.settings import Settings

KEYS = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")
FLAGS = {"log_info": "info", "log_warning": "warning", "log_error": "error"}
FORMATS = ("default", "ISO8601")
UINT32_MAX = (1 << 32) - 1


class LoggingService:
    """The current log settings of this process; `shown` is told of them, for the processes of models."""

    def __init__(self, settings: Settings, shown: LogLevels | None = None) -> None:
        self._settings = settings
        self._file = settings.log_file
        self._format = settings.log_format
        self._fallback = LevelFilter(settings)
        self._shown = LogLevels() if shown is None else shown
        self._tell()

    def _filters(self) -> list[LevelFilter]:
        handlers = logging.getLogger().handlers
        found = [f for handler in handlers for f in handler.filters if isinstance(f, LevelFilter)]
        return found or [self._fallback]

    def settings(self) -> dict[str, Any]:
        """The settings, in the order of the protocol's keys."""
        levels = self._filters()[0]
        return {
            "log_file": self._file,
            "log_info": levels.info,
            "log_warning": levels.warning,
            "log_error": levels.error,
            "log_verbose_level": levels.verbose,
            "log_format": self._format,
        }

    def update(self, changes: dict[str, Any], protocol: str = "http") -> dict[str, Any]:
        """Applies all changes or none and returns the settings. Unknown keys are ignored, and so is null over HTTP.

        Over gRPC, None is a setting sent without a value, which is a wrong type. Raises Unsupported for log_file,
        InvalidArgument for a wrong type or value, Denied with --read-only, and over HTTP Unavailable for an
        unknown format, as the observed server does.
        """
        if changes:
            self._settings.change("changing log settings")
        checked: dict[str, Any] = {}
        for key, value in changes.items():
            if key == "log_file":
                raise Unsupported("log file location can not be updated through network protocol")
            if key not in KEYS or (value is None and protocol == "http"):
                continue
            self._check(key, value, protocol)
            checked[key] = value
        self.apply(checked)
        return self.settings()

    def apply(self, checked: dict[str, Any]) -> None:
        """Applies settings that update() has checked, here or in another process; others are ignored."""
        for levels in self._filters():
            for key, attribute in FLAGS.items():
                if key in checked:
                    setattr(levels, attribute, checked[key])
            if "log_verbose_level" in checked:
                levels.verbose = checked["log_verbose_level"]
        self._tell()
        if "log_format" in checked:
            self._format = checked["log_format"]
            for handler in logging.getLogger().handlers:
                if isinstance(handler.formatter, LineFormat):
                    handler.setFormatter(LineFormat(self._format == "ISO8601"))

    def _tell(self) -> None:
        levels = self._filters()[0]
        self._shown.tell((levels.info, levels.warning, levels.error, levels.verbose > 0))

    def _check(self, key: str, value: Any, protocol: str) -> None:
        http = protocol == "http"
        if key in FLAGS:
            if not isinstance(value, bool):
                raise InvalidArgument(
                    "attempt to access JSON non-boolean as boolean" if http else f"expect boolean for '{key}'"
                )
        elif key == "log_verbose_level":
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise InvalidArgument(
                    "attempt to access JSON non-unsigned-integer as unsigned-integer"
                    if http
                    else f"expect int32 for '{key}'"
                )
            if value > UINT32_MAX:
                raise InvalidArgument(f"'{key}' is out of range [0, {UINT32_MAX}], got: {value}")
        elif not isinstance(value, str):
            raise InvalidArgument(
                "attempt to access JSON non-string as string" if http else f"expect string for '{key}'"
            )
        elif value not in FORMATS:
            if http:
                raise Unavailable(f"invalid argument for --log_format, got: {shown(value)}")
            raise InvalidArgument(f"invalid argument for log_format, got: {shown(value)}")
