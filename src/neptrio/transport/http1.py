"""The lean HTTP/1.1 connection: llhttp parses, infer requests are answered without a task.

The problem: hypercorn's own HTTP/1.1 (h11) costs about 400 us a request. The choice: plain
connections are parsed by httptools; an infer request goes from the parser's callback straight to
the inference service, and its answer is written from the completion. Every other route is the
same ASGI app that hypercorn serves, run in a task of its own.

Rules:
 1. Answers leave in the order of the requests (pipelining): an exchange writes only while it is
    the oldest; later ones keep their answer until then.
 2. A connection that ends cancels every exchange it still owes an answer.
 3. A malformed request gets 400 where an answer is still possible, then the connection closes.
 4. Whatever a connection raises ends at that connection.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from typing import Any

import httptools
import trio

from neptrio._cext.request import InferRequest, InferResponse, Responder
from neptrio.codec.json_infer import dump_json
from neptrio.errors import TritonError
from neptrio.service import Services
from neptrio.transport import routes
from neptrio.transport.app import RestApp
from neptrio.transport.http_infer import JSON, HttpInfer, error_body
from neptrio.transport.link import Link

log = logging.getLogger("neptrio.http1")

REASONS = {
    100: b"Continue",
    200: b"OK",
    400: b"Bad Request",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Not Allowed",
    408: b"Request Timeout",
    413: b"Payload Too Large",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    503: b"Service Unavailable",
}
RECEIVE_BYTES = 256 << 10


class Exchange(Responder):
    """One request and its answer on a connection."""

    def __init__(
        self, connection: Http1Connection, method: str, path: str, version: str, keep_alive: bool
    ) -> None:
        self.connection = connection
        self.method = method
        self.path = path
        self.version = version
        self.keep_alive = keep_alive
        self.infer: HttpInfer | None = None
        self.output: list[Any] = []
        self.complete = False
        self.disconnected = trio.Event()

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        assert self.infer is not None
        try:
            status, headers, body = self.infer.encode(response)
        except Exception as error:
            log.exception("encoding a response failed")
            status, headers, body = 500, JSON, error_body(TritonError(f"internal error: {error}"))
        self.reply(status, headers, body)

    def head(self, status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
        """The status line and headers, with the connection's own added."""
        lines = [b"HTTP/%s %d %s" % (self.version.encode(), status, REASONS.get(status, b"Unknown"))]
        lines += [b"%s: %s" % (name.title(), value) for name, value in headers]
        if not self.keep_alive:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def reply(self, status: int, headers: list[tuple[bytes, bytes]], body: list[Any]) -> None:
        """The whole answer."""
        length = sum(len(memoryview(part)) for part in body)
        head = self.head(status, [*headers, (b"content-length", b"%d" % length)])
        if self.method == "HEAD":
            body = []
        if len(body) == 1 and length < 16384:
            self.write([head + body[0]] if isinstance(body[0], bytes) else [head, body[0]])
        else:
            self.write([head, *body])
        self.finish()

    def write(self, buffers: list[Any]) -> None:
        """Part of the answer; held back until it is this exchange's turn."""
        self.output += buffers
        self.connection.advance()

    def finish(self) -> None:
        """Nothing more will be written."""
        self.complete = True
        self.connection.advance()


