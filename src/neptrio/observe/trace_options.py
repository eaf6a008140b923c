"""The tracing flags of the command line: --trace-config, and the older --trace-* flags.

The settings hold their texts; here they are parsed and checked, before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from neptrio.errors import InvalidArgument
from neptrio.observe.span_options import SpanOptions
from neptrio.observe.trace_settings import DEFAULTS, LEVELS, scalar

CONFIG_KEYS = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "tail": "trace_tail",
    "log-frequency": "log_frequency",
    "file": "trace_file",
}
OPENTELEMETRY_KEYS = (
    "url",
    "resource",
    "bsp_max_queue_size",
    "bsp_schedule_delay",
    "bsp_max_export_batch_size",
)
MODES = ("triton", "opentelemetry")

DIRECTORY = Path("traces")
MAX_BYTES = 1 << 30


@dataclass(frozen=True)
class TraceOptions:
    """The tracing flags as they were given."""

    config: tuple[str, ...] = ()  # MODE,KEY=VALUE or KEY=VALUE
    file: str = ""
    level: tuple[str, ...] = ()
    rate: str = ""
    count: str = ""
    log_frequency: str = ""
    directory: Path = DIRECTORY  # the folder in which clients may choose trace_file
    max_bytes: int = MAX_BYTES  # that files in it may take
    tensor_bytes: int = 1 << 20  # most bytes traced of each tensor
    allow_forced: bool = False  # requests may ask to be traced, by a parameter
    forced_by_header: bool = False  # and by a header, for which the fast paths of requests are left


def _split(options: TraceOptions) -> tuple[str, list[tuple[str, str]], list[tuple[str, str]]]:
    """--trace-config as (mode, settings, options of mode opentelemetry). Raises ValueError."""
    chosen = "triton"
    found: list[tuple[str, str]] = []
    spans: list[tuple[str, str]] = []
    for item in options.config:
        mode, comma, rest = item.partition(",")
        if not comma or "=" in mode:
            mode, rest = "", item
        key, equals, value = rest.partition("=")
        if not equals or mode not in ("", *MODES):
            raise ValueError(f"--trace-config: expected MODE,KEY=VALUE or KEY=VALUE, got '{item}'")
        known: Iterable[str] = OPENTELEMETRY_KEYS if mode == "opentelemetry" else CONFIG_KEYS
        if key == "mode":
            value = value.lower()
            if value not in MODES:
                raise ValueError(f"--trace-config: unknown mode '{value}', expected {' or '.join(MODES)}")
            chosen = value
        elif key not in known:
            raise ValueError(
                f"--trace-config: unknown setting '{key}'{f' of mode {mode}' if mode else ''}, expected one "
                f"of {', '.join(known)}"
            )
        else:
            (spans if mode == "opentelemetry" else found).append((key, value))
    return chosen, found, spans


def span_options(options: TraceOptions) -> SpanOptions | None:
    """The options of mode opentelemetry, None in mode triton. Raises ValueError."""
    mode, _, given = _split(options)
    values: dict[str, Any] = {}
    resource: list[tuple[str, str]] = []
    for key, value in given:
        if key == "url":
            values["url"] = value if "://" in value else f"http://{value}"
        elif key == "resource":
            name, equals, text = value.partition("=")
            if not equals or not name:
                raise ValueError(f"--trace-config: expected opentelemetry,resource=KEY=VALUE, got '{value}'")
            resource.append((name, text))
        else:
            if not (value.isascii() and value.isdigit() and len(value) < 10):
                raise ValueError(f"--trace-config: {key} must be a number below 1000000000, got '{value}'")
            # 0 is the least there can be
            values["schedule_delay_ms" if key == "bsp_schedule_delay" else key[4:]] = max(1, int(value))
    made = SpanOptions(resource=tuple(resource), **values)
    # a batch is no larger than what waits for it
    made = replace(made, max_export_batch_size=min(made.max_export_batch_size, made.max_queue_size))
    return made if mode == "opentelemetry" else None


def start_values(options: TraceOptions) -> dict[str, Any]:
    """The start value of every trace setting, from --trace-config or the older --trace-* flags. Raises ValueError."""
    _, found, _ = _split(options)
    span_options(options)
    texts = {CONFIG_KEYS[key]: value for key, value in found if key != "level"}
    levels = [value for key, value in found if key == "level"]
    older = {
        "trace_file": options.file,
        "trace_rate": options.rate,
        "trace_count": options.count,
        "log_frequency": options.log_frequency,
    }
    if options.config and (any(older.values()) or options.level):
        raise ValueError(
            "--trace-config replaces --trace-file, --trace-level and the like: use only one of them"
        )
    texts.update({key: value for key, value in older.items() if value})
    levels += options.level
    values = dict(DEFAULTS)
    for level in levels:
        level = level.upper()
        if level not in ("OFF", "MIN", "MAX", *LEVELS):
            raise ValueError(f"unknown trace level '{level}', expected OFF, TIMESTAMPS or TENSORS")
        if level == "OFF" and len(levels) > 1:
            raise ValueError("Expect only one trace level 'OFF' is specified")
    asked = {"TIMESTAMPS" if level.upper() in ("MIN", "MAX") else level.upper() for level in levels}
    values["trace_level"] = tuple(level for level in LEVELS if level in asked)
    try:
        for field, text in texts.items():
            values[field] = scalar(field, text, "flag")
    except InvalidArgument as error:
        raise ValueError(f"trace settings: {error}") from None
    return values


def directory(options: TraceOptions) -> str:
    """The folder in which trace_file may be set over the network."""
    return os.path.realpath(options.directory)


def make_directory(folder: str | Path) -> None:
    """Creates the folder of --trace-dir and its parents: one that an operator has named at start, so that what is wrong
    with it ends the start; the default one when a client first names a file in it. Raises InvalidArgument."""
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise InvalidArgument(
            f"--trace-dir: the folder '{folder}' cannot be made: {error.strerror}"
        ) from None
