"""Trace files as Chrome/Perfetto trace events, for ui.perfetto.dev and chrome://tracing.

The problem: the viewers draw the complete events (`X`) of one thread nested by time, and draw nonsense for
events that overlap without nesting. Requests overlap all the time, and so do an ensemble's parallel steps.
The choice: every model that clients call is drawn as a process, and its threads are lanes: a request takes a
free lane for as long as it lasts.

Rules:
 1. Two slices of a lane are nested or do not overlap. A request has its lane to itself until it ends; its
    stages lie inside it, one after the other.
 2. A step or call lies inside its parent's slice if it fits there, else in a lane of its own, with an arrow
    (flow events `s` and `f`) from the parent.
 3. Times are microseconds of the server's monotonic clock, exact to the nanosecond. Waiting for a gRPC message
    is not drawn. Responses of decoupled models are drawn as instants.
 4. Requests are drawn in the order of their begin, within a window, so memory does not grow with the file.
Source: the Trace Event Format (JSON object form).
"""

from __future__ import annotations

import heapq
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from neptrio.traces.reader import Trace, merged
from neptrio.traces.view import begin, outcome, segments

GROUPS = 1000  # requests that are kept because steps of theirs may follow in the file


@dataclass
class _Lane:
    number: int
    end: int = 0


@dataclass
class _Process:
    """A model that clients call, with its lanes."""

    number: int
    lanes: list[_Lane] = field(default_factory=list)

    def lane(self, start: int, end: int) -> tuple[_Lane, bool]:
        """Takes a lane that is free at `start` until `end`; True when a new one had to be made."""
        for lane in self.lanes:
            if lane.end <= start:
                lane.end = end
                return lane, False
        lane = _Lane(len(self.lanes) + 1, end)
        self.lanes.append(lane)
        return lane, True


def grouped(source: IO[str], warn: Callable[[str], None]) -> Iterator[list[Trace]]:
    """Yields each request with its steps and calls, parents first, roughly in the order of their begin."""
    groups: OrderedDict[int, list[Trace]] = OrderedDict()  # root id -> the traces of its tree
    root_of: dict[int, int] = {}
    early: dict[int, list[Trace]] = {}  # traces that came before their parents

    def place(trace: Trace) -> None:
        root = root_of.get(trace.parent) if trace.parent else trace.id
        if root is None:
            early.setdefault(trace.parent, []).append(trace)
            return
        left = [trace]
        while left:  # those below it that came before it, however deep they lie
            one = left.pop()
            root_of[one.id] = root
            groups.setdefault(root, []).append(one)
            left += early.pop(one.id, ())

    def take(root: int) -> list[Trace]:
        parts = groups.pop(root)
        for part in parts:
            root_of.pop(part.id, None)
        return sorted(parts, key=lambda part: (part.id != root, begin(part), part.id))

    ready: list[tuple[int, int]] = []
    for trace in merged(source, warn, tensors=0):
        place(trace)
        if not trace.parent and trace.id in groups:
            heapq.heappush(ready, (begin(trace), trace.id))
        if len(ready) > GROUPS:
            yield take(heapq.heappop(ready)[1])
        if len(early) > GROUPS:
            yield early.pop(next(iter(early)))  # those whose parents are not in the file
    while ready:
        yield take(heapq.heappop(ready)[1])
    yield from early.values()


class _Writer:
    def __init__(self, out: IO[str]) -> None:
        self._out = out
        self._separator = "\n"
        out.write('{"displayTimeUnit":"ns","traceEvents":[')

    def event(self, ph: str, name: str, pid: int, tid: int, ns: int | None = None, length: int | None = None,
              **more: Any) -> None:  # fmt: skip
        """Writes one event; times are given in nanoseconds and written as exact microseconds."""
        head = {"ph": ph, "name": name, "pid": pid, "tid": tid, **more}
        text = json.dumps(head)[:-1]
        if ns is not None:
            text += f', "ts": {_us(ns)}'
        if length is not None:
            text += f', "dur": {_us(length)}'
        self._out.write(self._separator + text + "}")
        self._separator = ",\n"

    def close(self) -> None:
        self._out.write("\n]}\n")


