"""Sampling: which requests are traced, under which settings, and what happens to finished traces.

Rules:
 1. While tracing is off everywhere, a request costs one test of an attribute (Sampler.tracing).
 2. A request from the network is counted once, in its model's scope, after it was validated. Ensemble steps and
    calls by models are parts of the request for which they are made, and are not counted.
 3. A trace that was asked for (by the request itself, where that is allowed, or by a sampled parent in mode
    opentelemetry) is made in any case, is always kept, and is not counted.
 4. A replaced scope finishes the traces it has begun, then it is flushed. A scope whose count is used up is
    flushed to an indexed file when its last trace is finished.
 5. When files cannot be written, tracing stops until settings are updated; one error is logged.
 6. What waits for the disk of traces takes none of the threads that others wait for: at most DISK_THREADS of it at once.
Everything here runs on the trio thread; the writers of files and spans have threads of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from random import getrandbits
from typing import Any

import trio

from neptrio.errors import InvalidArgument
from neptrio.loop import threads
from neptrio.loop.mailbox import WorkItem
from neptrio.observe.propagation import Asked, traceparent
from neptrio.observe.tensor_copier import TensorCopier
from neptrio.observe.trace import Trace
from neptrio.observe.trace_file import TraceWriter
from neptrio.observe.trace_options import TraceOptions, directory, span_options, start_values
from neptrio.observe.trace_recent import RECENT, Recent
from neptrio.observe.trace_sampler import Sampler
from neptrio.observe.trace_settings import LEVELS, Scope, TraceTable
from neptrio.request.infer_request import InferRequest

log = logging.getLogger("neptrio.trace")
PARAMETER = "neptrio_trace"  # the parameter by which a request asks for a trace; the header is neptrio-trace
CLOSE_SECONDS = 5.0
DISK_THREADS = 4


class _Failed(WorkItem):
    """Tells the trio thread that the writer has failed."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def deliver(self) -> None:
        self._tracer.stop()


class Tracer(Sampler):
    """Samples requests and hands finished traces to the writer."""

    def __init__(self, options: TraceOptions, loop_pass: Any, completions: Any) -> None:
        self.options = span_options(options)
        self.spans = self.options is not None
        self.table = TraceTable(start_values(options), "opentelemetry" if self.spans else "triton")
        self.attach(loop_pass)
        self.tensor_bytes = options.tensor_bytes
        self.copier = TensorCopier()
        self.may_force = options.allow_forced
        self._by_header = options.allow_forced and options.forced_by_header
        self.recent = Recent()
        self.disk = trio.CapacityLimiter(DISK_THREADS)
        self.writer: Any
        if self.options is None:
            self.writer = TraceWriter(
                lambda: completions.post(_Failed(self)), directory(options), options.max_bytes
            )
        else:
            from neptrio.observe.spans import SpanWriter

            self.writer = SpanWriter(self.options)
        self.activate()

    def activate(self) -> None:
        """Takes over the table's scopes, and sets Sampler.tracing, which requests test."""
        scopes = self.table.scopes()
        self.default, self.models = self.table.globals, self.table.models
        if self.spans:
            for scope in scopes:
                scope.writer = self.writer
            # also with no count left: a sampled parent may ask for a trace
            wanted = any(scope.level for scope in scopes)
        else:
            wanted = not self.disabled and any(scope.level and scope.left for scope in scopes)
        self.tracing = wanted or self.may_force or self.open > 0
        self.unread = wanted or self._by_header or self.open > 0
        self.trace_headers = self._by_header or (self.spans and wanted)

    def asked_level(self, request: InferRequest, scope: Scope) -> tuple[str, ...]:
        """The levels of a trace that was asked for, () when none was. Raises InvalidArgument."""
        asked = request.asked
        if self.may_force:
            wish: Any = request.parameters.get(PARAMETER) if request.parameters else None
            if wish is None and self._by_header and asked is not None and asked.force:
                wish = asked.force
            if wish is not None and (level := _level(wish)) is not None:
                if self.spans and "TENSORS" in level:
                    raise InvalidArgument("trace level TENSORS is not there in mode opentelemetry")
                return level or scope.level or ("TIMESTAMPS",)
        if self.spans and asked is not None and asked.sampled:
            return tuple(scope.level)
        return ()

    def identify(self, trace: Trace, asked: Asked | None) -> None:
        """Gives a new trace its ids, as a part of the caller's trace where there is one."""
        trace.trace_id = getrandbits(128) or 1
        if asked is not None and asked.trace_id:
            trace.trace_id, trace.remote = asked.trace_id, asked
        trace.root_span_id = _span_id()
        # without timestamps only the root span is made, so spans made by a model are below that one
        trace.span_id = _span_id() if trace.timestamps else trace.root_span_id
        headers = [(b"traceparent", traceparent(trace.trace_id, trace.root_span_id).encode())]
        if trace.remote is not None and trace.remote.tracestate:
            headers.append((b"tracestate", trace.remote.tracestate.encode("latin-1")))
        trace.headers = tuple(headers)

    def identify_part(self, trace: Trace) -> None:
        """identify() for a part of a request: an ensemble step or a model's call."""
        trace.span_id = _span_id() if trace.group.timestamps else trace.group.root_span_id

    def kept(self, root: Trace) -> None:
        """Passes on a finished trace whose text is not made here: one with spans or tensors, or without a file."""
        if root.scope.file or self.spans:
            self.writer.put(root.scope, root.parts)
        else:
            for part in root.parts:
                part.drop_tensors()

    def drained(self, scope: Scope) -> None:
        """Called when a scope that samples no more has finished its last trace."""
        self.writer.flush(scope, scope.left == 0)

    async def update(self, changes: Mapping[str, Any], model: str) -> None:
        """Installs changed settings, and waits until the traces of the old ones are on disk.

        Raises InvalidArgument and changes nothing when the settings contradict each other.
        """
        for scope in self.table.update(changes, model):
            if not scope.open:
                self.writer.flush(scope, False)
        if "trace_file" in changes:
            self.writer.reset(self.table.scope(model).file)
        self.activate()
        await threads.run(self.writer.settle, abandon_on_cancel=True, limiter=self.disk)
        self.disabled = False  # new settings may work even if the old ones' files could not be written
        self.activate()

    def stop(self) -> None:
        """Stops tracing because files cannot be written, unless settings were updated meanwhile."""
        self.disabled = self.writer.statistics().failed
        self.activate()

    def last(self, count: int = RECENT) -> Iterator[bytes]:
        """The objects of the traces that finished last, oldest first, without tensors: the JSON of a trace at a time."""
        return self.recent.last(count)

    async def close(self) -> None:
        """Stops tracing and writes what is left."""
        self.tracing = self.unread = False
        for scope in self.table.scopes():
            self.writer.flush(scope, False)
        with trio.move_on_after(CLOSE_SECONDS) as waiting:  # a collector that hangs must not delay the exit
            await threads.run_surely(self._end, abandon_on_cancel=True)
        if waiting.cancelled_caught:
            log.error("traces are lost: the last ones could not be written within %g s", CLOSE_SECONDS)

    def _end(self) -> None:
        self.copier.close()
        self.writer.close()


def _level(wish: Any) -> tuple[str, ...] | None:
    """The levels that a request names, () for those of the settings, None for no trace."""
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
