"""The lean HTTP/1.1 connection: llhttp parses, infer requests are answered without a task.

The problem: hypercorn's own HTTP/1.1 (h11) costs about 400 us a request. The choice: plain
connections are parsed by httptools; an infer request goes from the parser's callback straight to
the inference service, and its answer is written from the completion. Every other route is the
same ASGI app that hypercorn serves, run in a task of its own. Infer requests of the plainest form
do not even meet the parser: cext/http1_lane.

A body that did not arrive with its head, and whose length is announced, does not go through the
parser: it is received straight into one buffer of that length, and tensors are views of it.

Rules:
 1. Answers leave in the order of the requests (pipelining): an exchange writes only while it is
    the oldest; later ones keep their answer until then.
 2. A peer that ends its side cancels every exchange it is still owed (how a connection ends:
    http1_ending).
 3. A malformed request gets 400, 408, 413 or 431 where an answer is still possible, then the
    connection closes; nothing behind it is looked at.
 4. Whatever a connection raises ends at that connection.
 5. Memory is bounded: heads by the head limit, bodies by --http-max-input-size, exchanges by
    MAX_EXCHANGES and the bytes they hold; a peer that does not read is not read from.
 6. Time is bounded: a request must be complete within the request timeout plus what its bytes
    earn it at MIN_BYTES_PER_SECOND, and a peer that takes nothing of what it is owed for as long as
    the request timeout is cut off (see check()).
"""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass
from typing import Any

import httptools
import numpy as np
import trio

from neptrio._cext.http1_head import HeadTooLarge
from neptrio._cext.http1_lane import ExchangeCore, Http1Lane
from neptrio._cext.link import BUFFER, RECEIVE_BYTES, VIEW
from neptrio.codec.compression import too_large
from neptrio.codec.http_json import HEADER_LENGTH
from neptrio.errors import TritonError
from neptrio.service import Services
from neptrio.transport import routes
from neptrio.transport.header_policy import HeaderPolicy
from neptrio.transport.http1_asgi import App, run_app
from neptrio.transport.http1_ending import close, last_answers
from neptrio.transport.http1_exchange import Exchange, answer
from neptrio.transport.http_infer import BINARY, JSON, Headers, error_body
from neptrio.transport.link import Link

log = logging.getLogger("neptrio.http1")

DIRECT_BYTES = 32 << 10  # bodies with more than this to come are received into their own buffer
MAX_HEAD_BYTES = 64 << 10
FEW_BYTES = 1 << 10  # parsed at once: they cannot hold many pipelined requests
PIECE_BYTES = 4 << 10  # in which the end of a head is looked for
MIN_BYTES_PER_SECOND = 16 << 10
PREFACE = b"PRI * HTTP/2.0"


class Refusal(Exception):
    """Raised in a parser callback: answer with `error` and close."""

    def __init__(self, error: TritonError, status: int = 0) -> None:
        super().__init__(str(error))
        self.error = error
        self.status = status or error.code.http


