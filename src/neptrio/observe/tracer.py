"""Sampling: which requests are traced, under which settings, and where finished traces go.

Rules:
 1. With tracing off everywhere a request costs one attribute test (InferenceService.tracing).
 2. A request that came over the network is counted once in its model's scope, after it was validated;
    ensemble steps and BLS calls are parts of the request they are made for and count nowhere.
 3. A trace that was asked for (by the request itself, where that is allowed, or by a sampled parent in
    mode opentelemetry) is taken in any case, is always kept, and counts nowhere.
 4. A scope that was replaced finishes what it has sampled, then is flushed. A scope whose count is used
    up is flushed to an indexed file when its last trace is finished.
 5. When files cannot be written, tracing stops, with one logged error, until settings are updated.
Everything here runs on the trio thread; files and spans are the writer's.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from itertools import islice
from random import getrandbits
from typing import TYPE_CHECKING, Any

import trio

from neptrio._cext.mailbox import WorkItem
from neptrio._cext.request import InferRequest
from neptrio._cext.trace import Group, Trace
from neptrio.errors import InvalidArgument
from neptrio.observe.propagation import Asked, traceparent
from neptrio.observe.trace_file import TraceWriter
from neptrio.observe.trace_settings import LEVELS, Scope, TraceTable, span_options, start_values
from neptrio.stamps import Stamp

if TYPE_CHECKING:
    from neptrio.settings import Settings

log = logging.getLogger("neptrio.trace")
RECV_START = int(Stamp.RECV_START)
RECENT = 128
PARAMETER = "neptrio_trace"  # of a request that forces its own trace; the header is neptrio-trace
CLOSE_SECONDS = 5.0


class _Failed(WorkItem):
    """The writer's bad news, on its way to the trio thread."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def deliver(self) -> None:
        self._tracer.stop()


