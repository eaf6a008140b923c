"""OpenTelemetry in the process of an isolated model.

The server makes the span of a request. Here it is a remote span, and spans that the model makes are its children. If
this process's environment has OpenTelemetry's SDK and OTLP exporter, they are exported like those of the server.
Without these packages there is no current span, and nothing else changes.
"""

from __future__ import annotations

import json
from typing import Any

_provider: Any = None


def start(options: dict[str, Any] | None) -> None:
    """Begins to export the model's spans. `options` come from the server; None unless its trace mode is opentelemetry."""
    global _provider
    if options is None:
        return
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
    except ImportError:
        return
    processor = BatchSpanProcessor(
        OTLPSpanExporter(endpoint=options["url"]),
        max_queue_size=options["max_queue_size"],
        schedule_delay_millis=options["schedule_delay_ms"],
        max_export_batch_size=options["max_export_batch_size"],
    )
    _provider = TracerProvider(
        sampler=ParentBased(ALWAYS_OFF),
        resource=Resource.create(options["attributes"]),
        shutdown_on_exit=False,
    )
    _provider.add_span_processor(processor)
    trace.set_tracer_provider(_provider)


def stop() -> None:
    """Exports the spans that still wait."""
    if _provider is not None:
        _provider.shutdown()


def enter(contexts: list[str | None]) -> Any:
    """Makes the span of the first traced request the current one; returns the token for leave()."""
    found = next((context for context in contexts if context is not None), None)
    if found is None:
        return None
    try:
        from opentelemetry import context, trace
    except ImportError:
        return None
    carrier = json.loads(found)
    _, trace_id, span_id, flags = carrier["traceparent"].split("-")
    state = trace.TraceState.from_header([carrier.get("tracestate", "")])
    span = trace.NonRecordingSpan(
        trace.SpanContext(int(trace_id, 16), int(span_id, 16), True, trace.TraceFlags(int(flags, 16)), state)
    )
    return context.attach(trace.set_span_in_context(span))


def leave(token: Any) -> None:
    """Undoes enter() when the model has executed."""
    if token is not None:
        from opentelemetry import context

        context.detach(token)
