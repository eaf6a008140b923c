"""What a trace file says: averages by stage, percentiles, the slowest requests, the flow of data.

The problem: trace files may be larger than memory, come from this server (an object per request) or
from a Triton server (an object per event, children before their parents), and may be cut off. The
choice: objects are decoded one by one and merged by id in a window; what falls out of the window is
added up.

Rules (spec/trace-file.md):
 1. A root counts for HTTP or gRPC by its receive timestamps; a child counts where its root does.
 2. A trace needs REQUEST_START and REQUEST_END; others are counted as incomplete.
 3. HTTP requests last from receive start to send end, gRPC requests from the end of wait/read.
 4. A file that breaks off is reported as far as it goes, with a warning.
"""

from __future__ import annotations

import heapq
import json
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

WINDOW = 50_000  # traces that may still get objects
CHUNK = 1 << 20
SLOWEST = 5
FLOW_IDS = 1000  # tensors are kept of the first so many traces: the data flow is the first request's
PERCENTILES = (50, 90, 95, 99)
PROSE = {"REQUEST_HANDLER_START": "REQUEST_START", "REQUEST_HANDLER_END": "REQUEST_END"}

# stage -> (first timestamp, last timestamp)
SPANS = {
    "receive": ("HTTP_RECV_START", "HTTP_RECV_END"),
    "wait": ("GRPC_WAITREAD_START", "GRPC_WAITREAD_END"),
    "handler": ("REQUEST_START", "REQUEST_END"),
    "queue": ("QUEUE_START", "COMPUTE_START"),
    "compute": ("COMPUTE_START", "COMPUTE_END"),
    "input": ("COMPUTE_START", "COMPUTE_INPUT_END"),
    "infer": ("COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"),
    "output": ("COMPUTE_OUTPUT_START", "COMPUTE_END"),
}


