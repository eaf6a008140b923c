"""Trace settings: one inheritance table, field by field, and every rule about values.

A field of a model's settings is the model's own value, else the global one; a field of the global
settings is the one set over the network, else the command line's. What follows from a look-up in
that table is a Scope: effective values with the counters of sampling.

Rules:
 1. null, an empty string and an empty list clear a field of the scope they are sent to.
 2. An update is atomic: the whole table that would result is checked before anything changes.
 3. An update replaces the scopes it touches: they count from zero, and the old ones finish what
    they have sampled. A global update touches every model's scope.
 4. A trace_count that a scope has of its own goes on from what is left of it; one it inherits starts
    at what the global scope has left (the global one: at the command line's value).
 5. Values are judged where tracing is on: with level OFF anything that can be parsed is kept.
trace_tail is ours: with it, only traces of requests that took that long or failed are kept and counted.
Sources: the trace extension's text; spec/rules.md E5; spec/observed.md 11; spec/README.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from neptrio._cext.trace_scope import Sampling
from neptrio.codec.http_json import dump_json
from neptrio.codec.text import bytes_text
from neptrio.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from neptrio.settings import Settings

LONGEST_NAME = 255 - len(".4294967295.4194304.tmp2")  # an index and what array_file adds
FIELDS = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_tail")
LEVELS = ("TIMESTAMPS", "TENSORS")  # in the order of replies; none of them is OFF
UINT32_MAX = (1 << 32) - 1
INT32_MAX = (1 << 31) - 1
INVALID = "Attempting to set invalid trace setting :"
DEFAULTS: dict[str, Any] = {
    "trace_level": (),
    "trace_rate": 1000,
    "trace_count": -1,
    "log_frequency": 0,
    "trace_file": "",
    "trace_tail": 0,
}
CONFIG_KEYS = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "tail": "trace_tail",
    "log-frequency": "log_frequency",
    "file": "trace_file",
}
FILE_FIELDS = ("log_frequency", "trace_file")  # of no use in mode opentelemetry
OPENTELEMETRY_KEYS = (
    "url",
    "resource",
    "bsp_max_queue_size",
    "bsp_schedule_delay",
    "bsp_max_export_batch_size",
)
TRACES = re.compile(rb'\s*\[\s*(\]|\{\s*"(model_name|id)")')  # how trace files begin
MODES = ("triton", "opentelemetry")
SERVICE_NAME = "triton-inference-server"  # the resource attribute service.name, unless it is given


class Scope(Sampling):
    """Effective settings of a model or of the server, with what sampling counts in them.

    `own` holds the fields that were set for this scope itself.
    """

    def __init__(self, own: dict[str, Any], values: Mapping[str, Any]) -> None:
        self.own = own
        self.level = values["trace_level"]
        self.rate = values["trace_rate"]
        self.left = values["trace_count"]
        self.tail_us = values["trace_tail"]
        self.frequency: int = values["log_frequency"]
        self.file: str = values["trace_file"]
        self.to_file = bool(self.file)
        self.counted = self.left >= 0

    def values(self) -> dict[str, Any]:
        """The effective value of every field."""
        values = (self.level, self.rate, self.left, self.frequency, self.file, self.tail_us)
        return dict(zip(FIELDS, values, strict=True))


def _check(values: Mapping[str, Any], count_given: bool, mode: str) -> None:
    if not values["trace_level"]:
        return
    spans = mode == "opentelemetry"
    if spans and "TENSORS" in values["trace_level"]:
        raise InvalidArgument(INVALID + "trace level TENSORS is not there in mode opentelemetry")
    if not values["trace_rate"] and not spans:  # with spans: only requests whose parent is sampled
        raise InvalidArgument(INVALID + "sample rate must be non-zero")
    if count_given and not values["trace_count"]:
        raise InvalidArgument(INVALID + "trace count must be non-zero")
    if not values["trace_file"] and not spans:
        raise InvalidArgument(INVALID + "trace file name is not given")


class TraceTable:
    """The command line's values, the global scope, and the scopes of models that have their own."""

    def __init__(self, start: Mapping[str, Any], mode: str = "triton") -> None:
        """`start` has a value for every field. Raises InvalidArgument when they do not fit together."""
        _check(start, True, mode)
        self.mode = mode
        self.start = dict(start)
        self.globals = Scope({}, self.start)
        self.models: dict[str, Scope] = {}

    def scope(self, model: str) -> Scope:
        """The scope that a request for `model` ("" = the server's) is sampled in."""
        return self.models.get(model, self.globals)

    def scopes(self) -> list[Scope]:
        """Every scope in use."""
        return [self.globals, *self.models.values()]

    def update(self, changes: Mapping[str, Any], model: str = "") -> list[Scope]:
        """Applies parsed changes (None clears); returns the scopes that are out of use now.

        Raises InvalidArgument and changes nothing when any scope would become invalid.
        """
        if model:
            was = self.models.get(model)
            made = self._made(was, changes, self.globals.values())
            if was is not None:
                was.retired = True
            if made is None:
                self.models.pop(model, None)
            else:
                self.models[model] = made
            return [was] if was is not None else []
        above = self._made(self.globals, changes, self.start) or Scope({}, self.start)
        models: dict[str, Scope] = {}
        for name, scope in self.models.items():
            try:
                kept = self._made(scope, {}, above.values())
            except InvalidArgument as error:
                raise InvalidArgument(
                    f"{error} (the settings of model '{name}' would become invalid)"
                ) from None
            assert kept is not None
            models[name] = kept
        out = self.scopes()
        for scope in out:
            scope.retired = True
        self.globals, self.models = above, models
        return out

    def _made(self, was: Scope | None, changes: Mapping[str, Any], above: Mapping[str, Any]) -> Scope | None:
        """The scope after `changes`, over the values it inherits; None when it has no field of its own."""
        own = {} if was is None else dict(was.own)
        if was is not None and "trace_count" in own:
            own["trace_count"] = was.left
        for field, value in changes.items():
            if value is None:
                own.pop(field, None)
            else:
                own[field] = value
        values = {**above, **own}
        _check(values, changes.get("trace_count") is not None, self.mode)
        return Scope(own, values) if own else None


