"""Trace settings: how models inherit them, field by field, and the rules about values.

A field of a model's settings has the model's own value, or else the global one. A field of the global settings has
the value set over the network, or else the command line's. The result of looking up all fields is a Scope: the
effective values, with the counters of sampling.

Rules:
 1. null over HTTP and an empty list over gRPC clear a field of the settings they are sent to; nothing else does.
    An empty trace_level over HTTP names no level, so it changes nothing.
 2. An update is atomic: all scopes that would result are checked before anything changes.
 3. An update replaces the scopes it concerns: new ones count from zero, old ones finish the traces they have
    begun. A global update concerns every model's scope.
 4. A trace_count set for the scope itself goes on from what is left of it. An inherited one starts at what
    the global scope has left (the global scope's own: at the command line's value).
 5. Values are judged only where tracing is on: with level OFF anything that can be parsed is kept.
 6. Without a trace_file traces are kept in memory alone (Recent). Over the network trace_file names a file inside the trace
    directory; a relative name is relative to that.

trace_tail is our addition: only traces of requests that took that long or failed are kept and counted.
Sources: docs/protocol/trace-extension.md; docs/protocol/rules.md E5; docs/protocol/observed.md 11;
docs/protocol/README.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from neptrio.codec.http_json import dump_json
from neptrio.codec.text import bytes_text
from neptrio.errors import InvalidArgument, Unsupported
from neptrio.limits import shown
from neptrio.observe.span_options import SpanOptions
from neptrio.observe.trace_scope import Sampling

# room for an index and for the suffix that array_file adds
LONGEST_NAME = 255 - len(".4294967295.4194304.tmp2")
FIELDS = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_tail")
LEVELS = ("TIMESTAMPS", "TENSORS")  # in the order of replies; OFF is none of them
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
FILE_FIELDS = ("log_frequency", "trace_file")  # without effect in mode opentelemetry
NO_TENSORS = "Tensor level tracing is not supported by the mode: opentelemetry; no span holds tensors"
TRACES = re.compile(rb'\s*\[\s*(\]|\{\s*"(model_name|id)")')  # the beginning of any trace file


class Scope(Sampling):
    """Effective trace settings of a model or of the server, with the counters of sampling.

    `own` holds the values of the fields that were set for this scope itself, `writer` writes the spans of mode opentelemetry.
    """

    writer: Any = None

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


def check_values(values: Mapping[str, Any], count_given: bool, mode: str) -> None:
    if not values["trace_level"]:
        return
    spans = mode == "opentelemetry"
    # with spans a rate of 0 means: only requests whose parent is sampled
    if not values["trace_rate"] and not spans:
        raise InvalidArgument(INVALID + "sample rate must be non-zero")
    if count_given and not values["trace_count"]:
        raise InvalidArgument(INVALID + "trace count must be non-zero")


class TraceTable:
    """The command line's values, the global scope, and the scopes of models with settings of their own."""

    def __init__(self, start: Mapping[str, Any], mode: str = "triton") -> None:
        """`start` has a value for every field. A rate or a count of 0 traces nothing until it is changed."""
        self.mode = mode
        self.start = dict(start)
        self.globals = Scope({}, self.start)
        self.models: dict[str, Scope] = {}

    def scope(self, model: str) -> Scope:
        """The scope in which a request for `model` is sampled; "": the server's."""
        return self.models.get(model, self.globals)

    def scopes(self) -> list[Scope]:
        """Every scope in use."""
        return [self.globals, *self.models.values()]

    def update(self, changes: Mapping[str, Any], model: str = "") -> list[Scope]:
        """Applies parsed changes (None clears a field); returns the scopes that are no longer in use.

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
                    f"{error} (the settings of model '{shown(name)}' would become invalid)"
                ) from None
            assert kept is not None
            models[name] = kept
        out = self.scopes()
        for scope in out:
            scope.retired = True
        self.globals, self.models = above, models
        return out

    def _made(self, was: Scope | None, changes: Mapping[str, Any], above: Mapping[str, Any]) -> Scope | None:
        """The scope after `changes` over the values it inherits; None when no field of its own is left."""
        own = {} if was is None else dict(was.own)
        if was is not None and "trace_count" in own:
            own["trace_count"] = was.left
        for field, value in changes.items():
            if value is None:
                own.pop(field, None)
            else:
                own[field] = value
        values = {**above, **own}
        check_values(values, changes.get("trace_count") is not None, self.mode)
        return Scope(own, values) if own else None


# ------------------------------------------------------------ from the wire


def parse_changes(given: Mapping[str, Any], protocol: str, mode: str = "triton") -> dict[str, Any]:
    """The settings in a request as field -> value, None to clear; fields unknown in this mode are left out.

    Over HTTP values are JSON (strings, a list of strings for trace_level, null); over gRPC they are
    lists of strings. Raises InvalidArgument with the texts of the observed server.
    """
    changes: dict[str, Any] = {}
    for key in FIELDS:
        if key not in given or (mode == "opentelemetry" and key in FILE_FIELDS):
            continue
        value = given[key]
        if value is None or (protocol == "grpc" and value == []):
            changes[key] = None
        elif key == "trace_level":
            levels = _levels(value)
            if levels is not None:
                changes[key] = levels
        else:
            if protocol == "grpc":
                if len(value) != 1:
                    raise InvalidArgument(f"expect only 1 value for '{shown(key)}'")
                value = value[0]
            if not isinstance(value, str):
                raise _wrong_type(key, "string", value)
            if key == "trace_file" and not value:
                raise InvalidArgument(INVALID + "trace file name is not given")
            changes[key] = scalar(key, value, protocol)
    return changes


def _levels(value: Any) -> tuple[str, ...] | None:
    """The named levels, () for OFF; None when no name is known, which changes nothing."""
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
    """The observed server's text, with the setting's name and the value that came."""
    got = bytes_text(dump_json(value))
    return InvalidArgument(
        f"Unable to parse '{shown(key)}': attempt to access JSON non-{expected} as {expected}, got: {got[:60]}"
    )


def scalar(key: str, text: str, protocol: str) -> Any:
    if key == "trace_file":
        if "\0" in text:
            raise InvalidArgument("trace_file contains a NUL character")
        return text
    low, high = (-1, INT32_MAX) if key == "trace_count" else (0, UINT32_MAX)
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()):
        raise InvalidArgument(f"Unable to parse '{shown(key)}', got: {shown(text)}")
    value = int(text) if len(digits) < 20 else high + 1
    if key == "trace_count" and -INT32_MAX - 1 <= value < -1:
        space = " " if protocol == "grpc" else ""
        raise InvalidArgument(
            f"Unable to parse 'trace_count'. Expecting value >= -1, got:{space}{shown(text)}"
        )
    if not low <= value <= high:
        raise InvalidArgument(
            f"Unable to parse '{shown(key)}', value is out of range [ {low}, {high} ], got: {shown(text)}"
        )
    return value


def reply(scope: Scope, spans: SpanOptions | None = None) -> dict[str, Any]:
    """The settings in the protocol's form: strings, and a list of strings for trace_level.

    `spans` are the options of mode opentelemetry. Our addition trace_tail is shown only where it is set.
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


