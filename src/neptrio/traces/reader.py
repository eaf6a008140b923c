"""Reads traces from files of any size, written by this server or a Triton server, complete or cut off.

The problem: trace files may be larger than memory, come from this server (an object per request) or
from a Triton server (an object per event, children before their parents), and may be cut off. The
choice: objects are decoded one by one and merged by id in a window.

Rules:
 1. A file that is cut off or damaged is read up to that place, with a warning. An object that is not
    understood is left out, with a warning, as is what follows the array. A file that holds no JSON array is no trace file.
 2. A trace is complete when WINDOW younger ones have begun, or at the end of the file.
 3. The tensors of only the first traces are kept, unless all are asked for.
 4. A file is read as far as it reaches when it is opened. A server may be writing to it, and a replay to that server would find
    its own requests in it, for ever.
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

WINDOW = 10_000  # traces kept open because more objects of theirs may follow
CHUNK = 1 << 20
# the JSON decoder may stop this many letters before the end of the text, or inside a string
LONGEST_TOKEN = 16
FLOW_IDS = 1000  # how many of the first traces keep their tensors, for the first request's data flow
FLOW_LETTERS = 32 << 20  # and how many letters of tensor data they keep in all
LATEST = (1 << 63) - 1  # nanoseconds that a file can tell
PROSE = {"REQUEST_HANDLER_START": "REQUEST_START", "REQUEST_HANDLER_END": "REQUEST_END"}


class NoTraceFile(ValueError):
    """The file is no trace file."""


class _AsItWas(io.RawIOBase):
    """A file that ends where it ended when it was opened. A pipe ends where its writer says."""

    def __init__(self, path: str) -> None:
        self.name = path
        self._file = io.FileIO(path)
        state = os.fstat(self._file.fileno())
        self._left = state.st_size if stat.S_ISREG(state.st_mode) else None

    def readable(self) -> bool:
        """It can be read."""
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Reads what there is, up to that end."""
        count = self._file.readinto(memoryview(buffer)[: self._left])
        if self._left is not None:
            self._left -= count or 0
        return count

    def close(self) -> None:
        """Closes the file."""
        super().close()
        if not self._file.closed:
            self._file.close()


def opened(path: str) -> IO[str]:
    """The text of a file as it is at this moment (rule 4). Raises OSError."""
    return io.TextIOWrapper(io.BufferedReader(_AsItWas(path)), encoding="utf-8", errors="replace")


def objects(source: IO[str], warn: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, one by one; warns of what is cut off or damaged.

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
            if (text[at + 1 :] + source.read(CHUNK)).strip():
                warn("more follows the end of its array, which is left out: give each file by itself")
            break
        try:
            if at >= len(text):
                raise ValueError
            item, end = decoder.raw_decode(text, at)
        except RecursionError:
            warn(
                f"what begins with {_begin(text[at:])} is nested too deeply; what follows covers the objects before that"
            )
            break
        except ValueError as error:
            if _is_damage(error, text):
                warn(f"it is damaged at {_begin(text[at:])}; what follows covers the objects before that")
                break
            more = source.read(size)
            if not more:
                warn("it is cut off; what follows covers the objects before that")
                break
            size *= 2  # so that a large object is not decoded again for every piece read
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
    """True when the text at which the decoder stopped cannot be the beginning of valid JSON."""
    if not isinstance(error, json.JSONDecodeError) or error.msg.startswith("Unterminated string"):
        return False
    return error.pos < len(text) - LONGEST_TOKEN


def _begin(text: str) -> str:
    """The first letters of a text, for an error message."""
    return repr(text[:40]) + ("..." if len(text) > 40 else "") if text else "an empty file"


def canonical(name: str) -> str:
    """A timestamp's name as it is written today; the names in the prose of Triton's trace guide are understood too."""
    if name.isupper():
        return name
    upper = name.upper().replace("WAIT/READ", "WAITREAD").replace(" ", "_")
    return PROSE.get(upper, upper)


@dataclass
class Trace:
    """One request, put together from its objects in the file."""

    id: int
    model: str = ""
    version: Any = ""
    parent: int = 0
    request_id: str = ""
    error: str = ""
    times: list[tuple[int, str]] = field(default_factory=list)
    tensors: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    responses: list[int] = field(default_factory=list)  # per tensor: the number of the response it belongs to
    parameters: dict[str, Any] = field(default_factory=dict)

    def add(self, item: dict[str, Any], tensors: bool) -> None:
        """Adds one object of the file."""
        self.model = str(item.get("model_name", self.model))
        self.version = item.get("model_version", self.version)
        self.parent = int(item.get("parent_id", self.parent))
        self.request_id = str(item.get("request_id", self.request_id))
        self.error = str(item.get("error", self.error))
        self.parameters = dict(item.get("parameters", self.parameters))
        for stamp in item.get("timestamps", ()):
            ns = int(stamp["ns"])
            if not 0 <= ns <= LATEST:
                raise ValueError(f"{ns} is no time")
            self.times.append((ns, canonical(str(stamp["name"]))))
        if tensors and "tensor" in item:
            self.tensors.append((str(item.get("activity", "")), dict(item["tensor"])))
            self.responses.append(int(item.get("response", 0)))

    def first(self) -> dict[str, int]:
        """Each timestamp by name; of those that repeat (decoupled models) the first start and the last end."""
        found: dict[str, int] = {}
        for ns, name in sorted(self.times):
            if name not in found or name.endswith("_END"):
                found[name] = ns
        return found

    @property
    def front(self) -> str:
        """The protocol by which the request came: "HTTP", "GRPC", or "" for steps and calls."""
        for _, name in self.times:
            if name == "HTTP_RECV_START":
                return "HTTP"
            if name == "GRPC_WAITREAD_START":
                return "GRPC"
        return ""


def merged(
    source: IO[str], warn: Callable[[str], None], window: int = 0, tensors: int = FLOW_IDS
) -> Iterator[Trace]:
    """Joins the objects of a file by id. A trace is complete when `window` younger ones have begun.

    The first `tensors` traces keep their tensors.
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
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError):
            warn(f"an object of trace {trace.id} is not understood and left out")
        if len(open_traces) > window:
            yield open_traces.popitem(last=False)[1]
    yield from open_traces.values()


def read(source: IO[str], done: Callable[[Trace], None], warn: Callable[[str], None]) -> None:
    """Calls `done` for every trace of a file."""
    for trace in merged(source, warn):
        done(trace)
