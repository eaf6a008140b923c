"""Makes one HTML page of trace files: a waterfall per request, to be opened from disk and passed on.

The problem: a trace holds points in time. A person wants to see stages, which parts belong together and what
stands out, on a page that needs no server and no network, and that is safe whatever names the traces contain.
The choice: Python turns points into stages (here, where they can be tested without a browser) and puts them
into the page as JSON; the page's script only filters and draws.
Rules:
 1. The page loads nothing. Its content security policy allows one script and one style sheet, by hash. The
    data is a JSON block in which no `<` is left, and the script never turns text into markup.
 2. Between two neighbouring points of a request there is exactly one stage, so stages never overlap and add
    up to the request. Responses that decoupled models send before the end are marks on it.
 3. Times are nanoseconds after the earliest point in the files, which is `base_ns`.
 4. When files hold more requests than the page's limit they are read twice: the failed and the slowest requests
    are kept, with all their children.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from neptrio.traces.reader import NoTraceFile, Trace, opened, read

LIMIT = 20_000  # most requests in a page
TENSOR_LETTERS = 2048  # most letters of a tensor's data in a page

STAGES = {
    "wait": "waiting for and reading a gRPC message",
    "receive": "reading the HTTP request from the network",
    "overhead": "decoding, validating, encoding, handing over",
    "queue": "waiting in the scheduler's queue",
    "cache": "answered from the response cache",
    "input": "preparing input tensors",
    "infer": "executing the model",
    "output": "taking output tensors",
    "send": "encoding and sending the response",
    "steps": "an ensemble's steps or a model's calls are running",
}
OUTCOMES = {
    "ok": "answered",
    "failed": "the model or the server reported an error",
    "rejected": "its queue was full",
    "timeout": "it waited too long",
    "cancelled": "its client cancelled it or went away",
    "incomplete": "the trace ends before the request does",
}
# points in the order in which a request passes them, and the stage that begins at each
AFTER = {
    "GRPC_WAITREAD_START": "wait",
    "HTTP_RECV_START": "receive",
    "GRPC_WAITREAD_END": "overhead",
    "HTTP_RECV_END": "overhead",
    "REQUEST_START": "overhead",
    "QUEUE_START": "queue",
    "COMPUTE_START": "input",
    "COMPUTE_INPUT_END": "infer",
    "COMPUTE_OUTPUT_START": "output",
    "COMPUTE_END": "overhead",
    "REQUEST_END": "overhead",
}
RANK = {name: rank for rank, name in enumerate(AFTER)}
SENDS = ("HTTP_SEND_START", "GRPC_SEND_START"), ("HTTP_SEND_END", "GRPC_SEND_END")
KNOWN = {*AFTER, *SENDS[0], *SENDS[1], "INFER_RESPONSE_COMPLETE"}

Segment = tuple[str, int, int]


def segments(trace: Trace, parent: bool = False) -> list[Segment]:
    """(stage, begin, end) in nanoseconds, in time order; `parent`: the request has steps or calls.

    Responses sent before the request ends (decoupled models) come last and overlap other stages.
    """
    at = {name: ns for name, ns in trace.first().items() if name in AFTER}
    points = sorted((ns, RANK[name], AFTER[name]) for name, ns in at.items())
    computed, over = "COMPUTE_START" in at, "REQUEST_END" in at
    made: list[Segment] = []
    for (begin, _, stage), (end, _, _) in itertools.pairwise(points):
        if stage == "queue" and not computed:
            stage = "steps" if parent else "queue" if trace.error or not over else "cache"
        elif stage == "input" and "COMPUTE_INPUT_END" not in at:
            stage = "infer"
        elif stage == "infer" and parent:
            stage = "steps"
        if end > begin:
            made.append((stage, begin, end))
    last = over_at = points[-1][0] if points else 0
    early: list[Segment] = []
    for begin, end in sends(trace):
        if points and end <= over_at:
            early.append(("send", begin, end))
            continue
        begin = max(begin, last)
        if points and begin > last:
            made.append(("overhead", last, begin))
        if end > begin:
            made.append(("send", begin, end))
        last = max(last, end)
    return made + early


def sends(trace: Trace) -> Iterator[tuple[int, int]]:
    """(start, end) of the sending of each response, in nanoseconds."""
    begins = sorted(ns for ns, name in trace.times if name in SENDS[0])
    ends = sorted(ns for ns, name in trace.times if name in SENDS[1])
    yield from zip(begins, ends, strict=False)


def outcome(trace: Trace) -> str:
    """One of OUTCOMES. Kinds of errors are told apart by their text: files record nothing else."""
    error = trace.error.lower()
    if "cancel" in error:
        return "cancelled"
    if "timeout" in error or "timed out" in error or "deadline" in error:
        return "timeout"
    if "queue size" in error:
        return "rejected"
    if error:
        return "failed"
    if trace.times and not any(name == "REQUEST_END" for _, name in trace.times):
        return "incomplete"
    return "ok"


def begin(trace: Trace) -> int:
    """When the request's work began, in nanoseconds: waiting for its message does not count."""
    at = trace.first()
    for name in ("HTTP_RECV_START", "GRPC_WAITREAD_END", "REQUEST_START"):
        if name in at:
            return at[name]
    return min(at.values(), default=0)


