"""REST over HTTP/2: a connection whose streams are HTTP requests.

The life of the connection is transport/http2/connection.py's; what happens to a request that is not plain
(cext/transport/rest/http2_stream) is transport/rest/exchange.py's.

Rules:
 1. A request must be complete within the request timeout plus the time that its bytes take at MIN_BYTES_PER_SECOND; else it is
    answered 408. A connection without requests is ended after the keep-alive timeout, the first must come within the request
    timeout, whatever frames come meanwhile.
 2. A client must take each 64 KiB of an answer that waits within the request timeout, or its stream is reset.
 3. A frame, and the headers of a request, must be whole within the request timeout after the first check that sees a part.
 4. A connection whose client leaves more than HELD bytes of answers unread refuses new requests (REFUSED_STREAM).
 5. A connection beyond the limit on connections is answered probes, and 503 otherwise, and ended within seconds.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import trio

from neptrio.codec.compression import too_large
from neptrio.errors import TritonError
from neptrio.limits import MAX_HEAD_BYTES, MIN_BYTES_PER_SECOND
from neptrio.request.infer_request import InferRequest, Protocol
from neptrio.service import Services
from neptrio.service.connections import TurnedAway
from neptrio.transport.host_header import host_problem
from neptrio.transport.http2.connection import ConnectionTimes, Http2Connection
from neptrio.transport.http2.limits import HEADERS_TOO_LARGE, INTERNAL_ERROR, REST, FloodBudget, PingPolicy
from neptrio.transport.http2.session import Http2Session, session_class
from neptrio.transport.rest import routes
from neptrio.transport.rest.exchange import HIGH_WATER, Carrier, HttpExchange, always_answered, most_body
from neptrio.transport.rest.head import HeadTooLarge, RequestHead
from neptrio.transport.rest.http2_stream import RestHttp2Core, RestStream
from neptrio.transport.rest.infer import JSON, Headers, error_body
from neptrio.transport.rest.port import Port
from neptrio.transport.wire import Wire

log = logging.getLogger("neptrio.rest")

LAST_NS = 5 * 10**9  # when the server stops: how long the last answers may take to be read
OF_HTTP_1 = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
EMPTY: Headers = []
TOO_LATE = TritonError("the request did not arrive in time")
TOO_LARGE_HEAD = TritonError(f"request headers exceed the limit of {MAX_HEAD_BYTES} bytes")


class Http2Exchange(HttpExchange):
    """A request that is not plain, and its answer."""

    connection: RestHttp2Connection

    def __init__(self, connection: RestHttp2Connection, stream: RestStream) -> None:
        """Raises HeadTooLarge, and TritonError for a head that is malformed."""
        self.protocol = Protocol.HTTP_PROTOCOL
        self.complete = False
        self.access = stream.access
        self._stream = stream
        self._moved: trio.Event | None = None
        self.head = head = RequestHead()
        head.clear()
        method = path = ""
        authority = None
        for name, value in stream.headers():
            if name == b":method":
                method = value.decode("latin-1")
            elif name == b":path":
                path = value.decode("latin-1")
            elif name == b":authority":
                authority = value
            elif not name.startswith(b":"):
                head.add(name, value)
        if authority is not None and head.get(b"host") != authority:
            head.add(b"host", authority)
        head.receive_start = stream.began_ns
        super().__init__(connection, method, path, "2")

    @property
    def gone(self) -> bool:
        return self._stream.ended

    @property
    def unread(self) -> bool:
        return self._stream.ended or self.connection.writer.broken

    def hold(self, size: int) -> None:
        self._stream.serve(size)

    def waits_for_kernel(self, request: InferRequest, callback: Callable[[], None], stage: int) -> bool:
        return self.connection.writer.when_taken(callback) if stage else self._stream.when_taken(callback)

    # ------------------------------------------------------------ input

    def on_body(self, body: Any) -> None:
        """The request is whole."""
        if not self.complete and not self._stream.ended:
            self.dispatch(self.head, body)

    def on_too_large(self, limit: int) -> None:
        """The body is larger than it may be."""
        self.refuse(too_large(limit, limit == self.connection.max_body))

    # ------------------------------------------------------------ the answer

    def _begin(self, status: int, headers: Headers) -> None:
        stream = self._stream
        stream.refused = True  # what still comes of the request is dropped
        stream.reply_headers = [
            (b":status", b"%d" % status),
            *((name, value) for name, value in headers if name not in OF_HTTP_1),
        ]

    def reply(self, status: int, headers: Headers, body: list[Any]) -> None:
        if self.complete:
            return
        self.complete = True
        size = sum(memoryview(part).nbytes for part in body)
        self._begin(status, [*headers, *self.extra, (b"content-length", b"%d" % size)])
        self._stream.served(self._stream.serving)
        self._stream.reply([] if self.method == "HEAD" else body, [])
        self.connection.want_flush()

    def start(self, status: int, headers: Headers) -> None:
        self._begin(status, headers)
        if not any(name == b"content-length" for name, _ in headers):
            self._stream.send_segments([])  # the client sees that an answer comes
            self.connection.want_flush()

    def write(self, data: Any) -> None:
        self._stream.send_segments([data])
        self.connection.want_flush()

    def finish(self) -> None:
        if self.complete:
            return
        self.complete = True
        self._stream.served(self._stream.serving)
        if self._stream.reply_headers is None:
            self._reset()  # nobody waits for an answer
        else:
            self._stream.finish([])
            self.connection.want_flush()

    def break_off(self) -> None:
        self.complete = True
        self._reset()

    def _reset(self) -> None:
        if not self._stream.ended:
            self.connection.session.reset(self._stream, INTERNAL_ERROR)
            self.connection.want_flush()

    async def writable(self) -> None:
        stream = self._stream
        while stream.out_bytes > HIGH_WATER and not self.unread:
            self._moved = trio.Event()
            await self._moved.wait()

    def on_writable(self) -> None:
        """All of the answer so far was sent."""
        if self._moved is not None:
            self._moved.set()

    def disconnect(self, services: Services) -> None:
        self.on_writable()
        super().disconnect(services)


class RestHttp2Connection(Carrier, Http2Connection, RestHttp2Core):
    """One HTTP/2 connection of the REST port."""

    unread_always = True

    def __init__(self, wire: Wire, port: Port, turned_away: str = "", prefix: bytes = b"") -> None:
        """`turned_away`: why there is no room for it. `prefix` was read from it already."""
        super().__init__(wire, port.services, ConnectionTimes(), turned_away, prefix)
        self.port = port
        self.access = port.access
        self.budget = self.session.account.budget = port.services.held
        self.max_body = port.max_body
        self.input_limit = self.output_limit = sys.maxsize
        self.fast_path = (
            port.policy is None and port.plain_tokens and not turned_away and not port.origins.cors
        )
        self._idle_since = self._begun_ns = self.now()
        self._answered_ns = 0  # since when nothing is to be answered, while the server stops
        self._begun = 0  # frames that had begun at the last check

    def new_session(self) -> Http2Session:
        return session_class()(
            self.open_stream, FloodBudget(PingPolicy(max_strikes=0)), limits=REST, totals=self.totals
        )

    # ------------------------------------------------------------ requests

    def begin_exchange(self, stream: RestStream) -> None:
        if stream.headers.problem == HEADERS_TOO_LARGE:
            self.reply_error(stream, TOO_LARGE_HEAD, status=431)
            return
        try:
            exchange = Http2Exchange(self, stream)
        except HeadTooLarge:
            self.reply_error(stream, TOO_LARGE_HEAD, status=431)
            return
        except TritonError as error:
            self.reply_error(stream, error)
            return
        stream.exchange = exchange
        head = exchange.head
        problem = host_problem(head.get(b"host"), head.hosts, "2")
        if problem is not None:
            exchange.refuse(problem)
            return
        if self.turned_away:
            route = routes.match(exchange.method, exchange.path)
            if not always_answered(self, head, exchange.method, route):
                self._at("turned away", 0, self.start_drain)
                exchange.refuse(TurnedAway(self.turned_away))
                return
        if not stream.input_ended and not stream.have:
            length = head.content_length
            stream.expect(length, most_body(self.max_body, exchange.method, exchange.path, length))

    # ------------------------------------------------------------ answers of plain requests

    def reply_error(
        self, stream: RestStream, error: TritonError, headers: Headers = EMPTY, status: int = 0
    ) -> None:
        body = b"".join(error_body(error))
        given = [*JSON, *error.headers, *headers, (b"content-length", b"%d" % len(body))]
        stream.refused = True
        stream.reply_headers = [(b":status", b"%d" % (status or error.code.http)), *given]
        stream.reply([body], [])
        self.want_flush()

    # ------------------------------------------------------------ time

    def check(
        self, now_ns: int, request_timeout_ns: int, idle_timeout_ns: int, pressed: bool = False
    ) -> None:
        """Ends what does not come, is not read, or was idle for too long (rules 1 and 2). Called regularly; `idle_timeout_ns`
        0 means for ever. `pressed`: others wait for a place."""
        if self.closing:
            return
        self.check_unread(now_ns, request_timeout_ns)
        if not self.session.partial or self.session.begun != self._begun:
            self._begun = self.session.begun
            self._begun_ns = now_ns
        elif now_ns - self._begun_ns > request_timeout_ns:
            self.abort("a frame did not arrive in time")
            return
        streams: list[RestStream] = self.streams()
        if streams:
            self._idle_since = now_ns
            for stream in streams:
                if stream.input_ended or stream.refused or stream.trailers is not None:
                    continue
                earned = stream.have * 10**9 // MIN_BYTES_PER_SECOND
                if now_ns - stream.began_ns > request_timeout_ns + earned:
                    self._too_late(stream)
            self.loop_pass.end()
            return
        idle = now_ns - self._idle_since
        begun = self.session.last_stream > 0
        if begun and not idle_timeout_ns:
            return
        if idle > (idle_timeout_ns if begun or pressed else request_timeout_ns):
            if self.speaking and not self.draining:
                self.start_drain()
            elif idle > 2 * request_timeout_ns:
                self.close()

    def end_answered(self, now_ns: int) -> None:
        """The server stops: ends a connection whose requests have all been answered for LAST_NS, whatever of the answers its
        client has left unread. Called regularly."""
        if not self._answered_ns or any(stream.trailers is None for stream in self.streams()):
            self._answered_ns = now_ns
        elif now_ns - self._answered_ns > LAST_NS:
            self.close()

    def _too_late(self, stream: RestStream) -> None:
        if stream.exchange is None:
            self.reply_error(stream, TOO_LATE, status=408)
        else:
            stream.exchange.refuse(TOO_LATE, 408)
