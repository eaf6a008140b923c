"""Mode opentelemetry: makes spans of finished traces and exports them over OTLP/HTTP.

The problem: spans are sent in batches over a network that may be slow or down, and no request may notice. The
choice: the official SDK's batch processor and exporter. Finished traces are queued for a thread that makes spans
of them, with the ids that were drawn when the requests were sampled.

    InferRequest            the request at its transport: events HTTP_*, GRPC_*, INFER_RESPONSE_COMPLETE
      MODEL                 REQUEST_START, QUEUE_START, REQUEST_END; attributes triton.*
        compute             COMPUTE_*; absent for ensembles, cache hits and requests that never executed
        NAME                from NAME_START to NAME_END, as the model reports activities; other names are events
        MODEL               ensemble steps and calls by Python models

Rules:
 1. With level TENSORS alone there is only the span InferRequest, without events, as in a Triton server; no span
    contains tensors.
 2. A span is exported only as part of a finished trace, or when a model made it under such a span.
 3. At most max_queue_size traces wait here, and as many spans in the processor. A trace whose spans have no place there is
    dropped as a whole, and counted; a model's own span is dropped alone.
 4. When a collector does not answer this is logged once, and once more when it answers again.
 5. A span that cannot be encoded, since a model set something strange on it, is left out alone: those of others that are in
    its batch are sent.
Sources: docs/protocol/observed.md 11; W3C Trace Context.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from random import getrandbits
from typing import Any

from neptrio import __version__, extras
from neptrio.errors import Unavailable
from neptrio.foreign import summary, text_of
from neptrio.loop import threads
from neptrio.observe import current_span
from neptrio.observe.current_span import span_context
from neptrio.observe.span_options import SpanOptions
from neptrio.observe.trace_file import TraceWriterStatistics
from neptrio.request.infer_request import monotonic_ns

try:
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanKind, Status, StatusCode

    from neptrio.observe import model_spans
except ImportError as error:
    raise Unavailable(
        "trace mode opentelemetry needs packages that are not installed; install them with "
        f"{extras.install('opentelemetry')} ({error})"
    ) from None

log = logging.getLogger("neptrio.trace")

ROOT = "InferRequest"
FRONT = ("HTTP_", "GRPC_", "INFER_RESPONSE_COMPLETE")
SCOPE = InstrumentationScope("neptrio", __version__)
STOP_SECONDS = 4.0  # that closing waits for the last spans to be sent


class Exporter(SpanExporter):
    """The OTLP exporter; counts its failures, and logs only the first of a series."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._exporter = trace_exporter.OTLPSpanExporter(endpoint=url)
        self._reason = ""
        self._failing = False
        self.taken = 0  # spans that wait for their turn no more
        self.exported = 0
        self.lost = 0
        logging.getLogger(trace_exporter.__name__).addFilter(self._note)

    def _note(self, record: logging.LogRecord) -> bool:
        """Filters the exporter's own log, which has a message for every batch; keeps the last one."""
        self._reason = record.getMessage()
        return False

    def export(self, spans: Any) -> SpanExportResult:
        self.taken += len(spans)
        result = self._send(spans)
        if result is not SpanExportResult.SUCCESS and _refused(spans) is not None:
            spans = [span for span in spans if _can_be_sent(span)]
            result = self._send(spans) if spans else SpanExportResult.SUCCESS
        roots = sum(span.name == ROOT for span in spans)
        if result is SpanExportResult.SUCCESS:
            self.exported += roots
            if self._failing:
                self._failing = False
                log.warning("spans reach %s again", self._url)
        else:
            self.lost += roots
            if not self._failing:
                self._failing = True
                log.error("spans do not reach %s: %s", self._url, self._reason)
        return result

    def _send(self, spans: Any) -> SpanExportResult:
        try:
            return self._exporter.export(spans)
        except Exception as error:
            self._reason = str(error)
            return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._exporter.shutdown()
        logging.getLogger(trace_exporter.__name__).removeFilter(self._note)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


def _refused(spans: Any) -> Exception | None:
    """Why these spans cannot be encoded together, None where they can."""
    try:
        encode_spans(spans)
    except Exception as error:
        return error
    return None