# ------------------------------------------------------------ from the wire


def parse_changes(given: Mapping[str, Any], protocol: str, mode: str = "triton") -> dict[str, Any]:
    """A request's settings as field -> value, None = clear; what is not a field of the mode is left out.

    Over HTTP values are JSON (strings, a list of strings for trace_level, null); over gRPC they are
    lists of strings. Raises InvalidArgument with the observed texts.
    """
    changes: dict[str, Any] = {}
    for key in FIELDS:
        if key not in given or (mode == "opentelemetry" and key in FILE_FIELDS):
            continue
        value = given[key]
        if value is None or value == [] or value == "":
            changes[key] = None
        elif key == "trace_level":
            levels = _levels(value)
            if levels is not None:
                changes[key] = levels
        else:
            if protocol == "grpc":
                if len(value) != 1:
                    raise InvalidArgument(f"expect only 1 value for '{key}'")
                value = value[0]
            if not isinstance(value, str):
                raise _wrong_type(key, "string", value)
            changes[key] = None if value == "" else _scalar(key, value, protocol)
    return changes


def _levels(value: Any) -> tuple[str, ...] | None:
    """The levels named, () for OFF, None when no name is known: nothing changes then."""
    if not isinstance(value, list):
        raise _wrong_type("trace_level", "array", value)
    for item in value:
        if not isinstance(item, str):
            raise _wrong_type("trace_level", "string", item)
    if "OFF" in value:
        if len(value) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return ()
    return tuple(level for level in LEVELS if level in value) or None