def duration(trace: Trace) -> int:
    """Nanoseconds from begin() to the last point."""
    return max((ns for ns, _ in trace.times), default=0) - begin(trace) if trace.times else 0


@dataclass
class Page:
    """The traces that a page shows, and how many requests the files hold."""

    names: list[str] = field(default_factory=list)
    traces: list[tuple[int, Trace]] = field(default_factory=list)  # (file, trace)
    requests: int = 0
    left_out: int = 0


def collect(paths: Sequence[str], limit: int, warn: Callable[[str, str], None]) -> Page:
    """Reads the traces for a page. Of more than `limit` requests the failed and the slowest are kept.

    Raises OSError when a file cannot be read, and NoTraceFile for a pipe that would have to be read twice.
    """
    page = Page()
    best: list[tuple[bool, int, int, int]] = []  # (failed, duration, file, id): heap of the requests kept
    parents: list[dict[int, int]] = []
    whole = True
    for number, path in enumerate(paths):
        page.names.append(Path(path).name)
        above: dict[int, int] = {}
        parents.append(above)

        def first(trace: Trace, number: int = number, above: dict[int, int] = above) -> None:
            nonlocal whole
            if trace.parent:
                above[trace.id] = trace.parent
            else:
                page.requests += 1
                row = (outcome(trace) != "ok", duration(trace), number, trace.id)
                push = heapq.heappush if len(best) < limit else heapq.heappushpop
                push(best, row)
            if page.requests > limit:
                whole = False
                page.traces.clear()
            if whole:
                page.traces.append((number, trace))

        with opened(path) as source:
            read(source, first, lambda text, path=path: warn(path, text))  # type: ignore[misc]
    if not whole:
        for path in paths:
            if not os.path.isfile(path):
                raise NoTraceFile(
                    f"the traces have more than {limit} requests, and {path} can be read only once: write it to a file, or "
                    "give a higher --limit"
                )
        keep = {(number, id) for _, _, number, id in best}
        page.left_out = page.requests - len(keep)
        for number, path in enumerate(paths):
            page.traces += _kept(path, number, parents[number], keep)
    return page


def _kept(
    path: str, number: int, above: dict[int, int], keep: set[tuple[int, int]]
) -> list[tuple[int, Trace]]:
    found: list[tuple[int, Trace]] = []

    def second(trace: Trace) -> None:
        root, steps = trace.id, 0
        while root in above and steps <= len(above):
            root, steps = above[root], steps + 1
        if (number, root) in keep:
            found.append((number, trace))

    with opened(path) as source:
        read(source, second, lambda text: None)
    return found