class Tracer:
    """Samples requests and hands finished traces to the writer."""

    def __init__(self, settings: Settings, turn: Any, completions: Any, inference: Any) -> None:
        self.spans = span_options(settings)
        self.table = TraceTable(start_values(settings), "triton" if self.spans is None else "opentelemetry")
        self.turn = turn
        self.tensor_bytes = settings.trace_tensor_bytes
        self.writer: Any
        if self.spans is None:
            self.writer = TraceWriter(lambda: completions.post(_Failed(self)))
        else:
            from neptrio.observe.spans import SpanWriter

            self.writer = SpanWriter(self.spans)
        self.disabled = False
        self._may_force = settings.allow_forced_trace
        self._inference = inference
        self._open = 0
        self._recent: deque[Group] = deque(maxlen=RECENT)
        inference.tracer = self
        self._activate()

    def _activate(self) -> None:
        scopes = self.table.scopes()
        if self.spans is not None:
            wanted = any(scope.level for scope in scopes)  # a sampled parent is reason enough
        else:
            wanted = not self.disabled and any(scope.level and scope.left for scope in scopes)
        self._inference.tracing = wanted or self._may_force or self._open > 0
        self._inference.trace_headers = self._may_force or (self.spans is not None and wanted)

    def begin(self, request: InferRequest) -> None:
        """A validated request is about to be queued: traces it if it is its turn, or asked for.

        Raises InvalidArgument when the request asks for something that is no trace level.
        """
        parent = request.parent
        if parent is not None:
            above = parent.trace
            if above is not None and above.group.open:
                request.trace = trace = Trace(above.group, request, above.id)
                if above.span_id:
                    trace.span_id = _span_id()
        elif request.timestamp(RECV_START):
            scope = self.table.scope(request.model.name)
            asked = request.asked
            if (asked is not None or self._may_force) and (level := self._asked(request, asked, scope)):
                scope.open += 1
                group = Group(self, scope, level, True)
            elif not self.disabled and scope.sample():
                group = Group(self, scope, scope.level)
            else:
                return
            self._open += 1
            request.trace = Trace(group, request, 0)
            if self.spans is not None:
                _identify(group, request.trace, asked)

    def _asked(self, request: InferRequest, asked: Asked | None, scope: Scope) -> tuple[str, ...]:
        """The level at which a trace is asked for, () when none is."""
        if self._may_force:
            wish: Any = request.parameters.get(PARAMETER) if request.parameters else None
            if wish is None and asked is not None and asked.force:
                wish = asked.force
            if wish is not None and (level := _level(wish)) is not None:
                if self.spans is not None and "TENSORS" in level:
                    raise InvalidArgument("trace level TENSORS is not there in mode opentelemetry")
                return level or scope.level or ("TIMESTAMPS",)
        if self.spans is not None and asked is not None and asked.sampled:
            return tuple(scope.level)
        return ()

    def finished(self, group: Group) -> None:
        """Every part of a trace has ended."""
        scope = group.scope
        self._open -= 1
        scope.open -= 1
        if group.asked or not scope.tail_us or scope.keep(_slow_or_failed(group, scope)):
            self._recent.append(group)
            if scope.file or self.spans is not None:
                self.writer.put(scope, group.parts)
            elif group.tensors:
                for part in group.parts:
                    part.tensors.clear()
        if not scope.open:
            if scope.retired:
                self.writer.flush(scope, scope.left == 0)
            elif not scope.left:
                self.writer.flush(scope, True)
        if not self._open:
            self._activate()

    async def update(self, changes: Mapping[str, Any], model: str) -> None:
        """Installs changed settings and waits until the old ones' traces are on disk.

        Raises InvalidArgument and changes nothing when they do not fit together.
        """
        for scope in self.table.update(changes, model):
            if not scope.open:
                self.writer.flush(scope, False)
        if "trace_file" in changes:
            self.writer.reset(self.table.scope(model).file)
        self._activate()
        await trio.to_thread.run_sync(self.writer.settle)
        self.disabled = False  # what the old settings' files could not take does not stop the new ones
        self._activate()

    def stop(self) -> None:
        """Files cannot be written, unless settings were updated since."""
        self.disabled = self.writer.statistics().failed
        self._activate()

    def recent(self, count: int = RECENT) -> list[dict[str, Any]]:
        """The objects of the last finished traces, oldest first, without tensors."""
        groups = list(islice(reversed(self._recent), count))
        return [part.document()[0] for group in reversed(groups) for part in group.parts]

    async def close(self) -> None:
        """Writes what is left; nothing is traced any more."""
        self._inference.tracing = False
        for scope in self.table.scopes():
            self.writer.flush(scope, False)
        with trio.move_on_after(CLOSE_SECONDS):  # a collector that hangs does not hold up the exit
            await trio.to_thread.run_sync(self.writer.close, abandon_on_cancel=True)


def _slow_or_failed(group: Group, scope: Scope) -> bool:
    return group.parts[0].duration_ns >= scope.tail_us * 1000 or any(part.error for part in group.parts)


def _level(wish: Any) -> tuple[str, ...] | None:
    """The levels a request names, () for those of the settings, None for no trace."""
    text = str(wish).strip()
    if text.lower() in ("true", "1"):
        return ()
    if text.lower() in ("false", "0", ""):
        return None
    named = {name.strip() for name in text.split(",")}
    if not named <= set(LEVELS):
        raise InvalidArgument(f"{PARAMETER}: expected true, false, {' or '.join(LEVELS)}, got '{text}'")
    return tuple(level for level in LEVELS if level in named)


def _span_id() -> int:
    return getrandbits(64) or 1


def _identify(group: Group, trace: Trace, asked: Asked | None) -> None:
    """Gives a trace its place among those of other servers."""
    group.trace_id = getrandbits(128) or 1
    if asked is not None and asked.trace_id:
        group.trace_id, group.remote = asked.trace_id, asked
    group.root_span_id = _span_id()
    trace.span_id = _span_id()
    headers = [(b"traceparent", traceparent(group.trace_id, group.root_span_id).encode())]
    if group.remote is not None and group.remote.tracestate:
        headers.append((b"tracestate", group.remote.tracestate.encode("latin-1")))
    trace.headers = tuple(headers)