def _can_be_sent(span: Any) -> bool:
    """Whether the span can be encoded; says why not in the log."""
    error = _refused([span])
    if error is not None:
        log.warning("the span '%s' is left out: it cannot be sent (%s)", text_of(span.name), summary(error))
    return error is None


class Places:
    """The places of spans that wait in the processor, which says of none that it has dropped it. Any thread."""

    def __init__(self, exporter: Exporter, most: int) -> None:
        self._exporter = exporter
        self._most = most
        self._lock = threading.Lock()
        self._given = 0

    def take(self, spans: int) -> bool:
        """Takes so many, or none where there are not as many left."""
        with self._lock:
            free = self._most - self._given + self._exporter.taken
            if spans <= free:
                self._given += spans
            return spans <= free


class SpanWriter:
    """Turns finished traces into spans. Methods are called on the trio thread and do not block, except settle() and
    close()."""

    def __init__(self, options: SpanOptions) -> None:
        self._limit = options.max_queue_size
        self._resource = Resource.create(dict(options.attributes()))
        self._exporter = Exporter(options.url)
        self._processor = BatchSpanProcessor(
            self._exporter,
            max_queue_size=options.max_queue_size,
            schedule_delay_millis=options.schedule_delay_ms,
            max_export_batch_size=options.max_export_batch_size,
        )
        self._queue: queue.SimpleQueue[list[Any] | threading.Event | None] = queue.SimpleQueue()
        self._put = 0
        self._taken = 0
        self._refused = 0  # for want of a place in the queue
        self._dropped = 0  # for want of places in the processor, and what could not be turned into spans
        self._places = Places(self._exporter, options.max_queue_size)
        self._thread: threading.Thread | None = threads.start(self._run, name="span-writer")
        current_span.active = True
        self._of_models = model_spans.of_process()
        if self._of_models is not None:
            self._of_models.open(self)

    def statistics(self) -> TraceWriterStatistics:
        """Counts of traces so far; `written` are those that the collector accepted."""
        exporter = self._exporter
        return TraceWriterStatistics(exporter.exported, exporter.lost + self._refused + self._dropped, False)

    def put(self, scope: Any, parts: list[Any]) -> None:
        """Queues a finished trace."""
        if self._put - self._taken >= self._limit:
            self._refused += 1
        else:
            self._put += 1
            self._queue.put(parts)

    def take(self, span: ReadableSpan) -> None:
        """Exports a span that a model has made under ours, as far as there are places (rule 3). Any thread."""
        if self._places.take(1):
            self._processor.on_end(self._of_this_server(span))

    def flush(self, scope: Any, indexed: bool) -> None:
        """Does nothing: the processor decides when spans are sent."""

    def reset(self, path: str) -> None:
        """Does nothing: there are no files."""

    def settle(self) -> None:
        """Blocks until the processor has the spans of every trace queued so far."""
        done = threading.Event()
        if self._thread is not None:
            self._queue.put(done)
            done.wait()

    def close(self) -> None:
        """Sends the spans that wait, for a few seconds at most."""
        if self._thread is not None:
            if self._of_models is not None:
                self._of_models.close(self)
            self._queue.put(None)
            self._thread.join()
            self._thread = None
            try:
                threads.start(self._processor.shutdown).join(STOP_SECONDS)
            except threads.NoThread as error:
                log.error("spans that wait are not sent: %s", error)

    # ------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            self._taken += 1
            try:
                spans = self._spans(item)[: self._limit]  # a queue may be shorter than a trace
            except Exception:
                log.exception("a trace could not be turned into spans")
                self._dropped += 1
                continue
            if self._places.take(len(spans)):
                for span in spans:
                    self._processor.on_end(span)
            else:
                self._dropped += 1

    def _spans(self, parts: list[Any]) -> list[ReadableSpan]:
        offset = time.time_ns() - monotonic_ns()
        root = parts[0]
        group = root.group
        remote = group.remote
        above = None
        if remote is not None:
            above = trace.SpanContext(
                remote.trace_id, remote.span_id, True, trace.TraceFlags(int(remote.sampled))
            )
        top = span_context(group, group.root_span_id)
        made = []
        contexts = {0: top}
        if not group.timestamps:
            parts = [root]
        times = {part: [(ns + offset, name) for ns, name in part.times] for part in parts}
        front = [t for t in times[root] if group.timestamps and t[1].startswith(FRONT)]
        first, last = times[root][0][0], times[root][-1][0]
        made.append(self._span(ROOT, top, above, front, first, last, root.error))
        if not group.timestamps:
            return made
        for part in parts:
            name, version, request_id = part.identity
            context = contexts[part.id] = span_context(group, part.span_id)
            attributes: dict[str, Any] = {
                "triton.model_name": name,
                "triton.model_version": version,
                "triton.trace_id": part.id,
                "triton.trace_parent_id": part.parent,
            }
            if request_id:
                attributes["triton.request_id"] = request_id
            stages = [t for t in times[part] if not t[1].startswith(FRONT)]
            compute = [t for t in stages if t[1].startswith("COMPUTE_")]
            own = [t for t in stages if not t[1].startswith("COMPUTE_")]
            reported, spans = self._reported(part, context, own[-1][0], offset)
            made.append(
                self._span(
                    name, context, contexts.get(part.parent, top), sorted(own + reported), own[0][0], own[-1][0], part.error,
                    attributes, part.span,
                )
            )  # fmt: skip
            if compute:
                inner = span_context(group, getrandbits(64) or 1)
                made.append(
                    self._span("compute", inner, context, compute, compute[0][0], compute[-1][0], part.error)
                )
            made += spans
        return made

    def _of_this_server(self, span: ReadableSpan) -> ReadableSpan:
        return ReadableSpan(
            name=span.name, context=span.get_span_context(), parent=span.parent, resource=self._resource,
            attributes=span.attributes, events=span.events, links=span.links, kind=span.kind, status=span.status,
            start_time=span.start_time, end_time=span.end_time, instrumentation_scope=span.instrumentation_scope,
        )  # fmt: skip

    def _reported(
        self, part: Any, context: Any, end: int, offset: int
    ) -> tuple[list[tuple[int, str]], list[ReadableSpan]]:
        """What a model has reported of a part: events of its span, and spans below it. They nest in the order in which they were
        reported; one that is not ended ends with the part."""
        events: list[tuple[int, str]] = []
        begun: list[tuple[str, Any, Any, list[tuple[int, str]]]] = []  # name, context, parent, events
        made = []
        for ns, name in part.reported:
            ns += offset
            if name.endswith("_START") and len(name) > len("_START"):
                inner = span_context(part.group, getrandbits(64) or 1)
                begun.append((name.removesuffix("_START"), inner, begun[-1][1] if begun else context, []))
            (begun[-1][3] if begun else events).append((ns, name))
            if name.endswith("_END") and len(name) > len("_END") and begun:
                made.append(self._whole(begun.pop(), ns))
        while begun:
            made.append(self._whole(begun.pop(), end))
        return events, made

    def _whole(self, begun: tuple[str, Any, Any, list[tuple[int, str]]], end: int) -> ReadableSpan:
        name, context, parent, times = begun
        return self._span(name, context, parent, times, times[0][0], max(end, times[0][0]), "")

    def _span(
        self,
        name: str,
        context: Any,
        parent: Any,
        times: list[tuple[int, str]],
        start: int,
        end: int,
        error: str,
        attributes: dict[str, Any] | None = None,
        live: Any = None,
    ) -> ReadableSpan:
        events = [Event(what, timestamp=ns) for ns, what in times]
        links: list[Any] = []
        status = Status(StatusCode.ERROR, error) if error else Status()
        if live is not None:
            name = live.name or name
            events += live.events
            events.sort(key=lambda event: event.timestamp)
            links = list(live.links)
            attributes = {**live.attributes, **(attributes or {})}
            if not error:
                status = live.status
        return ReadableSpan(
            name=name, context=context, parent=parent, resource=self._resource, attributes=attributes or {},
            events=events, links=links, kind=SpanKind.SERVER, status=status, start_time=start, end_time=end,
            instrumentation_scope=SCOPE,
        )  # fmt: skip