def check_file(path: str, folder: str, allowed: bool) -> None:
    """Raises Unsupported or InvalidArgument for a path that a client may not choose as trace_file."""
    if not allowed:
        raise Unsupported(
            "trace file location can not be updated through network protocol: the server was started with "
            "--allow-trace-file-update=false"
        )
    real = os.path.realpath(os.path.join(folder, path))
    if os.path.commonpath([real, folder]) != folder or real == folder:
        raise InvalidArgument(
            f"{INVALID}trace file '{shown(path)}' is outside the trace directory '{folder}'"
        )
    if len(os.path.basename(real).encode("utf-8", "surrogateescape")) > LONGEST_NAME:
        raise InvalidArgument(
            f"{INVALID}the name of a trace file may have {LONGEST_NAME} bytes, got '{shown(path)}'"
        )
    if os.path.isdir(real):
        raise InvalidArgument(f"{INVALID}trace file '{shown(path)}' is a directory")
    if os.path.exists(real) and not holds_traces(real):
        raise InvalidArgument(f"{INVALID}'{shown(path)}' exists and is no trace file: it would be lost")
    if os.path.dirname(real) != folder and not os.path.isdir(os.path.dirname(real)):
        raise InvalidArgument(f"{INVALID}the directory of trace file '{shown(path)}' does not exist")


def holds_traces(path: str) -> bool:
    """True for a file that may be replaced: empty, or a trace file (ours or a Triton server's) by its beginning."""
    if not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as source:
            head = source.read(64)
    except OSError:
        return False
    return not head or TRACES.match(head) is not None
