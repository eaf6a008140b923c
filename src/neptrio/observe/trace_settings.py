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
Sources: the trace extension's text; spec/rules.md E5; spec/observed.md 11; spec/README.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from neptrio.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from neptrio.settings import Settings

FIELDS = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file")
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
}
CONFIG_KEYS = {
    "level": "trace_level",
    "rate": "trace_rate",
    "count": "trace_count",
    "log-frequency": "log_frequency",
    "file": "trace_file",
}


class Scope:
    """Effective settings of a model or of the server, with what sampling counts in them.

    `own` holds the fields that were set for this scope itself.
    """

    __slots__ = ("file", "frequency", "left", "level", "open", "own", "rate", "retired", "seen")

    def __init__(self, own: dict[str, Any], values: Mapping[str, Any]) -> None:
        self.own = own
        self.level: tuple[str, ...] = values["trace_level"]
        self.rate: int = values["trace_rate"]
        self.left: int = values["trace_count"]  # traces still to be taken, -1 = no limit
        self.frequency: int = values["log_frequency"]
        self.file: str = values["trace_file"]
        self.seen = 0  # requests since the scope was made or last taken from
        self.open = 0  # sampled traces that are not finished
        self.retired = False

    def values(self) -> dict[str, Any]:
        """The effective value of every field."""
        return dict(zip(FIELDS, (self.level, self.rate, self.left, self.frequency, self.file), strict=True))

    def sample(self) -> bool:
        """Counts a request; True when it is one to trace (the rate-th, 2 * rate-th, ...)."""
        if not self.level or not self.left:
            return False
        self.seen += 1
        if self.seen < self.rate:
            return False
        self.seen = 0
        if self.left > 0:
            self.left -= 1
        self.open += 1
        return True


def _check(values: Mapping[str, Any], count_given: bool) -> None:
    if not values["trace_level"]:
        return
    if not values["trace_rate"]:
        raise InvalidArgument(INVALID + "sample rate must be non-zero")
    if count_given and not values["trace_count"]:
        raise InvalidArgument(INVALID + "trace count must be non-zero")
    if not values["trace_file"]:
        raise InvalidArgument(INVALID + "trace file name is not given")


class TraceTable:
    """The command line's values, the global scope, and the scopes of models that have their own."""

    def __init__(self, start: Mapping[str, Any]) -> None:
        """`start` has a value for every field. Raises InvalidArgument when they do not fit together."""
        _check(start, True)
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
            made = _made(was, changes, self.globals.values())
            if was is not None:
                was.retired = True
            if made is None:
                self.models.pop(model, None)
            else:
                self.models[model] = made
            return [was] if was is not None else []
        above = _made(self.globals, changes, self.start) or Scope({}, self.start)
        models: dict[str, Scope] = {}
        for name, scope in self.models.items():
            try:
                kept = _made(scope, {}, above.values())
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


def _made(was: Scope | None, changes: Mapping[str, Any], above: Mapping[str, Any]) -> Scope | None:
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
    _check(values, changes.get("trace_count") is not None)
    return Scope(own, values) if own else None


# ------------------------------------------------------------ from the wire


def parse_changes(given: Mapping[str, Any], protocol: str) -> dict[str, Any]:
    """A request's settings as field -> value, None = clear; what is not a field is left out.

    Over HTTP values are JSON (strings, a list of strings for trace_level, null); over gRPC they are
    lists of strings. Raises InvalidArgument with the observed texts.
    """
    changes: dict[str, Any] = {}
    for key in FIELDS:
        if key not in given:
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
                raise InvalidArgument("attempt to access JSON non-string as string")
            changes[key] = None if value == "" else _scalar(key, value, protocol)
    return changes


def _levels(value: Any) -> tuple[str, ...] | None:
    """The levels named, () for OFF, None when no name is known: nothing changes then."""
    if not isinstance(value, list):
        raise InvalidArgument("attempt to access JSON non-array as array")
    if not all(isinstance(item, str) for item in value):
        raise InvalidArgument("attempt to access JSON non-string as string")
    if "OFF" in value:
        if len(value) > 1:
            raise InvalidArgument("Expect only one trace level 'OFF' is specified")
        return ()
    return tuple(level for level in LEVELS if level in value) or None


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


def reply(scope: Scope) -> dict[str, Any]:
    """The settings as the protocol shows them: strings, and a list of strings for trace_level."""
    return {
        "trace_level": list(scope.level) or ["OFF"],
        "trace_rate": str(scope.rate),
        "trace_count": str(scope.left),
        "log_frequency": str(scope.frequency),
        "trace_file": scope.file,
        "trace_mode": "triton",
    }


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
    if os.path.isdir(real):
        raise InvalidArgument(f"{INVALID}trace file '{path}' is a directory")
    if not os.path.isdir(os.path.dirname(real)):
        raise InvalidArgument(f"{INVALID}the directory of trace file '{path}' does not exist")


# ------------------------------------------------------------ from the command line


def start_values(settings: Settings) -> dict[str, Any]:
    """The fields' values from --trace-config or the older --trace-* flags. Raises ValueError."""
    texts: dict[str, str] = {}
    levels: list[str] = []
    for item in settings.trace_config:
        mode, comma, rest = item.partition(",")
        if not comma or "=" in mode:
            mode, rest = "", item
        key, equals, value = rest.partition("=")
        if not equals or mode not in ("", "triton", "opentelemetry"):
            raise ValueError(f"--trace-config: expected MODE,KEY=VALUE or KEY=VALUE, got '{item}'")
        if mode == "opentelemetry" or (key == "mode" and value == "opentelemetry"):
            raise ValueError("--trace-config: this server does not have trace mode opentelemetry yet")
        if key == "mode":
            if value != "triton":
                raise ValueError(f"--trace-config: unknown mode '{value}', expected triton")
        elif key not in CONFIG_KEYS:
            raise ValueError(
                f"--trace-config: unknown setting '{key}', expected one of {', '.join(CONFIG_KEYS)}"
            )
        elif key == "level":
            levels.append(value)
        else:
            texts[CONFIG_KEYS[key]] = value
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
        _check(values, True)
    except InvalidArgument as error:
        raise ValueError(f"trace settings: {error}") from None
    return values
