"""Summarises a trace file: averages by stage, percentiles, the slowest requests, the flow of data.

Rules (docs/protocol/trace-file.md):
 1. A root trace counts for HTTP or gRPC by its receive timestamps; a child counts where its root does.
 2. A trace needs REQUEST_START and REQUEST_END; others are only counted as incomplete.
 3. An HTTP request lasts from receive start to send end, a gRPC request from the end of wait/read.
 4. Memory does not grow with the file: ids, children without parents, tensors and durations are kept up to the
    limits below. Percentiles of more than EXACT durations are right to one part in a thousand.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from neptrio.traces.reader import WINDOW, Trace

# traces that are remembered to find the parents of children, and children without a parent yet
PARENTS = 10 * WINDOW
SLOWEST = 5
EXACT = 100_000  # durations of a model that are kept one by one, for exact percentiles
PERCENTILES = (50, 90, 95, 99)

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


NETWORK = ("request", "receive", "wait", "send", "request overhead")


class Durations:
    """Nanoseconds of many requests, for percentiles: kept one by one up to EXACT, then rounded and counted."""

    def __init__(self) -> None:
        self.largest = 0
        self._exact = array("q")
        self._counts: dict[int, int] = {}
        self._count = 0

    def add(self, ns: int) -> None:
        """Adds one duration."""
        self._count += 1
        self.largest = max(self.largest, ns)
        self._exact.append(ns)
        if len(self._exact) > EXACT:
            for value in self._exact:
                rounded = _rounded(value)
                self._counts[rounded] = self._counts.get(rounded, 0) + 1
            del self._exact[:]

    def percentiles(self, ranks: tuple[int, ...]) -> list[int]:
        """The values at these percentiles (nearest rank), in nanoseconds."""
        counts = dict(self._counts)
        for value in self._exact:
            counts[value] = counts.get(value, 0) + 1
        found: list[int] = []
        below = 0
        wanted = [max(1, -(-rank * self._count // 100)) for rank in ranks]
        for value in sorted(counts):
            below += counts[value]
            while len(found) < len(wanted) and below >= wanted[len(found)]:
                found.append(value)
        return found


def _rounded(ns: int) -> int:
    """Rounded to four digits: wrong by at most one part in two thousand."""
    unit = 10 ** max(0, len(str(ns)) - 4)
    return (ns + unit // 2) // unit * unit


@dataclass
class _Sums:
    """Sums over one model version, per protocol.

    `clients` of the `count` traces came from clients; the others are steps and calls, which cross no network.
    Stages of the network are averaged over the former, stages of the server over all.
    """

    count: int = 0
    clients: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    requests: Durations = field(default_factory=Durations)
    handlers: Durations = field(default_factory=Durations)
    errors: int = 0


@dataclass
class _Node:
    """A place in the tree of calls: a model below the models that called it."""

    count: int = 0
    total: int = 0


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
            parts = found["handler"] + found["send"] + found.get("receive", 0)
            found["request overhead"] = max(0, found["request"] - parts)
    parts = found.get("queue", 0) + found.get("compute", 0)
    found["handler overhead"] = max(0, found["handler"] - parts)
    if "request" not in found:  # never answered, so there is no whole for its network stages to be parts of
        for stage in NETWORK:
            found.pop(stage, None)
    return found


class Summary:
    """Adds up traces; lines() gives the report."""

    def __init__(self) -> None:
        self.incomplete = 0
        self.homeless = 0
        self._sums: dict[tuple[str, str, Any], _Sums] = {}
        # trace id -> protocol and path in the tree
        self._places: OrderedDict[int, tuple[str, tuple[str, ...]]] = OrderedDict()
        self._orphans: OrderedDict[int, list[Trace]] = OrderedDict()
        self._tree: dict[tuple[str, tuple[str, ...]], _Node] = {}
        self._slowest: list[tuple[int, int, str, dict[str, int]]] = []
        self._flow: list[Trace] = []

    def add(self, trace: Trace) -> None:
        """Adds a complete trace."""
        if trace.tensors:
            self._flow.append(trace)
        if trace.parent:
            above = self._places.get(trace.parent)
            if above is None:
                self._orphans.setdefault(trace.parent, []).append(trace)
                if len(self._orphans) > PARENTS:
                    self.homeless += len(self._orphans.popitem(last=False)[1])
                return
            self._count_all(trace, *above)
        else:
            self._count_all(trace, trace.front, ())

    def _count_all(self, trace: Trace, front: str, above: tuple[str, ...]) -> None:
        """Counts a trace and those below it that came before it, however deep they lie."""
        left = [(trace, above)]
        while left:
            one, place = left.pop()
            path = self._count(one, front, place)
            left += [(child, path) for child in self._orphans.pop(one.id, ())]

    def _count(self, trace: Trace, front: str, above: tuple[str, ...]) -> tuple[str, ...]:
        path = (*above, f"{trace.model} ({trace.version})")
        self._places[trace.id] = front, path
        if len(self._places) > PARENTS:
            self._places.popitem(last=False)
        found = stages(trace)
        if found is None:
            self.incomplete += bool(trace.times)
        elif not front:
            self.homeless += 1
        else:
            sums = self._sums.setdefault((front, trace.model, trace.version), _Sums())
            sums.count += 1
            sums.errors += bool(trace.error)
            for stage, ns in found.items():
                sums.totals[stage] = sums.totals.get(stage, 0) + ns
            total = found.get("request", found["handler"])
            sums.handlers.add(found["handler"])
            if "request" in found:
                sums.clients += 1
                sums.requests.add(total)
            node = self._tree.setdefault((front, path), _Node())
            node.count += 1
            node.total += found["handler"]
            if not trace.parent:
                row = (total, trace.id, f"{trace.model} ({trace.version})", found)
                push = heapq.heappush if len(self._slowest) < SLOWEST else heapq.heappushpop
                push(self._slowest, row)
        return path

    def lines(self) -> Iterator[str]:
        """The lines of the report: HTTP first, then gRPC, models by name."""
        self.homeless += sum(len(orphans) for orphans in self._orphans.values())
        for front in ("HTTP", "GRPC"):
            for (_, model, version), sums in sorted(
                ((key, s) for key, s in self._sums.items() if key[0] == front), key=lambda row: str(row[0])
            ):
                yield from _model_lines(front, model, version, sums)
        yield from self._tree_lines()
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

    def _tree_lines(self) -> Iterator[str]:
        """For requests with steps or calls: how often each model ran below its caller, and for how long."""
        parents = {(front, path[:depth]) for front, path in self._tree for depth in range(1, len(path))}
        last = ""
        for front, path in sorted(self._tree, key=lambda place: (place[0] != "HTTP", place[1])):
            if (front, path[:1]) not in parents:
                continue
            node, root = self._tree[front, path], self._tree.get((front, path[:1]))
            if front != last:
                yield f"{front} requests with steps (avg handler time):"
                last = front
            often = node.count / root.count if root else 1
            times = "" if len(path) == 1 else f", {often:g} per request" if often != 1 else ""
            yield f"{'  ' * len(path)}{path[-1]}: {_us(node.total / node.count)}{times}"
        if last:
            yield ""


def _us(ns: float) -> str:
    return f"{ns / 1000:.0f}us"


def _model_lines(front: str, model: str, version: Any, sums: _Sums) -> Iterator[str]:
    mean = {
        stage: total / (sums.clients if stage in NETWORK else sums.count)
        for stage, total in sums.totals.items()
    }

    def line(depth: int, title: str, value: float | None) -> Iterator[str]:
        if value is not None:
            yield f"{'  ' * depth}{title} (avg): {_us(value)}"

    yield f"Summary for {model} ({version}): trace count = {sums.count}"
    deep = 0
    if sums.clients:
        deep = 1
        if sums.clients < sums.count:
            yield f"From clients: {sums.clients}, as steps and calls: {sums.count - sums.clients}"
        yield from line(0, f"{front} infer request", mean["request"])
        yield from line(1, "Receive", mean.get("receive"))
        yield from line(1, "Wait/Read", mean.get("wait"))
        yield from line(1, "Send", mean["send"])
        yield from line(1, "Overhead", mean["request overhead"])
    yield from line(deep, "Handler", mean["handler"])
    yield from line(deep + 1, "Overhead", mean["handler overhead"])
    yield from line(deep + 1, "Queue", mean.get("queue"))
    yield from line(deep + 1, "Compute", mean.get("compute"))
    for stage in ("input", "infer", "output"):
        yield from line(deep + 2, stage.title(), mean.get(stage))
    durations = sums.requests if sums.clients else sums.handlers
    values = durations.percentiles(PERCENTILES)
    ranks = " ".join(f"p{p}={_us(ns)}" for p, ns in zip(PERCENTILES, values, strict=True))
    yield f"Percentiles: {ranks} max={_us(durations.largest)}"
    if sums.errors:
        yield f"With errors: {sums.errors}"
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
    """The tensors of the first request, and of its steps if it is an ensemble's."""
    if not traces:
        return
    known = {trace.id: trace for trace in traces}
    roots = [trace for trace in traces if not trace.parent]
    root = min(roots or traces, key=lambda trace: trace.id)
    yield "Data Flow:"
    yield from _flow(root, known, 1)


def _flow(trace: Trace, known: dict[int, Trace], depth: int) -> Iterator[str]:
    pad = "  " * depth
    line = pad + "=" * (50 if trace.parent else 58)  # as the public tool's users know it
    yield line
    yield f"{pad}Name: {trace.model}"
    yield f"{pad}Version:{trace.version}"
    for activity, tensor in trace.tensors:
        yield f"{pad}{activity.removeprefix('TENSOR_')}:"
        text = _tensor(tensor).replace("\n", "\n" + pad + "    ")
        yield f"{pad}  {tensor.get('name', '')}: {text}"
    yield line
    for child in sorted((t for t in known.values() if t.parent == trace.id), key=lambda t: t.id):
        yield from _flow(child, known, depth + 1)


def _tensor(tensor: dict[str, Any]) -> str:
    import numpy as np

    from neptrio.traces.values import array_of

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
