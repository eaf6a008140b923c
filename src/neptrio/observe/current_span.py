"""The OpenTelemetry span that a Python model finds as the current one while it executes.

The span of a request is made only when its trace is finished; what the model sets on it before (attributes, events,
links, status) is kept here until then. Without the OpenTelemetry packages this module can be imported and does
nothing.

Rules:
 1. A model executes under the span of its batch's first traced request, to which the spans of the others are
    linked. `request.trace().get_context()` gives the context of each request's own span.
 2. As in OpenTelemetry's own spans the last MOST events and links are kept, and as many attributes.
 3. The server begins and ends the span; a model's call of end() has no effect.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any

MOST = 128
active = False  # True after a server of this process has started in mode opentelemetry

if TYPE_CHECKING:
    from neptrio.request.infer_request import InferRequest


def enter(requests: list[InferRequest]) -> Any:
    """Makes the requests' span the current one. Returns a token for leave(), None if no request is traced."""
    traced = [r.trace for r in requests if r.trace is not None and r.trace.span_id]
    if not traced:
        return None
    from opentelemetry import context
    from opentelemetry.trace import set_span_in_context

    first = traced[0]
    if first.span is None:
        context_of_span = span_context(first.group, first.span_id)
        first.span = _live_span()(context_of_span, first.group.scope.writer)
    for other in traced[1:]:
        first.span.add_link(span_context(other.group, other.span_id))
    return context.attach(set_span_in_context(first.span))


def leave(token: Any) -> None:
    """Restores the span that was current before enter(): the model has executed."""
    if token is not None:
        from opentelemetry import context

        context.detach(token)


def span_context(group: Any, span_id: int) -> Any:
    """The SpanContext of a span in a trace."""
    from opentelemetry.trace import SpanContext, TraceFlags, TraceState

    state = group.remote.tracestate if group.remote is not None else ""
    return SpanContext(
        group.trace_id,
        span_id,
        False,
        TraceFlags(TraceFlags.SAMPLED),
        TraceState.from_header([state]) if state else None,
    )


_class: Any = None


def _live_span() -> Any:
    global _class
    if _class is None:
        _class = _make_class()
    return _class


def _make_class() -> Any:
    from opentelemetry.attributes import BoundedAttributes
    from opentelemetry.sdk.trace import Event
    from opentelemetry.trace import Link, Span, Status, StatusCode

    class LiveSpan(Span):
        """A span that has not ended. Any thread."""

        def __init__(self, context: Any, writer: Any) -> None:
            self._context = context
            self.writer = writer  # of the spans that the model makes below it (observe.model_spans)
            self.name = ""
            self.attributes = BoundedAttributes(maxlen=MOST, immutable=False)
            self.events: deque[Any] = deque(maxlen=MOST)
            self.links: deque[Any] = deque(maxlen=MOST)
            self.status = Status()

        def get_span_context(self) -> Any:
            return self._context

        def is_recording(self) -> bool:
            return True

        def end(self, end_time: int | None = None) -> None:
            """Does nothing: the server ends the span (rule 3)."""

        def set_attribute(self, key: str, value: Any) -> None:
            self.attributes[key] = value

        def set_attributes(self, attributes: Any) -> None:
            for key, value in attributes.items():
                self.set_attribute(key, value)

        def add_event(self, name: str, attributes: Any = None, timestamp: int | None = None) -> None:
            kept = BoundedAttributes(maxlen=MOST, attributes=attributes)
            when = timestamp if timestamp and isinstance(timestamp, int) else time.time_ns()
            self.events.append(Event(name, kept, when))

        def add_link(self, context: Any, attributes: Any = None) -> None:
            self.links.append(Link(context, BoundedAttributes(maxlen=MOST, attributes=attributes)))

        def update_name(self, name: str) -> None:
            self.name = name

        def set_status(self, status: Any, description: str | None = None) -> None:
            self.status = status if isinstance(status, Status) else Status(status, description)

        def record_exception(
            self,
            exception: BaseException,
            attributes: Any = None,
            timestamp: int | None = None,
            escaped: bool = False,
        ) -> None:
            about = {"exception.type": type(exception).__qualname__, "exception.message": str(exception)}
            self.add_event("exception", {**about, **(attributes or {})}, timestamp)
            self.set_status(StatusCode.ERROR, str(exception))

    return LiveSpan
