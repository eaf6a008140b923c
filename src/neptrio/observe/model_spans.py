"""Spans that models make below ours (mode opentelemetry): to whose collector they go.

The problem: OpenTelemetry has one provider for a process, and a process may have several servers, one after the other or at
once, each with a collector of its own. The choice: the provider is made by the first server and stays; each span goes to the
server whose request's span it lies below.

Rules:
 1. A span belongs to the writer of the span above it. Where that is not known, since a model has made its parent of a text
    (`request.trace().get_context()`), it goes to the writer that was opened first and is open.
 2. A program that has a provider of its own keeps it: nothing is set then.
 3. Of spans that have begun and never end, the last MOST are remembered.
Any thread.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

from opentelemetry import context, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

MOST = 10_000


class Writer(Protocol):
    """A server's writer of spans (observe.spans)."""

    def take(self, span: ReadableSpan) -> None:
        """A model has ended this span."""


class ModelSpans(SpanProcessor):
    """Gives each span that ends to its writer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[Writer] = []
        self._begun: dict[int, Writer] = {}  # by the ids of the spans

    def open(self, writer: Writer) -> None:
        """A server begins to trace."""
        with self._lock:
            self._open.append(writer)

    def close(self, writer: Writer) -> None:
        """It has ended."""
        with self._lock:
            self._open.remove(writer)

    def on_start(self, span: Any, parent_context: context.Context | None = None) -> None:
        above = trace.get_current_span(parent_context)
        writer = getattr(above, "writer", None)  # where it is the span that a model finds
        with self._lock:
            writer = writer or self._begun.get(above.get_span_context().span_id)
            if writer is None:
                return
            if len(self._begun) >= MOST:
                del self._begun[next(iter(self._begun))]
            self._begun[span.get_span_context().span_id] = writer

    def on_end(self, span: ReadableSpan) -> None:
        found = span.get_span_context()
        with self._lock:
            writer = self._begun.pop(found.span_id, None) if found is not None else None
            if writer is None and self._open:
                writer = self._open[0]
        if writer is not None:
            writer.take(span)


class ModelProvider(TracerProvider):
    """The process's provider. Spans without a parent are not made."""

    def __init__(self) -> None:
        super().__init__(sampler=ParentBased(ALWAYS_OFF), shutdown_on_exit=False)
        self.spans = ModelSpans()
        self.add_span_processor(self.spans)


def of_process() -> ModelSpans | None:
    """The process's, made if there is none; None with a provider that is not ours (rule 2)."""
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        trace.set_tracer_provider(ModelProvider())
    found = trace.get_tracer_provider()
    return found.spans if isinstance(found, ModelProvider) else None
