"""An OTLP/HTTP receiver: accepts what an exporter posts and decodes the protobuf."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Listens on a free port. Spans are to be sent to `url`; `spans` are those that have arrived. While `answers` is not set
    nobody gets an answer."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resources: list[dict[str, Any]] = []
        self.status = 200
        self.answers = threading.Event()
        self.answers.set()
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                collector.answers.wait()
                if collector.status == 200:
                    collector._take(ExportTraceServiceRequest.FromString(body))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(collector.status)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def _take(self, request: ExportTraceServiceRequest) -> None:
        with self._changed:
            for resource in request.resource_spans:
                self.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self._changed.notify_all()

    def wait(self, enough: Callable[[list[Span]], bool]) -> list[Span]:
        """Waits until `enough(spans)` is true; returns the spans."""
        with self._changed:
            assert self._changed.wait_for(lambda: enough(self.spans), 60), [s.name for s in self.spans]
            return list(self.spans)

    def trace(self, trace_id: int, count: int) -> dict[str, Span]:
        """Waits for `count` spans of a trace; returns them by name. A second span of a name is NAME+."""
        wanted = trace_id.to_bytes(16)

        def found(spans: list[Span]) -> list[Span]:
            return [span for span in spans if span.trace_id == wanted]

        made: dict[str, Span] = {}
        for span in found(self.wait(lambda spans: len(found(spans)) >= count)):
            name = span.name
            while name in made:
                name += "+"
            made[name] = span
        assert len(made) == count, sorted(made)
        return made

    def close(self) -> None:
        self.answers.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span, an event or a resource."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in holder.attributes}


def events(span: Span) -> list[str]:
    """The names of a span's events; checks that their times are in order and within the span's."""
    times = [event.time_unix_nano for event in span.events]
    assert times == sorted(times)
    assert not times or span.start_time_unix_nano <= times[0] <= times[-1] <= span.end_time_unix_nano
    return [event.name for event in span.events]