class HandOver(Exception):
    """The peer speaks HTTP/2: `data` was read and belongs to the connection that takes over."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


@dataclass(frozen=True)
class Http1Statistics:
    """What a connection holds."""

    exchanges: int
    held_bytes: int
    pending_output: int
    receiving: bool


class Http1Connection(Http1Lane):
    """Reads requests from a socket and answers them in order."""

    expect: bytes | None  # b"wanted" while a 100 Continue is due
    closing: bool
    ended: bool
    direct: Any
    later: bytes | None
    room: trio.Event | None
    idle: trio.Event | None

    def __init__(
        self,
        sock: socket.socket,
        services: Services,
        app: App,
        nursery: trio.Nursery,
        policy: HeaderPolicy | None = None,
    ) -> None:
        link = Link(sock, nursery)
        super().__init__(sock, link, services)
        link.on_drained = self._drained
        self.app = app
        self.head_limit = MAX_HEAD_BYTES
        # headers that are forwarded or restrict are looked at by the general path
        self.lane = policy is None
        self.nursery = nursery
        self.policy = policy
        self._poller = services.loop.poller
        self._scope = trio.CancelScope()
        self._parser: Any = httptools.HttpRequestParser(self)
        self._body: Any = b""
        self._direct_at = 0
        self._received = 0  # body bytes of the message under way
        self._direct_request = ("", "", False)
        self._head_seen = 0
        self._refused = False
        self._first: bytes | None = None  # the bytes under way, while they are the connection's first

    def statistics(self) -> Http1Statistics:
        """What the connection holds now."""
        return Http1Statistics(len(self.exchanges), self.held, self.link.pending, bool(self.in_message))

    # ------------------------------------------------------------ parser callbacks

    def on_headers_complete(self) -> None:
        self.head_complete = True
        self._body = b""
        self._received = 0
        if self._first is not None and self._parser.should_upgrade() and self._asks_for_h2c():
            raise HandOver(self._first)
        if self.content_length > self.max_body:
            raise Refusal(too_large(self.max_body))
        expect = self.expect
        self.expect = None
        if (
            expect is not None
            and expect.lower() == b"100-continue"
            and self._parser.get_http_version() != "1.0"
        ):
            self.expect = b"wanted"

    def on_body(self, data: bytes) -> None:
        self.expect = None
        self._received += len(data)
        if self._received > self.max_body:
            raise Refusal(too_large(self.max_body))
        if not self._body:
            self._body = data
        else:
            # chunks are gathered in one buffer: a body of one-byte chunks must not cost an object each
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        self.in_message = False
        body, self._body = self._body, b""
        parser = self._parser
        self._request(
            parser.get_method().decode("latin-1"), parser.get_http_version(), parser.should_keep_alive(), body
        )

    def _request(self, method: str, version: str, keep_alive: bool, body: Any) -> None:
        """A complete request."""
        if self.closing:
            return
        self.requests += 1
        keep_alive = keep_alive and version == "1.1"
        exchange = Exchange(self, method, self.url.decode("latin-1"), version, keep_alive)
        if not keep_alive:
            self.closing = True
        exchange.held = len(body)
        self.held += exchange.held
        self.exchanges.append(exchange)
        route = routes.match(method, exchange.path)
        if route is not None and route.verb == "infer" and route.allowed:
            exchange.submit(route, body)
            return
        if isinstance(body, np.ndarray):
            body = memoryview(body)  # type: ignore[arg-type]
        self.nursery.start_soon(run_app, self.app, exchange, self.headers, body, self.policy is not None)

    # ------------------------------------------------------------ output

    def over(self) -> None:
        """Everything owed has been sent, or cannot be."""
        self._scope.cancel()

    def reply_error(self, exchange: ExchangeCore, error: TritonError, headers: Headers) -> None:
        """Gives an exchange of the lane an error for its answer."""
        answers = error.answers if not headers else None
        output = answers.get(exchange.keep_alive) if answers is not None else None
        if output is None:
            output = answer("1.1", error.code.http, [*JSON, *headers], error_body(error), exchange.keep_alive)
            if answers is not None:
                answers[exchange.keep_alive] = output
        exchange.output = list(output)

    def reply_with(
        self, exchange: ExchangeCore, extra: Headers, text: bytes, blobs: list[Any] | None
    ) -> None:
        """Gives an exchange of the lane its answer, with headers that are not on every answer."""
        headers = [*JSON, *extra]
        if blobs:
            headers = [BINARY, (HEADER_LENGTH, b"%d" % len(text)), *extra]
        exchange.output = answer("1.1", 200, headers, [text, *(blobs or ())], exchange.keep_alive)

    def _drained(self) -> None:
        if self.link.broken:
            self._scope.cancel()
        if self.room is not None and self.has_room():
            self.room.set()

    def drain(self) -> None:
        """No further request: closes once everything owed has been answered."""
        self.closing = True
        for exchange in self.exchanges:
            exchange.keep_alive = False
        if not self.exchanges:
            self._scope.cancel()

    # ------------------------------------------------------------ time

    def check(self, now_ns: int, request_timeout_ns: int, idle_timeout_ns: int) -> None:
        """Ends a connection whose request does not come, whose peer does not read, or that has been
        idle for too long.

        Called now and then with the time; `idle_timeout_ns` 0 means for ever.
        """
        if self.link.stalled(now_ns, request_timeout_ns):
            self.link.fail()  # whoever waits for room hears of it; what is owed is cancelled
            self.over()
            return
        if self.exchanges or self.closing:
            return
        if self.in_message:
            earned = self._received * 1_000_000_000 // MIN_BYTES_PER_SECOND
            if now_ns - self.receive_start > request_timeout_ns + earned:
                self._refuse(TritonError("the request did not arrive in time"), 408)
                self.turn.end()
        elif self.requests == 0:
            if now_ns - self.since_ns > request_timeout_ns:
                self._scope.cancel()
        elif idle_timeout_ns and now_ns - self.since_ns > idle_timeout_ns:
            self._scope.cancel()

    # ------------------------------------------------------------ input

    async def run(self) -> None:
        """Serves the connection until either side ends it. Raises HandOver for HTTP/2."""
        hand_over: HandOver | None = None
        try:
            with self._scope:
                self._first = await self._first_bytes()
                self.pass_on(self._first)
                self._first = None
                self.turn.end()
                while not self.closing and not self.ended:
                    if not self.has_room():
                        self.room = trio.Event()
                        await self.room.wait()
                        self.room = None
                        continue
                    if self.later is not None:
                        data, self.later = self.later, None
                        self.pass_on(data)
                        self.turn.end()
                        continue
                    await self._poller.read(self.sock, self.take)
                await last_answers(self)
        except HandOver as signal:
            hand_over = signal
            raise
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            if hand_over is None:
                await close(self, linger=self._refused)
                self._parser = None

    async def _first_bytes(self) -> bytes:
        """What comes first, decided between HTTP/1 and HTTP/2. Empty when the peer left."""
        first = b""
        while True:
            await trio.lowlevel.wait_readable(self.sock)
            try:
                n = self.sock.recv_into(BUFFER)
            except (BlockingIOError, InterruptedError):
                continue
            if n == 0:
                self.ended = True
                return b""
            first += bytes(VIEW[:n])
            if first.startswith(PREFACE):
                raise HandOver(first)
            if not PREFACE.startswith(first):
                return first

    def receive_direct(self) -> None:
        buffer, at = self.direct, self._direct_at
        length = len(buffer)
        try:
            for _ in range(16):  # then the other connections have their turn
                n = self.sock.recv_into(buffer[at:])
                if n == 0:
                    self.end_of_input()
                    return
                self._direct_at = self._received = at = at + n
                if at == length:
                    break
        except (BlockingIOError, InterruptedError):
            return
        if at == length:
            method, version, keep_alive = self._direct_request
            self.direct = None
            self.in_message = False
            self._parser = httptools.HttpRequestParser(self)
            self._request(method, version, keep_alive, buffer)

    def feed(self, data: Any) -> None:
        """Parses bytes as far as there is room for the requests in them; the rest waits in `later`."""
        at, size = 0, len(data)
        while at < size and not self.closing:
            if not self.has_room():
                self.later = bytes(data[at:])
                return
            end = at + self._piece(data, at)
            self._parse(data[at:end] if end - at < size else data)
            at = end
        if size and not self.closing:
            self._parsed(size)

    def _piece(self, data: Any, at: int) -> int:
        """How much to parse before the next look for room: a head or a body, of many bytes."""
        left = len(data) - at
        if left <= FEW_BYTES:
            return left
        if not self.in_message or not self.head_complete:
            end = bytes(data[at : at + PIECE_BYTES]).find(b"\r\n\r\n")
            return end + 4 if end >= 0 else min(left, PIECE_BYTES)
        if self.chunked:
            return min(left, PIECE_BYTES)
        return min(left, max(self.content_length - self._received, 1))

    def _parse(self, data: Any) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # the request was answered like any other; what follows it is HTTP/1.1 still
            if self._parser.get_method() == b"CONNECT":
                self.closing = True
            else:
                self._parse(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            self._parser_refused(error.__context__ or error)
            return
        except httptools.HttpParserInvalidMethodError:
            self._refuse(TritonError("Method Not Allowed"), 405)
            return
        except httptools.HttpParserError as error:
            self._refuse(TritonError(f"malformed HTTP request: {error}"))

    def _parsed(self, size: int) -> None:
        """Looks at what is under way once `size` received bytes have been parsed."""
        if not self.in_message:
            self._head_seen = 0
            return
        if not self.head_complete:
            # a header that does not end is not seen by the callbacks
            self._head_seen += size
            if self._head_seen > RECEIVE_BYTES + MAX_HEAD_BYTES:
                self._head_too_large()
            return
        self._head_seen = 0
        if self.expect == b"wanted":
            self.expect = None
            if not self.exchanges:
                self.link.send([b"HTTP/1.1 100 Continue\r\n\r\n"])
        if not self.chunked and self.content_length - self._received > DIRECT_BYTES and not self.closing:
            self._begin_direct()

    def _parser_refused(self, cause: BaseException) -> None:
        if isinstance(cause, HandOver):
            raise cause
        if isinstance(cause, Refusal):
            self._refuse(cause.error, cause.status)
        elif isinstance(cause, HeadTooLarge):
            self._head_too_large()
        else:
            log.error("a request failed in the parser", exc_info=cause)
            self._refuse(TritonError("malformed HTTP request"))

    def _asks_for_h2c(self) -> bool:
        headers = {name.lower(): value.lower() for name, value in self.headers}
        return (
            headers.get(b"upgrade") == b"h2c" and b"http2-settings" in headers and self.content_length <= 0
        ) and not self.chunked

    def _begin_direct(self) -> None:
        """The rest of the body goes into one buffer of its length; the parser is done with it."""
        parser = self._parser
        self._direct_request = (
            parser.get_method().decode("latin-1"),
            parser.get_http_version(),
            parser.should_keep_alive(),
        )
        # numpy does not touch the memory: pages are taken as the body arrives
        self.direct = np.empty(self.content_length, np.uint8)
        self.direct[: self._received] = np.frombuffer(self._body, np.uint8)
        self._direct_at = self._received
        self._body = b""

    def _head_too_large(self) -> None:
        text = f"request headers exceed the limit of {MAX_HEAD_BYTES} bytes"
        self._refuse(TritonError(text), 431)

    def _refuse(self, error: TritonError, status: int = 0) -> None:
        """Answers a request that will not be read to its end; the connection closes behind it."""
        if self.closing:
            return  # the last request has been seen; what follows it does not matter
        exchange = Exchange(self, "", "", "1.1", False)
        self.exchanges.append(exchange)
        self.closing = self._refused = True
        self.in_message = False
        self.direct = None
        exchange.refuse(error, status)

    def end_of_input(self) -> None:
        self.ended = True
        for exchange in list(self.exchanges):
            exchange.disconnect(self.services)
