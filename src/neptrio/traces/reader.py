"""Traces from files: of any size, of either maker, whole or cut off.

The problem: trace files may be larger than memory, come from this server (an object per request) or
from a Triton server (an object per event, children before their parents), and may be cut off. The
choice: objects are decoded one by one and merged by id in a window.

Rules:
 1. A file that breaks off, or is damaged, is read as far as that, with a warning; an object that is not
    understood is left out, with a warning. What is no JSON array is no trace file.
 2. A trace is whole when WINDOW younger ones have begun, or at the end.
 3. Tensors are kept of the first traces only, unless all are asked for.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

WINDOW = 10_000  # traces that may still get objects
CHUNK = 1 << 20
LONGEST_TOKEN = 16  # letters by which the decoder may stop before the end of what was read, but strings
FLOW_IDS = 1000  # tensors are kept of the first so many traces: the data flow is the first request's
FLOW_LETTERS = 32 << 20  # and no more than so many letters of their data
PROSE = {"REQUEST_HANDLER_START": "REQUEST_START", "REQUEST_HANDLER_END": "REQUEST_END"}


class NoTraceFile(ValueError):
    """The file holds something else."""


def objects(source: IO[str], warn: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, one by one; what is cut off or damaged is warned of.

    Raises NoTraceFile.
    """
    decoder = json.JSONDecoder()
    text, at, size = source.read(CHUNK), 0, CHUNK
    text = text.lstrip()
    if not text.startswith("["):
        name = getattr(source, "name", "input")
        raise NoTraceFile(f"{name} is no trace file: expected a JSON array, got {_begin(text)}")
    at = 1
    strangers = 0
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            break
        try:
            if at >= len(text):
                raise ValueError
            item, end = decoder.raw_decode(text, at)
        except ValueError as error:
            if _is_damage(error, text):
                warn(f"it is damaged at {_begin(text[at:])}; what follows covers the objects before that")
                break
            more = source.read(size)
            if not more:
                warn("it is cut off; what follows covers the objects before that")
                break
            size *= 2  # an object larger than what was read must not be decoded again and again
            text, at = text[at:] + more, 0
            continue
        at = end
        if at > CHUNK:
            text, at, size = text[at:], 0, CHUNK
        if isinstance(item, dict) and type(item.get("id")) is int:
            yield item
        else:
            strangers += 1
    if strangers:
        warn(f"{strangers} objects without a trace's id (a number) are left out")


def _is_damage(error: ValueError, text: str) -> bool:
    """What the decoder stopped at cannot be the beginning of something that goes on."""
    if not isinstance(error, json.JSONDecodeError) or error.msg.startswith("Unterminated string"):
        return False
    return error.pos < len(text) - LONGEST_TOKEN


def _begin(text: str) -> str:
    """The first letters of a text, for a message."""
    return repr(text[:40]) + ("..." if len(text) > 40 else "") if text else "an empty file"


def canonical(name: str) -> str:
    """A timestamp's name in today's form; the trace guide's prose names are understood too."""
    if name.isupper():
        return name
    upper = name.upper().replace("WAIT/READ", "WAITREAD").replace(" ", "_")
    return PROSE.get(upper, upper)


@dataclass
class Trace:
    """One request, merged from its objects."""

    id: int
    model: str = ""
    version: Any = ""
    parent: int = 0
    request_id: str = ""
    error: str = ""
    times: list[tuple[int, str]] = field(default_factory=list)
    tensors: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)  # which one each tensor belongs to
    parameters: dict[str, Any] = field(default_factory=dict)

    def add(self, item: dict[str, Any], tensors: bool) -> None:
        """Takes one object of the file."""
        self.model = str(item.get("model_name", self.model))
        self.version = item.get("model_version", self.version)
        self.parent = int(item.get("parent_id", self.parent))
        self.request_id = str(item.get("request_id", self.request_id))
        self.error = str(item.get("error", self.error))
        self.parameters = dict(item.get("parameters", self.parameters))
        for stamp in item.get("timestamps", ()):
            self.times.append((int(stamp["ns"]), canonical(str(stamp["name"]))))
        if tensors and "tensor" in item:
            self.tensors.append((str(item.get("activity", "")), dict(item["tensor"])))
            self.responses.append(int(item.get("response", 0)))

    def first(self) -> dict[str, int]:
        """Each timestamp by name; of those that repeat (decoupled models) starts are the first, ends the last."""
        found: dict[str, int] = {}
        for ns, name in sorted(self.times):
            if name not in found or name.endswith("_END"):
                found[name] = ns
        return found

    @property
    def front(self) -> str:
        """HTTP, GRPC or nothing."""
        for _, name in self.times:
            if name == "HTTP_RECV_START":
                return "HTTP"
            if name == "GRPC_WAITREAD_START":
                return "GRPC"
        return ""


def merged(
    source: IO[str], warn: Callable[[str], None], window: int = 0, tensors: int = FLOW_IDS
) -> Iterator[Trace]:
    """Merges the objects of a file by id; a trace is whole when `window` younger ones have begun.

    Tensors are kept of the first `tensors` traces.
    """
    window = window or WINDOW
    open_traces: OrderedDict[int, Trace] = OrderedDict()
    seen = letters = 0
    for item in objects(source, warn):
        trace = open_traces.get(item["id"])
        if trace is None:
            seen += 1
            trace = open_traces[item["id"]] = Trace(item["id"])
        try:
            keep = seen <= tensors and (tensors != FLOW_IDS or letters < FLOW_LETTERS)
            if keep and "tensor" in item:
                letters += len(str(item["tensor"].get("data", "")))
            trace.add(item, keep)
        except (TypeError, ValueError, KeyError, AttributeError):
            warn(f"an object of trace {trace.id} is not understood and left out")
        if len(open_traces) > window:
            yield open_traces.popitem(last=False)[1]
    yield from open_traces.values()


def read(source: IO[str], done: Callable[[Trace], None], warn: Callable[[str], None]) -> None:
    """Calls `done` for every trace of a file."""
    for trace in merged(source, warn):
        done(trace)