def _wrong_type(key: str, expected: str, value: Any) -> InvalidArgument:
    """The observed text, with the setting and what came."""
    got = bytes_text(dump_json(value))
    return InvalidArgument(
        f"Unable to parse '{key}': attempt to access JSON non-{expected} as {expected}, got: {got[:60]}"
    )


def _scalar(key: str, text: str, protocol: str) -> Any:
    if key == "trace_file":
        if "\0" in text:
            raise InvalidArgument("trace_file contains a NUL character")
        return text
    low, high = (-1, INT32_MAX) if key == "trace_count" else (0, UINT32_MAX)
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(f"Unable to parse '{key}', got: {text}")
    value = int(text) if len(digits) < 20 else high + 1
    if key == "trace_count" and -INT32_MAX - 1 <= value < -1:
        space = " " if protocol == "grpc" else ""
        raise InvalidArgument(f"Unable to parse 'trace_count'. Expecting value >= -1, got:{space}{text}")
    if not low <= value <= high:
        raise InvalidArgument(
            f"Unable to parse '{key}', value is out of range [ {low}, {high} ], got: {text}"
        )
    return value


def reply(scope: Scope, spans: SpanOptions | None = None) -> dict[str, Any]:
    """The settings as the protocol shows them: strings, and a list of strings for trace_level.

    `spans` are the options of mode opentelemetry. trace_tail, which is ours, shows where it is set.
    """
    shown: dict[str, Any] = {
        "trace_level": list(scope.level) or ["OFF"],
        "trace_rate": str(scope.rate),
        "trace_count": str(scope.left),
    }
    if spans is None:
        shown |= {"log_frequency": str(scope.frequency), "trace_file": scope.file, "trace_mode": "triton"}
    else:
        shown |= {"trace_mode": "opentelemetry", **spans.shown()}
    if scope.tail_us:
        shown["trace_tail"] = str(scope.tail_us)
    return shown


# ------------------------------------------------------------ trace files


def directory(settings: Settings) -> str:
    """The folder that trace_file may be set to over the network."""
    if settings.trace_dir is not None:
        return os.path.realpath(settings.trace_dir)
    start = start_values(settings)["trace_file"]
    return os.path.realpath(os.path.dirname(start) or ".")


def check_file(path: str, folder: str, allowed: bool) -> None:
    """Refuses a path that the network may not choose. Raises Unsupported or InvalidArgument."""
    if not allowed:
        raise Unsupported("trace file location can not be updated through network protocol")
    real = os.path.realpath(path)
    if os.path.commonpath([real, folder]) != folder or real == folder:
        raise InvalidArgument(f"{INVALID}trace file '{path}' is outside the trace directory '{folder}'")
    if len(os.path.basename(real).encode("utf-8", "surrogateescape")) > LONGEST_NAME:
        raise InvalidArgument(
            f"{INVALID}the name of a trace file may have {LONGEST_NAME} bytes, got '{path}'"
        )
    if os.path.isdir(real):
        raise InvalidArgument(f"{INVALID}trace file '{path}' is a directory")
    if os.path.exists(real) and not holds_traces(real):
        raise InvalidArgument(f"{INVALID}'{path}' exists and is no trace file: it would be lost")
    if not os.path.isdir(os.path.dirname(real)):
        raise InvalidArgument(f"{INVALID}the directory of trace file '{path}' does not exist")