class Http1Connection:
    """Reads requests from a socket and answers them in order."""

    def __init__(self, sock: socket.socket, services: Services, app: RestApp, nursery: trio.Nursery) -> None:
        self.sock = sock
        self.services = services
        self.app = app
        self.closing = False
        self._nursery = nursery
        self._turn = services.loop.turn
        self._link = Link(sock, nursery)
        self._exchanges: deque[Exchange] = deque()
        self._ready: list[Any] = []
        self._scope = trio.CancelScope()
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._body_size = 0

    # ------------------------------------------------------------ parser callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._body = []
        self._body_size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        for name, value in self._headers:
            if name == b"expect" and value.lower() == b"100-continue":
                self._link.send([b"HTTP/1.1 100 Continue\r\n\r\n"])

    def on_body(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._body_size > self.services.settings.http_max_input_size:
            raise OverflowError("body too large")
        self._body.append(data)

    def on_message_complete(self) -> None:
        body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
        exchange = Exchange(
            self,
            self._parser.get_method().decode("latin-1"),
            self._url.decode("latin-1"),
            self._parser.get_http_version(),
            self._parser.should_keep_alive(),
        )
        self._exchanges.append(exchange)
        route = routes.match(exchange.method, exchange.path)
        if route is not None and route.verb == "infer" and route.allowed:
            try:
                exchange.infer = HttpInfer(self.services, route, self._headers)
                exchange.infer.submit(body, exchange)
            except TritonError as error:
                exchange.reply(error.code.http, JSON, error_body(error))
            return
        self._nursery.start_soon(self._run_app, exchange, self._headers, body)

    # ------------------------------------------------------------ the ASGI side

    async def _run_app(self, exchange: Exchange, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": exchange.version,
            "method": exchange.method,
            "scheme": "http",
            "path": exchange.path.partition("?")[0],
            "raw_path": exchange.path.encode("latin-1"),
            "query_string": exchange.path.partition("?")[2].encode("latin-1"),
            "headers": headers,
        }
        sent_body = False
        chunked = False

        async def receive() -> dict[str, Any]:
            nonlocal sent_body
            if not sent_body:
                sent_body = True
                return {"type": "http.request", "body": body, "more_body": False}
            await exchange.disconnected.wait()
            return {"type": "http.disconnect"}

        async def send(event: dict[str, Any]) -> None:
            nonlocal chunked
            if event["type"] == "http.response.start":
                headers = list(event["headers"])
                chunked = not any(name == b"content-length" for name, _ in headers)
                if chunked:
                    headers.append((b"transfer-encoding", b"chunked"))
                exchange.write([exchange.head(event["status"], headers)])
                return
            data = event.get("body", b"")
            if data:
                exchange.write([b"%x\r\n" % len(data), data, b"\r\n"] if chunked else [data])
            if not event.get("more_body", False):
                if chunked:
                    exchange.write([b"0\r\n\r\n"])
                exchange.finish()
            self._turn.end()
            while self._link.congested and not self._link.broken:
                await self._link.drained()

        try:
            await self.app(scope, receive, send)
        except Exception:
            log.exception("%s %s failed", exchange.method, exchange.path)
            self._scope.cancel()
        if not exchange.complete:
            self._scope.cancel()

    # ------------------------------------------------------------ output

    def advance(self) -> None:
        """Moves what the oldest exchanges have written to the output."""
        exchanges = self._exchanges
        while exchanges:
            first = exchanges[0]
            if first.output:
                self._ready += first.output
                first.output = []
            if not first.complete:
                break
            exchanges.popleft()
            if not first.keep_alive:
                self.closing = True
        if self._ready:
            self._turn.want_flush(self)

    def flush(self) -> None:
        """Sends what is ready; called by the turn."""
        ready, self._ready = self._ready, []
        self._link.send(ready)
        if self.closing and not self._exchanges:
            self._scope.cancel()

    def drain(self) -> None:
        """No further request: closes once everything owed has been answered."""
        self.closing = True
        for exchange in self._exchanges:
            exchange.keep_alive = False
        if not self._exchanges:
            self._scope.cancel()

    # ------------------------------------------------------------ input

    async def run(self) -> None:
        """Serves the connection until either side ends it."""
        buffer = bytearray(RECEIVE_BYTES)
        view = memoryview(buffer)
        sock = self.sock
        try:
            with self._scope:
                while not self.closing and not self._link.broken:
                    await trio.lowlevel.wait_readable(sock)
                    try:
                        n = sock.recv_into(buffer)
                    except (BlockingIOError, InterruptedError):
                        continue
                    if n == 0:
                        break
                    try:
                        self._parser.feed_data(view[:n])
                    except httptools.HttpParserUpgrade:
                        break
                    except httptools.HttpParserCallbackError as error:
                        self._refuse(error)
                    except httptools.HttpParserError:
                        break
                    self._turn.end()
                if self._exchanges:
                    await trio.sleep_forever()
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            for exchange in self._exchanges:
                exchange.disconnected.set()
                if exchange.infer is not None:
                    self.services.inference.cancel(exchange.infer.request)
            with trio.move_on_after(5) as scope:
                scope.shield = True
                await self._link.drained()
            self._link.fail()
            sock.close()

    def _refuse(self, error: BaseException) -> None:
        cause = error.__context__ or error
        status = 413 if isinstance(cause, OverflowError) else 400
        if status == 400:
            log.exception("a request failed in the parser", exc_info=cause)
        exchange = Exchange(self, "POST", "", "1.1", False)
        self._exchanges.append(exchange)
        limit = self.services.settings.http_max_input_size
        text = (
            f"request body exceeds the limit of {limit} bytes (--http-max-input-size)"
            if status == 413
            else str(cause)
        )
        exchange.reply(status, JSON, [dump_json({"error": text})])
        self.closing = True