def document(page: Page) -> dict[str, Any]:
    """The JSON that the page's script reads; every list in it is a table whose columns `columns` names."""
    rows = sorted(page.traces, key=lambda row: (row[0], row[1].id))
    index = {(number, trace.id): i for i, (number, trace) in enumerate(rows)}
    has_children = {(number, trace.parent) for number, trace in rows if trace.parent}
    base = min((ns for _, trace in rows for ns, _ in trace.times), default=0)
    points: dict[str, int] = {}
    models: dict[tuple[str, str], int] = {}
    stages, outcomes = list(STAGES), list(OUTCOMES)
    table = []
    for number, trace in rows:
        model = models.setdefault((trace.model, str(trace.version)), len(models))
        times: list[int] = []
        for ns, name in sorted(trace.times, key=lambda t: (t[0], RANK.get(t[1], len(RANK)))):
            times += (points.setdefault(name, len(points)), ns - base)
        bars: list[int] = []
        for stage, start, end in segments(trace, (number, trace.id) in has_children):
            bars += (stages.index(stage), start - base, end - base)
        above = index.get((number, trace.parent), -1) if trace.parent else -1
        table.append(
            [trace.id, above if above < index[number, trace.id] else -1, model, trace.front, trace.request_id,
             trace.error, outcomes.index(outcome(trace)), number, times, bars,
             [_tensor(activity, tensor) for activity, tensor in trace.tensors]]
        )  # fmt: skip
    return {
        "columns": ["id", "parent", "model", "front", "request_id", "error", "outcome", "file", "times",
                    "bars", "tensors"],
        "files": page.names,
        "base_ns": str(base),
        "requests": page.requests,
        "left_out": page.left_out,
        "points": list(points),
        "known_points": sorted(KNOWN),
        "models": list(models),
        "stages": list(STAGES.items()),
        "outcomes": list(OUTCOMES.items()),
        "traces": table,
    }  # fmt: skip


def _tensor(activity: str, tensor: dict[str, Any]) -> dict[str, Any]:
    data = str(tensor.get("data", ""))
    made: dict[str, Any] = {
        "activity": activity,
        "name": str(tensor.get("name", "")),
        "dtype": str(tensor.get("source_dtype", tensor.get("dtype", ""))),
        "shape": str(tensor.get("truncated_from", tensor.get("shape", ""))),
        "data": data[:TENSOR_LETTERS],
    }
    if len(data) > TENSOR_LETTERS:
        made["more"] = len(data) - TENSOR_LETTERS
    if "truncated_from" in tensor:
        made["note"] = f"the trace holds the first {tensor.get('shape', '?')} elements"
    elif "omitted" in tensor:
        made["note"] = str(tensor["omitted"])
    return made


def html(page: Page) -> str:
    """The page's HTML."""
    folder = files("neptrio.traces") / "page"
    script = (
        '"use strict";\n(() => {\n'
        + "\n".join((folder / name).read_text() for name in ("model.js", "rows.js", "panel.js", "main.js"))
        + "\n})();"
    )
    style = (folder / "view.css").read_text()
    policy = "; ".join((
        "default-src 'none'", f"script-src {_hash(script)}", f"style-src {_hash(style)}", "base-uri 'none'",
        "form-action 'none'",
    ))  # fmt: skip
    parts = {
        "csp": policy,
        "title": _text("Traces: " + ", ".join(page.names)),
        "style": style,
        "data": _json(document(page)),
        "script": script,
    }
    template = (folder / "view.html").read_text()
    made, at = [], 0
    # in the order of the template, so that inserted data is not searched for places
    for name in ("csp", "title", "style", "data", "script"):
        mark = "{" + name + "}"
        found = template.index(mark, at)
        made += [template[at:found], parts[name]]
        at = found + len(mark)
    return "".join(made) + template[at:]


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def _text(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _json(value: Any) -> str:
    """JSON that is safe inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