def objects(source: IO[str], warn: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The objects of a JSON array, one by one; a file that is cut off or no array is warned of."""
    decoder = json.JSONDecoder()
    text, at, size = source.read(CHUNK), 0, CHUNK
    text = text.lstrip()
    if not text.startswith("["):
        warn("it is not a trace file: expected a JSON array")
        return
    at = 1
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        if at < len(text) and text[at] == "]":
            return
        try:
            if at >= len(text):
                raise ValueError
            item, end = decoder.raw_decode(text, at)
        except ValueError:
            more = source.read(size)
            if not more:
                warn("it is cut off; what follows covers the objects before that")
                return
            size *= 2  # an object larger than what was read must not be decoded again and again
            text, at = text[at:] + more, 0
            continue
        at = end
        if at > CHUNK:
            text, at, size = text[at:], 0, CHUNK
        if isinstance(item, dict) and isinstance(item.get("id"), int):
            yield item


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
    seen = 0
    for item in objects(source, warn):
        trace = open_traces.get(item["id"])
        if trace is None:
            seen += 1
            trace = open_traces[item["id"]] = Trace(item["id"])
        try:
            trace.add(item, seen <= tensors)
        except (TypeError, ValueError, KeyError, AttributeError):
            warn(f"an object of trace {trace.id} is not understood and left out")
        if len(open_traces) > window:
            yield open_traces.popitem(last=False)[1]
    yield from open_traces.values()


def read(source: IO[str], done: Callable[[Trace], None], warn: Callable[[str], None]) -> None:
    """Calls `done` for every trace of a file."""
    for trace in merged(source, warn):
        done(trace)


@dataclass
class _Sums:
    """Of one model version behind one front."""

    count: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    requests: array[int] = field(default_factory=lambda: array("q"))


def stages(trace: Trace) -> dict[str, int] | None:
    """Nanoseconds by stage; None for a trace without REQUEST_START and REQUEST_END."""
    at = trace.first()
    if "REQUEST_START" not in at or "REQUEST_END" not in at:
        return None
    found = {}
    for name, (start, end) in SPANS.items():
        if start in at and end in at:
            found[name] = max(0, at[end] - at[start])
    for front, begin in (("HTTP", "HTTP_RECV_START"), ("GRPC", "GRPC_WAITREAD_END")):
        send, sent = f"{front}_SEND_START", f"{front}_SEND_END"
        if begin in at and send in at and sent in at:
            found["request"] = max(0, at[sent] - at[begin])
            found["send"] = max(0, at[sent] - at[send])
    return found


class Summary:
    """Adds traces up; lines() is the report."""

    def __init__(self) -> None:
        self.incomplete = 0
        self.homeless = 0
        self._sums: dict[tuple[str, str, Any], _Sums] = {}
        self._fronts: dict[int, str] = {}
        self._orphans: dict[int, list[Trace]] = {}
        self._slowest: list[tuple[int, int, str, dict[str, int]]] = []
        self._flow: list[Trace] = []

    def add(self, trace: Trace) -> None:
        """Takes a whole trace."""
        if trace.tensors:
            self._flow.append(trace)
        if trace.parent:
            front = self._fronts.get(trace.parent)
            if front is None:
                self._orphans.setdefault(trace.parent, []).append(trace)
                return
        else:
            front = trace.front
        self._count(trace, front)

    def _count(self, trace: Trace, front: str) -> None:
        self._fronts[trace.id] = front
        found = stages(trace)
        if found is None:
            self.incomplete += bool(trace.times)
        elif not front:
            self.homeless += 1
        else:
            sums = self._sums.setdefault((front, trace.model, trace.version), _Sums())
            sums.count += 1
            for stage, ns in found.items():
                sums.totals[stage] = sums.totals.get(stage, 0) + ns
            total = found.get("request", found["handler"])
            sums.requests.append(total)
            if not trace.parent:
                row = (total, trace.id, f"{trace.model} ({trace.version})", found)
                push = heapq.heappush if len(self._slowest) < SLOWEST else heapq.heappushpop
                push(self._slowest, row)
        for child in self._orphans.pop(trace.id, ()):
            self._count(child, front)

    def lines(self) -> Iterator[str]:
        """The report: HTTP first, then gRPC, models by name."""
        self.homeless += sum(len(orphans) for orphans in self._orphans.values())
        for front in ("HTTP", "GRPC"):
            for (_, model, version), sums in sorted(
                ((key, s) for key, s in self._sums.items() if key[0] == front), key=lambda row: str(row[0])
            ):
                yield from _model_lines(front, model, version, sums)
        if self._slowest:
            yield "Slowest requests:"
            for total, number, model, found in sorted(self._slowest, reverse=True):
                parts = ", ".join(
                    f"{stage} {_us(found[stage])}" for stage in ("queue", "compute", "send") if stage in found
                )
                yield f"  id {number} {model}: {_us(total)}" + (f" ({parts})" if parts else "")
            yield ""
        for number, what in (
            (self.incomplete, "incomplete traces (no REQUEST_START or REQUEST_END) are left out"),
            (self.homeless, "traces that came over neither HTTP nor gRPC are left out"),
        ):
            if number:
                yield f"{number} {what}"
        yield from flow_lines(self._flow)


def _us(ns: float) -> str:
    return f"{ns / 1000:.0f}us"


def _model_lines(front: str, model: str, version: Any, sums: _Sums) -> Iterator[str]:
    n = sums.count
    mean = {stage: total / n for stage, total in sums.totals.items()}

    def line(depth: int, title: str, value: float | None) -> Iterator[str]:
        if value is not None:
            yield f"{'  ' * depth}{title} (avg): {_us(value)}"

    yield f"Summary for {model} ({version}): trace count = {n}"
    deep = 0
    if "request" in mean:
        deep = 1
        yield from line(0, f"{front} infer request", mean["request"])
        yield from line(1, "Receive", mean.get("receive"))
        yield from line(1, "Wait/Read", mean.get("wait"))
        yield from line(1, "Send", mean["send"])
        rest = mean["request"] - mean["handler"] - mean["send"] - mean.get("receive", 0)
        yield from line(1, "Overhead", max(0.0, rest))
    yield from line(deep, "Handler", mean["handler"])
    rest = mean["handler"] - mean.get("queue", 0) - mean.get("compute", 0)
    yield from line(deep + 1, "Overhead", max(0.0, rest))
    yield from line(deep + 1, "Queue", mean.get("queue"))
    yield from line(deep + 1, "Compute", mean.get("compute"))
    for stage in ("input", "infer", "output"):
        yield from line(deep + 2, stage.title(), mean.get(stage))
    ordered = sorted(sums.requests)
    ranks = " ".join(
        f"p{p}={_us(ordered[min(len(ordered) - 1, max(0, -(-p * len(ordered) // 100) - 1))])}"
        for p in PERCENTILES
    )
    yield f"Percentiles: {ranks} max={_us(ordered[-1])}"
    yield ""


def trace_lines(trace: Trace) -> Iterator[str]:
    """A trace's timestamps in time order with the time between them (-t)."""
    yield f"{trace.model} ({trace.version}):"
    yield f"\tid: {trace.id}"
    if trace.parent:
        yield f"\tparent id: {trace.parent}"
    if trace.request_id:
        yield f"\trequest id: {trace.request_id}"
    if trace.error:
        yield f"\terror: {trace.error}"
    before = 0
    for i, (ns, name) in enumerate(sorted(trace.times, key=lambda t: t[0])):
        if i:
            yield f"\t\t{_us(ns - before)}"
        yield f"\t{name}"
        before = ns
    yield ""


# ------------------------------------------------------------ the flow of data


def flow_lines(traces: list[Trace]) -> Iterator[str]:
    """The tensors of the first request, and of its children where it is an ensemble."""
    if not traces:
        return
    known = {trace.id: trace for trace in traces}
    roots = [trace for trace in traces if not trace.parent]
    root = min(roots or traces, key=lambda trace: trace.id)
    yield "Data Flow:"
    yield from _flow(root, known, 1)


def _flow(trace: Trace, known: dict[int, Trace], depth: int) -> Iterator[str]:
    pad = "  " * depth
    yield pad + "=" * 58
    yield f"{pad}Name: {trace.model}"
    yield f"{pad}Version: {trace.version}"
    for activity, tensor in trace.tensors:
        yield f"{pad}{activity.removeprefix('TENSOR_')}:"
        text = _tensor(tensor).replace("\n", "\n" + pad + "    ")
        yield f"{pad}  {tensor.get('name', '')}: {text}"
    yield pad + "=" * 58
    for child in sorted((t for t in known.values() if t.parent == trace.id), key=lambda t: t.id):
        yield from _flow(child, known, depth + 1)


def _tensor(tensor: dict[str, Any]) -> str:
    import numpy as np

    from neptrio.observe.trace_values import array_of

    try:
        array = array_of(tensor)
    except ValueError as error:
        return f"({error})"
    if array.dtype.kind == "O":
        for i, element in enumerate(array.flat):
            array.flat[i] = element.decode(errors="backslashreplace")
    text = np.array2string(array, threshold=64)
    truncated = tensor.get("truncated_from")
    return f"{text} (cut off, its shape was [{truncated}])" if truncated else text


# ------------------------------------------------------------ export


def perfetto(source: IO[str], out: IO[str], warn: Callable[[str], None]) -> int:
    """Writes Chrome/Perfetto trace events, one track per root request; returns the number of traces."""
    count = 0
    roots: dict[int, int] = {}
    separator = "[\n"

    def event(**values: Any) -> None:
        nonlocal separator
        out.write(separator + json.dumps(values))
        separator = ",\n"

    def done(trace: Trace) -> None:
        nonlocal count
        at = trace.first()
        track = roots[trace.id] = roots.get(trace.parent, trace.parent or trace.id)
        if not at:
            return
        count += 1
        start, end = min(at.values()), max(ns for ns, _ in trace.times)
        details = {"id": trace.id, "request_id": trace.request_id, "error": trace.error}
        common = {"ph": "X", "pid": 1, "tid": track}
        name = f"{trace.model} ({trace.version})"
        event(name=name, cat="request", ts=start / 1000, dur=(end - start) / 1000, args=details, **common)
        spans = {**SPANS, "send": (f"{trace.front}_SEND_START", f"{trace.front}_SEND_END")}
        for stage, (first, last) in spans.items():
            if first in at and last in at and at[last] >= at[first]:
                event(name=stage, cat="stage", ts=at[first] / 1000, dur=(at[last] - at[first]) / 1000,
                      args={"id": trace.id, "model": trace.model}, **common)  # fmt: skip

    read(source, done, warn)
    out.write("\n]\n" if count else "[]\n")
    return count