def holds_traces(path: str) -> bool:
    """A file that may be replaced: empty, or the beginning of a trace file of either maker."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as source:
            head = source.read(64)
    except OSError:
        return False
    return not head or TRACES.match(head) is not None


# ------------------------------------------------------------ from the command line


@dataclass(frozen=True)
class SpanOptions:
    """Mode opentelemetry: where spans go, and how they are gathered on the way."""

    url: str = "http://localhost:4318/v1/traces"
    resource: tuple[tuple[str, str], ...] = ()
    max_queue_size: int = 2048  # spans; more are dropped
    schedule_delay_ms: int = 5000
    max_export_batch_size: int = 512

    def attributes(self) -> dict[str, str]:
        """The resource's attributes."""
        return {"service.name": SERVICE_NAME, **dict(self.resource)}

    def shown(self) -> dict[str, str]:
        """The options as a reply to trace/setting has them."""
        shown = {"url": self.url}
        if self.resource:
            shown["resource"] = ",".join(f"{key}={value}" for key, value in self.resource)
        return {
            **shown,
            "bsp_schedule_delay": str(self.schedule_delay_ms),
            "bsp_max_export_batch_size": str(self.max_export_batch_size),
            "bsp_max_queue_size": str(self.max_queue_size),
        }


def _split(settings: Settings) -> tuple[str, list[tuple[str, str]], list[tuple[str, str]]]:
    """--trace-config as (mode, settings, options of mode opentelemetry). Raises ValueError."""
    chosen = "triton"
    found: list[tuple[str, str]] = []
    spans: list[tuple[str, str]] = []
    for item in settings.trace_config:
        mode, comma, rest = item.partition(",")
        if not comma or "=" in mode:
            mode, rest = "", item
        key, equals, value = rest.partition("=")
        if not equals or mode not in ("", *MODES):
            raise ValueError(f"--trace-config: expected MODE,KEY=VALUE or KEY=VALUE, got '{item}'")
        known: Iterable[str] = OPENTELEMETRY_KEYS if mode == "opentelemetry" else CONFIG_KEYS
        if key == "mode":
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


def span_options(settings: Settings) -> SpanOptions | None:
    """The options of mode opentelemetry, None in mode triton. Raises ValueError."""
    mode, _, given = _split(settings)
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
            number = int(value) if value.isascii() and value.isdigit() and len(value) < 10 else 0
            if not number:
                raise ValueError(f"--trace-config: {key} must be a number from 1 on, got '{value}'")
            values["schedule_delay_ms" if key == "bsp_schedule_delay" else key[4:]] = number
    made = SpanOptions(resource=tuple(resource), **values)
    if made.max_export_batch_size > made.max_queue_size:
        raise ValueError(
            f"--trace-config: bsp_max_export_batch_size ({made.max_export_batch_size}) must not be above "
            f"bsp_max_queue_size ({made.max_queue_size})"
        )
    return made if mode == "opentelemetry" else None


def start_values(settings: Settings) -> dict[str, Any]:
    """The fields' values from --trace-config or the older --trace-* flags. Raises ValueError."""
    mode, found, _ = _split(settings)
    span_options(settings)
    texts = {CONFIG_KEYS[key]: value for key, value in found if key != "level"}
    levels = [value for key, value in found if key == "level"]
    older = {
        "trace_file": settings.trace_file,
        "trace_rate": settings.trace_rate,
        "trace_count": settings.trace_count,
        "log_frequency": settings.trace_log_frequency,
    }
    if settings.trace_config and (any(older.values()) or settings.trace_level):
        raise ValueError(
            "--trace-config replaces --trace-file, --trace-level and the like: use only one of them"
        )
    texts.update({key: value for key, value in older.items() if value})
    levels += settings.trace_level
    values = dict(DEFAULTS)
    for level in levels:
        if level not in ("OFF", "MIN", "MAX", *LEVELS):
            raise ValueError(f"unknown trace level '{level}', expected OFF, TIMESTAMPS or TENSORS")
        if level == "OFF" and len(levels) > 1:
            raise ValueError("Expect only one trace level 'OFF' is specified")
    asked = {"TIMESTAMPS" if level in ("MIN", "MAX") else level for level in levels}
    values["trace_level"] = tuple(level for level in LEVELS if level in asked)
    try:
        for field, text in texts.items():
            values[field] = _scalar(field, text, "flag")
        _check(values, True, mode)
    except InvalidArgument as error:
        raise ValueError(f"trace settings: {error}") from None
    return values
