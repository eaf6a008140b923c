"""One HTTP/1.1 request that came through the parser: its way to the scheduler, and its answer.

An exchange may write only while it is the oldest of its connection; until then its output is kept.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import trio

from neptrio.errors import Cancelled, Internal, TritonError, raise_it
from neptrio.observe.propagation import asked
from neptrio.observe.timing import wish
from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.service import Services
from neptrio.service.audit import REFUSED
from neptrio.transport.http1.fast_path import JOIN_BYTES, ExchangeCore
from neptrio.transport.rest.infer import JSON, Headers, HttpInfer, error_body
from neptrio.transport.rest.routes import Route

if TYPE_CHECKING:
    from neptrio.transport.http1.connection import Http1Connection

log = logging.getLogger("neptrio.http1")

REASONS = {
    200: b"OK",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Not Allowed",
    408: b"Request Timeout",
    413: b"Payload Too Large",
    415: b"Unsupported Media Type",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}
STATUS = {
    (version, status): b"HTTP/%s %d %s\r\n" % (version.encode(), status, reason)
    for version in ("1.0", "1.1")
    for status, reason in REASONS.items()
}
NAMES = {
    name.lower(): name
    for name in (
        b"Content-Type",
        b"Content-Length",
        b"Content-Encoding",
        b"Inference-Header-Content-Length",
        b"Transfer-Encoding",
        b"Accept-Encoding",
    )
}


class Exchange(ExchangeCore):
    """One request that came through the parser, and its answer."""

    connection: Http1Connection

    def __init__(
        self, connection: Http1Connection, method: str, path: str, version: str, keep_alive: bool
    ) -> None:
        self.connection = connection
        self.method = method
        self.path = path
        self.version = version
        self.keep_alive = keep_alive
        self.infer: HttpInfer | None = None
        self.extra: Headers = []  # headers of the answer in addition to the usual ones
        self._working: trio.CancelScope | None = None
        self._disconnected: trio.Event | None = None

    @property
    def disconnected(self) -> trio.Event:
        """Set once the peer is gone."""
        if self._disconnected is None:
            self._disconnected = trio.Event()
            if self.connection.ended:
                self._disconnected.set()
        return self._disconnected

    @property
    def client(self) -> str:
        """The client's address."""
        return self.connection.client

    def disconnect(self, services: Services) -> None:
        """The peer is gone: cancels the request and tells the app."""
        if self._disconnected is not None:
            self._disconnected.set()
        if self._working is not None:
            self._working.cancel()
        elif self.infer is not None and not self.complete:
            services.admission.cancel(self.infer.request)

    def submit(self, route: Route, body: Any) -> None:
        """Submits a complete infer request to admission, or refuses it."""
        connection = self.connection
        policy = connection.policy
        try:
            origins = connection.origins
            if origins.cors:
                self.extra = origins.answer_headers(connection.origin)
            raise_it(origins.problem(self.method, connection.host, connection.origin, connection.fetch_site))
            owner = forwarded = None
            if policy is not None:
                owner = policy.check("infer", connection.headers, route.model)
                forwarded = policy.forwarded(connection.headers)
            infer = HttpInfer(
                connection.services,
                route,
                connection.header_length,
                connection.content_encoding,
                connection.accept_encoding,
            )
            infer.request.owner = owner
            infer.forwarded = forwarded
            self.infer = infer
            infer.whose = connection
            if connection.services.admission.tracer.trace_headers:
                infer.request.asked = asked(connection.headers)
            if connection.timing is not None:
                infer.request.timing = wish(connection.timing)
            plain = infer.plain(body)
            if plain is None or infer.is_large(plain):
                self._working = trio.CancelScope()
                connection.pause()
                connection.nursery.start_soon(self._submit_later, infer, plain, connection.receive_start)
            else:
                infer.submit(plain, self, connection.receive_start)
        except TritonError as error:
            audit = connection.services.audit
            if audit is not None and error.code in REFUSED:
                who = "" if policy is None else policy.who(connection.headers)
                audit.record("infer", "http", connection.client, who, model=route.model, error=error)
            self.refuse(error)
        except Exception as error:
            self._fail(error)

    async def _submit_later(self, infer: HttpInfer, body: Any, receive_start: int) -> None:
        """submit() with the slow part on worker threads: inflates (when `body` is None) or decodes a large body.

        Later requests of the connection wait meanwhile: they must not overtake this one, and a client may use only one
        worker per connection. When the peer leaves, the work ends.
        """
        connection = self.connection
        assert self._working is not None
        binary: bool | None = None
        try:
            with self._working:
                if body is None:
                    body = await infer.inflate_later()
                    self.held += infer.inflated
                    connection.held += infer.inflated
                if infer.is_large(body):
                    binary = await infer.decode_later(body, receive_start)
            if self._working.cancelled_caught:
                raise Cancelled
            self._working = None
            if binary is None:
                infer.submit(body, self, receive_start)
            else:
                infer.submit_decoded(binary, self)
            if connection.ended:
                self.disconnect(connection.services)
        except TritonError as error:
            self.refuse(error)
        except Exception as error:
            self._fail(error)
        finally:
            connection.resume()
        connection.loop_pass.end()

    def _fail(self, error: Exception) -> None:
        """Answers a request that failed with an unexpected exception; called in its except block."""
        log.exception("%s %s failed", self.method, self.path)
        self.refuse(Internal(f"internal error: {type(error).__name__}"))

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if not final:
            log.error("model '%s' sent more than one response to an HTTP request", request.model_name)
            return
        infer = self.infer
        assert infer is not None
        self.infer = None  # breaks the cycle of request and exchange, so that both are freed at once
        infer.give_back()
        answer = infer.encode(response, later=True)
        if answer is not None:
            self._reply_with(infer, *answer)
            return
        self._working = trio.CancelScope()
        self.connection.pause()
        if request.trace is not None:
            request.trace.hold()
        self.connection.nursery.start_soon(self._encode_later, infer, response)

    async def _encode_later(self, infer: HttpInfer, response: InferResponse) -> None:
        """Answers with JSON that a worker prints, for as long as there is a peer."""
        connection = self.connection
        assert self._working is not None
        gone = True
        try:
            with self._working:
                answer = await infer.encode_later(response)
            if self._working.cancelled_caught:
                self.finish()
            else:
                gone = False
                self._reply_with(infer, *answer)
        finally:
            connection.resume()
            go_on(infer.request, gone)
        connection.loop_pass.end()

    def _reply_with(self, infer: HttpInfer, status: int, headers: Headers, body: list[Any]) -> None:
        if infer.encoding:
            self._reply_later(infer, headers, body)
        else:
            self.reply(status, headers, body)

    def _reply_later(self, infer: HttpInfer, headers: Headers, body: list[Any]) -> None:
        """Answers with a body that worker threads compress; gives up when the peer leaves."""
        connection = self.connection

        async def task() -> None:
            small = None
            try:
                small = await infer.compress_later(body, lambda: connection.writer.broken)
                if small is None:
                    self.finish()
                else:
                    self.reply(200, headers, small)
            finally:
                go_on(infer.request, small is None)
            connection.loop_pass.end()

        if connection.writer.broken:
            self.finish()
        else:
            if infer.request.trace is not None:
                infer.request.trace.hold()
            connection.nursery.start_soon(task)

    def head(self, status: int, headers: Headers) -> bytes:
        """The status line and headers, with the connection's own added."""
        return head(self.version, status, headers, self.keep_alive)

    def reply(self, status: int, headers: list[tuple[bytes, bytes]], body: list[Any]) -> None:
        """Sends a whole answer."""
        if self.extra:
            headers = [*headers, *self.extra]
        self.output += answer(self.version, status, headers, body, self.keep_alive, self.method == "HEAD")
        self.complete = True
        self.connection.advance()

    def refuse(self, error: TritonError, status: int = 0, headers: Headers | None = None) -> None:
        """Answers with an error."""
        infer, self.infer = self.infer, None  # breaks their cycle, so that both are freed at once
        if infer is not None:
            infer.give_back()
        self.reply(status or error.code.http, [*JSON, *error.headers, *(headers or ())], error_body(error))

    def write(self, buffers: list[Any]) -> None:
        """Writes a part of the answer; it is kept until this exchange is the oldest."""
        self.output += buffers
        self.connection.advance()

    def finish(self) -> None:
        """The answer is complete."""
        if not self.complete:
            self.complete = True
            self.connection.advance()


def go_on(request: InferRequest, gone: bool) -> None:
    """Ends what hold() of the request's trace began; `gone`: nobody waits for the answer any more."""
    if request.trace is not None:
        if gone:
            request.trace.abandon()
        request.trace.go_on()


def head(version: str, status: int, headers: Headers, keep_alive: bool) -> bytes:
    """A status line and headers."""
    lines = [STATUS.get((version, status)) or b"HTTP/1.1 %d Unknown\r\n" % status]
    for name, value in headers:
        lines.append(b"%b: %b\r\n" % (NAMES.get(name) or name.title(), value))
    lines.append(b"\r\n" if keep_alive else b"Connection: close\r\n\r\n")
    return b"".join(lines)


def answer(
    version: str, status: int, headers: Headers, body: list[Any], keep_alive: bool, head_only: bool = False
) -> list[Any]:
    """A whole answer as a list of buffers; a small one is a single buffer."""
    length = 0
    for part in body:
        length += len(part) if type(part) is bytes else memoryview(part).nbytes
    start = head(version, status, [*headers, (b"content-length", b"%d" % length)], keep_alive)
    if head_only:
        body = []
    return [b"".join((start, *body))] if length <= JOIN_BYTES else [start, *body]