def _us(ns: int) -> str:
    return f"{ns // 1000}.{ns % 1000:03d}"


def perfetto(source: IO[str], out: Callable[[], IO[str]], warn: Callable[[str], None]) -> int:
    """Writes a file of traces as trace events; returns the number of traces drawn. `out` opens where they go, which happens
    only once it is known that this is a trace file. Raises NoTraceFile."""
    groups = grouped(source, warn)
    first = list(itertools.islice(groups, 1))
    writer = _Writer(out())
    processes: dict[str, _Process] = {}
    count = 0
    for parts in itertools.chain(first, groups):
        root = parts[0]
        process = processes.get(root.model)
        if process is None:
            process = processes[root.model] = _Process(len(processes) + 1)
            writer.event("M", "process_name", process.number, 0, args={"name": root.model})
            writer.event("M", "process_sort_index", process.number, 0, args={"sort_index": process.number})
        count += _group(writer, process, parts)
    writer.close()
    return count


def _group(writer: _Writer, process: _Process, parts: list[Trace]) -> int:
    parents = {part.parent for part in parts}
    rooms: dict[int, list[tuple[int, int, _Lane]]] = {}  # trace id -> slices in which its children may lie
    filled: dict[tuple[int, int], int] = {}  # (trace id, slice) -> the time up to which it is taken
    drawn = 0
    for part in parts:
        if not part.times:
            continue
        start, end = begin(part), max(ns for ns, _ in part.times)
        lane = None
        for i, (first, last, above) in enumerate(rooms.get(part.parent, ())):
            if max(first, filled.get((part.parent, i), 0)) <= start and end <= last:
                filled[part.parent, i] = end
                lane = above
                break
        inside = lane is not None
        if lane is None:
            lane, new = process.lane(start, end)
            if new:
                writer.event(
                    "M", "thread_name", process.number, lane.number, args={"name": f"lane {lane.number}"}
                )
        rooms[part.id] = _draw(writer, process.number, lane, part, start, end, part.id in parents)
        drawn += 1
        if not inside and rooms.get(part.parent):
            first, last, above = rooms[part.parent][0]
            common: dict[str, Any] = {"cat": "step", "id": part.id}
            writer.event("s", "step", process.number, above.number, min(max(start, first), last), **common)
            writer.event("f", "step", process.number, lane.number, start, bp="e", **common)
    return drawn


def _draw(
    writer: _Writer, pid: int, lane: _Lane, part: Trace, start: int, end: int, parent: bool
) -> list[tuple[int, int, _Lane]]:
    """Draws a trace with its stages; returns its slices in which children may lie."""
    args: dict[str, Any] = {"id": part.id, "outcome": outcome(part)}
    if part.parent:
        args["parent_id"] = part.parent
    if part.request_id:
        args["request_id"] = part.request_id
    if part.error:
        args["error"] = part.error
    name = f"{part.model} ({part.version})"
    writer.event("X", name, pid, lane.number, start, end - start, cat="request", args=args)
    rooms = []
    until = start
    for stage, first, last in segments(part, parent):
        if first < until or stage == "wait":
            continue  # a response sent before the end: drawn as an instant below
        until = last
        writer.event("X", stage, pid, lane.number, first, last - first, cat="stage", args={"id": part.id})
        if stage == "steps":
            rooms.append((first, last, lane))
    replies = [ns for ns, name in part.times if name == "INFER_RESPONSE_COMPLETE"]
    if len(replies) > 1:
        for number, ns in enumerate(sorted(replies), 1):
            writer.event("i", "response", pid, lane.number, ns, cat="response", s="t",
                         args={"id": part.id, "number": number})  # fmt: skip
    return rooms
