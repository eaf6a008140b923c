"""The lean HTTP/1.1 connection: llhttp parses, infer requests are answered without a task.

The problem: hypercorn's own HTTP/1.1 (h11) costs about 400 us a request. The choice: plain
connections are parsed by httptools; an infer request goes from the parser's callback straight to
the inference service, and its answer is written from the completion. Every other route is the
same ASGI app that hypercorn serves, run in a task of its own. Infer requests of the plainest form
do not even meet the parser: cext/transport/http1/fast_path.

A body that did not arrive with its head, and whose length is announced, does not go through the
parser: it is received straight into one buffer of that length, and tensors are views of it. Where
the model has memory for them (a process of its own), binary tensors are received into that.
Rules:
 1. Answers are sent in the order of the requests (pipelining): an exchange writes only while it is the oldest; later
    ones keep their answers until then.
 2. When the peer closes its side, every request it has not been answered is cancelled (transport.http1.ending says
    how a connection ends).
 3. An upgrade that a client offers is not accepted, h2c included: the request, its body and what follows it are
    HTTP/1.1. HTTP/1.1 requests name one Host (transport.host).
 4. A malformed request gets 400, 408, 413 or 431 where an answer is still possible; then the connection is closed, and
    nothing after that request is read.
 5. Whatever a connection raises concerns that connection only.
 6. Memory is bounded: heads by the head limit, bodies by --http-max-input-size, exchanges by MAX_EXCHANGES and the
    bytes they hold; while a peer does not read its answers, its requests are not read.
 7. Time is bounded: a request must be complete within the request timeout plus the time that its bytes take at
    MIN_BYTES_PER_SECOND. A peer that takes nothing of its answers for as long as the request timeout is cut off
    (see check()).
 8. Chunked encoding wins over a Content-Length beside it, which clients send that write chunks by hand. Such a request
    is the connection's last, since a proxy in front may have used the length instead (RFC 9112, 6.1).
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
import numpy as np
import trio

from neptrio.codec.compression import too_large
from neptrio.codec.http_json import HEADER_LENGTH
from neptrio.errors import Cancelled, Internal, TritonError, Unavailable
from neptrio.loop.socket_writer import SocketWriter
from neptrio.loop.socket_writer_core import BUFFER, RECEIVE_BYTES, VIEW
from neptrio.request.infer_request import InferRequest, InferResponse, Owner, monotonic_ns
from neptrio.service import Services
from neptrio.service.connections import RETRY_AFTER, TURNED_AWAY_SECONDS
from neptrio.transport.header_policy import HeaderPolicy
from neptrio.transport.host import host_problem
from neptrio.transport.http1.asgi import App, run_app
from neptrio.transport.http1.ending import close, last_answers
from neptrio.transport.http1.exchange import Exchange, answer
from neptrio.transport.http1.fast_path import ExchangeCore, FastPathExchange, Http1FastPath
from neptrio.transport.http1.head import HeadTooLarge
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest import routes
from neptrio.transport.rest.body import SplitBody
from neptrio.transport.rest.infer import BINARY, JSON, Headers, error_body, leading_int, print_later
from neptrio.transport.rest.routes import Route

log = logging.getLogger("neptrio.http1")

DIRECT_BYTES = 32 << 10  # bodies of which more bytes are to come are received into a buffer of their own
CHUNKED_STEP = 1 << 20  # bytes of chunked bodies that are taken from the budget at once
DIRECT_READ, DIRECT_READS = 1 << 20, 1
MAX_HEAD_BYTES = 64 << 10
FEW_BYTES = 1 << 10  # bytes parsed at once: they cannot contain many pipelined requests
PIECE_BYTES = 4 << 10  # bytes parsed at a time while searching for the end of a head
MIN_BYTES_PER_SECOND = 16 << 10
PREFACE = b"PRI * HTTP/2.0"
SHUTTING_DOWN = "the server is shutting down and takes no new requests"
# by keep_alive: TritonError.alike -> the fast path's whole answer to all errors with that object
ANSWERS_OF_ALIKE: tuple[dict[object, list[Any]], dict[object, list[Any]]] = ({}, {})


class Refusal(Exception):
    """Raised in a parser callback: answer with `error` and close."""

    def __init__(self, error: TritonError, headers: Headers | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.headers = headers


class HandOver(Exception):
    """The peer speaks HTTP/2: the bytes `data` were read and must be passed to the connection that takes over."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data


@dataclass(frozen=True)
class Http1Statistics:
    """What a connection holds at the moment."""

    exchanges: int
    held_bytes: int
    pending_output: int
    receiving: bool


class Http1Connection(Http1FastPath):
    """Reads requests from a socket and answers them in order."""

    expect: bytes | None  # b"wanted" while a 100 Continue is due
    closing: bool
    draining: bool
    ended: bool
    direct: Any
    later: bytes | None
    writer: SocketWriter
    room: trio.Event | None
    idle: trio.Event | None

    def __init__(
        self,
        sock: socket.socket,
        services: Services,
        app: App,
        nursery: trio.Nursery,
        policy: HeaderPolicy | None = None,
        turned_away: str = "",
        origins: OriginPolicy | None = None,
        only_app: bool = False,
        client: str = "",
    ) -> None:
        """`turned_away`: why there is no room for this connection; it is answered that; health probes, and control verbs
        of those who may use them, are answered as usual.

        `only_app`: the app answers every request, whatever its path, and the limits of the REST port on clients and on
        the bytes of all requests do not hold; for the metrics port and the admin listener.
        `client`: the address that is counted for --max-requests-per-second-per-address and similar limits.
        """
        writer = SocketWriter(sock, nursery)
        super().__init__(sock, writer, services)
        writer.on_drained = self._drained
        self.app = app
        self.head_limit = MAX_HEAD_BYTES
        # headers that are forwarded or restrict are looked at by the general path, tokens by both
        limits = services.request_limits
        self._limits = limits if limits.on and not only_app else None
        self.asks_who = policy is not None
        plain = policy is None or policy.infers_by_token_alone()
        self.fast_path = plain and not turned_away and not only_app and self._limits is None
        self.client = client
        self._held = services.held
        self._let_in = 0  # bytes of the current message that the budget has granted
        self._only_app = only_app
        self.body_limit: Callable[[bytes], int] | None = (
            None  # of a URL's body, where `max_body` is not of all
        )
        self.counted = not only_app  # large bodies are taken from the budget of all connections
        self.draining = bool(turned_away)
        self._turned_away = turned_away
        self.origins = origins or OriginPolicy()
        self.nursery = nursery
        self.policy = policy
        self._poller = services.loop.poller
        self._scope = trio.CancelScope()
        self._parser: Any = self._new_parser()
        self._body: Any = b""
        self._direct_at = 0
        self._received = 0  # body bytes of the current message
        self._direct_request = ("", "", False)
        self._head_seen = 0
        self._refused = False
        self.watching: trio.CancelScope | None = None  # of the task that notices the peer's end
        self._offered = False  # the head under way offers an upgrade and will be parsed without it

    def statistics(self) -> Http1Statistics:
        """What the connection holds now."""
        return Http1Statistics(len(self.exchanges), self.held, self.writer.pending, bool(self.in_message))

    def open_requests(self) -> int:
        """How many requests are under way."""
        return len(self.exchanges)

    def held_bytes(self) -> int:
        """Bytes of unanswered requests, of the request being received, and of answers that were not read."""
        coming = len(self._body) if self.direct is None else len(self.direct)
        return self.held + coming + int(self.writer.pending)

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_chunked_length=True)  # rule 8
        return parser

    # ------------------------------------------------------------ parser callbacks

    def on_headers_complete(self) -> None:
        self.head_complete = True
        self._body = b""
        self._received = 0
        problem = host_problem(self.host, self.hosts, self._parser.get_http_version())
        if problem is not None:
            raise Refusal(problem)
        if self._turned_away:
            method = self._parser.get_method().decode("latin-1")
            if not self._always_answered(method, routes.match(method, self.url.decode("latin-1"))):
                raise Refusal(Unavailable(self._turned_away), [(b"retry-after", RETRY_AFTER)])
        self._offered = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        if self.chunked and self.content_length >= 0:
            self._only_chunked()
        if self.content_length > self._most_body():
            raise Refusal(too_large(self._most_body()))
        self._let_in = DIRECT_BYTES
        if self.content_length > DIRECT_BYTES:
            self._let_in = self.content_length
            self._take(self.content_length)
        expect = self.expect
        self.expect = None
        if (
            expect is not None
            and expect.lower() == b"100-continue"
            and self._parser.get_http_version() != "1.0"
        ):
            self.expect = b"wanted"

    def _always_answered(self, method: str, route: Route | None) -> bool:
        """Whether the request under way is answered beyond limits too: a probe, or a control verb of who may use it."""
        if route is None:
            return False
        return route.verb in routes.PROBES or (
            self.policy is not None and self.policy.controls(route.verb, self.headers, route.model, method)
        )

    def _only_chunked(self) -> None:
        """Refuses other encodings beside a Content-Length (rule 8): the parser would use the length for them."""
        given = [
            value.strip().lower() for name, value in self.headers if name.lower() == b"transfer-encoding"
        ]
        if given != [b"chunked"]:
            text = b", ".join(given).decode("latin-1")
            raise Refusal(
                TritonError(f"malformed HTTP request: Transfer-Encoding must be chunked, got '{text}'")
            )

    def _most_body(self) -> int:
        """Bytes that the body under way may have."""
        return self.max_body if self.body_limit is None else self.body_limit(self.url)

    def _take(self, size: int) -> None:
        """Takes a body's bytes from the budget of all connections."""
        if not self.counted:
            return
        try:
            self._held.take(size)
        except TritonError as error:
            raise Refusal(error) from None

    def on_body(self, data: bytes) -> None:
        self.expect = None
        self._received += len(data)
        while self._received > self._let_in:  # a chunked body has no announced length
            self._let_in += CHUNKED_STEP
            self._take(CHUNKED_STEP)
        if self._received > self._most_body():
            raise Refusal(too_large(self._most_body()))
        if not self._body:
            self._body = data
        else:
            # chunks are gathered in one buffer, because in a body of one-byte chunks an object for each would be too many
            if type(self._body) is bytes:
                self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self.in_message = False
        body, self._body = self._body, b""
        parser = self._parser
        keep_alive = parser.should_keep_alive() and not (self.chunked and self.content_length >= 0)
        self._request(parser.get_method().decode("latin-1"), parser.get_http_version(), keep_alive, body)

    def _request(self, method: str, version: str, keep_alive: bool, body: Any) -> None:
        """Handles a complete request."""
        if self.closing:
            return
        self.requests += 1
        keep_alive = keep_alive and version == "1.1" and not self.draining
        exchange = Exchange(self, method, self.url.decode("latin-1"), version, keep_alive)
        if not keep_alive:
            self.closing = True
        exchange.held = len(body)
        self.held += exchange.held
        self.exchanges.append(exchange)
        route = None if self._only_app else routes.match(method, exchange.path)
        if self._limits is not None and not self._always_answered(method, route):
            problem = self._limits.problem(self.client, monotonic_ns())
            if problem is not None:
                exchange.refuse(problem)
                return
        if route is not None and route.verb == "infer" and route.allowed:
            admission = self.services.admission
            if not admission.forwards or admission.reads(route.model, route.version):
                exchange.submit(route, body)
                return
        if isinstance(body, np.ndarray):
            body = memoryview(body)  # type: ignore[arg-type]
        self.nursery.start_soon(run_app, self.app, exchange, self.headers, body, self.policy is not None)

    # ------------------------------------------------------------ output

    def over(self) -> None:
        """Ends the connection: everything was sent, or cannot be."""
        self._scope.cancel()

    def reply_error(self, exchange: ExchangeCore, error: TritonError, headers: Headers) -> None:
        """Answers an exchange of the fast path with an error."""
        alike = error.alike if not headers else None
        kept = ANSWERS_OF_ALIKE[exchange.keep_alive]
        output = kept.get(alike) if alike is not None else None
        if output is None:
            headers = [*JSON, *error.headers, *headers]
            output = answer("1.1", error.code.http, headers, error_body(error), exchange.keep_alive)
            if alike is not None:
                kept[alike] = output
        exchange.output = list(output)

    def reply_with(
        self, exchange: ExchangeCore, extra: Headers, text: bytes, blobs: list[Any] | None
    ) -> None:
        """Answers an exchange of the fast path, with headers in addition to the usual ones."""
        headers = [*JSON, *extra]
        if blobs:
            headers = [BINARY, (HEADER_LENGTH, b"%d" % len(text)), *extra]
        exchange.output = answer("1.1", 200, headers, [text, *(blobs or ())], exchange.keep_alive)

    def encode_later(
        self,
        exchange: FastPathExchange,
        request: InferRequest,
        response: InferResponse,
        binary_default: bool,
        selecting: bool,
    ) -> None:
        """Has an answer of the fast path printed by a worker, for as long as there is a peer. With `selecting` the
        worker also does what the client asked to be done with the outputs."""
        self.pause()
        exchange.encoding = trio.CancelScope()
        self.nursery.start_soon(
            self._encode, exchange, exchange.encoding, request, response, binary_default, selecting
        )

    async def _encode(
        self,
        exchange: FastPathExchange,
        scope: trio.CancelScope,
        request: InferRequest,
        response: InferResponse,
        binary_default: bool,
        selecting: bool,
    ) -> None:
        try:
            with scope:
                encoded = await print_later(self.services, request, response, binary_default, selecting, self)
            if scope.cancelled_caught:
                raise Cancelled
            exchange.encoded(request, encoded)
        except TritonError as error:
            exchange.refuse(error, request)
        except Exception as error:
            log.exception("encoding a response of model '%s' failed", request.model_name)
            exchange.refuse(Internal(f"internal error: {type(error).__name__}: {error}"), request)
        finally:
            exchange.encoding = None
            self.resume()
        self.loop_pass.end()

    def _drained(self) -> None:
        if self.writer.broken:
            self._scope.cancel()
        if self.room is not None and self.has_room():
            self.room.set()

    def drain(self) -> None:
        """The server stops: the last answer tells the peer that the connection will be closed."""
        self.draining = True
        if self.exchanges:
            self.closing = True
            self.exchanges[-1].keep_alive = False

    def end_grace(self) -> None:
        """From now on, a request whose head is not complete is not answered any more."""
        if self.exchanges or self.closing:
            return
        if not self.in_message:
            self.over()
        elif not self.head_complete:
            self._refuse(Unavailable(SHUTTING_DOWN))
            self.loop_pass.end()

    # ------------------------------------------------------------ time

    def check(
        self, now_ns: int, request_timeout_ns: int, idle_timeout_ns: int, pressed: bool = False
    ) -> None:
        """Ends a connection whose request does not arrive, whose peer does not read, or that was idle for too long.

        Called regularly with the current time; `idle_timeout_ns` 0 means for ever. `pressed`: others wait for a place,
        so that receiving a head may take no longer than being idle.
        """
        if self._turned_away and not self.exchanges and now_ns - self.since_ns > TURNED_AWAY_SECONDS * 10**9:
            self.over()
            return
        if self.writer.stalled(now_ns, request_timeout_ns):
            self.writer.fail()  # wakes whoever waits for room; unanswered requests are cancelled
            self.over()
            return
        if self.exchanges or self.closing:
            return
        if self.in_message:
            earned = self._received * 1_000_000_000 // MIN_BYTES_PER_SECOND
            limit = request_timeout_ns + earned
            if pressed and not self.head_complete:
                limit = min(limit, idle_timeout_ns)
            if now_ns - self.receive_start > limit:
                self._refuse(TritonError("the request did not arrive in time"), 408)
                self.loop_pass.end()
        elif self.requests == 0:
            if now_ns - self.since_ns > (idle_timeout_ns if pressed else request_timeout_ns):
                self._scope.cancel()
        elif idle_timeout_ns and now_ns - self.since_ns > idle_timeout_ns:
            self._scope.cancel()

    # ------------------------------------------------------------ input

    async def run(self) -> None:
        """Serves the connection until either side ends it. Raises HandOver for HTTP/2."""
        hand_over: HandOver | None = None
        try:
            with self._scope:
                self.pass_on(await self._first_bytes())
                self.loop_pass.end()
                while not self.closing and not self.ended:
                    if not self.has_room():
                        self.room = trio.Event()
                        await self.room.wait()
                        self.room = None
                        continue
                    if self.later is not None:
                        data, self.later = self.later, None
                        self.pass_on(data)
                        self.loop_pass.end()
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
                self.direct = None
                await close(self, linger=self._refused or self.draining)
                self._parser = None

    async def _first_bytes(self) -> bytes:
        """Reads the first bytes, which tell HTTP/1 from HTTP/2. Empty when the peer has left."""
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
            for _ in range(DIRECT_READS):  # then other connections are served
                n = self.sock.recv_into(buffer[at : at + DIRECT_READ])
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
            self._parser = self._new_parser()
            self._request(method, version, keep_alive, buffer)

    def pause(self) -> None:
        """A worker does something for this connection: until resume() no request is looked at."""
        self.paused += 1
        if self.watching is None and not self.closing and not self.ended:
            self.watching = trio.CancelScope()
            self.nursery.start_soon(self._notice_end, self.watching)

    def resume(self) -> None:
        """It has done it."""
        self.paused -= 1
        if self.paused == 0 and self.watching is not None:
            self.watching.cancel()
        if self.room is not None and self.has_room():
            self.room.set()

    async def _notice_end(self, scope: trio.CancelScope) -> None:
        """While nothing is read, notices that the peer ends its side, unless it sent something before."""
        try:
            with scope:
                await trio.lowlevel.wait_readable(self.sock)
                if not self.sock.recv(1, socket.MSG_PEEK):
                    self.end_of_input()
                    self.loop_pass.end()
        except (BlockingIOError, InterruptedError, trio.BusyResourceError):
            pass
        except (OSError, trio.ClosedResourceError):
            self.end_of_input()
        finally:
            self.watching = None

    def feed(self, data: Any) -> None:
        """Parses bytes while there is room for the requests in them; the rest is kept in `later`."""
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
        """How many bytes to parse before checking for room again: a head, or a body of many bytes."""
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
            if self._parser.get_method() == b"CONNECT":
                self.closing = True
            else:
                self._parse_without_offer(data[upgrade.args[0] :])
            return
        except httptools.HttpParserCallbackError as error:
            self._parser_refused(error.__context__ or error)
            return
        except httptools.HttpParserInvalidMethodError:
            self._refuse(TritonError("Method Not Allowed"), 405)
            return
        except httptools.HttpParserError as error:
            self._refuse(TritonError(f"malformed HTTP request: {error}"))

    def _parse_without_offer(self, rest: Any) -> None:
        """Parses the request whose head has just ended again, without the upgrade that it offers.

        The parser takes every byte after such a head, the body included, for another protocol's. If they were parsed
        as requests, bytes of a body would be answered.
        """
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n")
        if len(rest) and not self.closing:
            self._parse(rest)

    def _parsed(self, size: int) -> None:
        """Checks the current message after `size` received bytes were parsed."""
        if not self.in_message:
            self._head_seen = 0
            return
        if not self.head_complete:
            # the parser calls nothing back for a header that does not end
            self._head_seen += size
            if self._head_seen > RECEIVE_BYTES + MAX_HEAD_BYTES:
                self._head_too_large()
            return
        self._head_seen = 0
        if self.expect == b"wanted":
            self.expect = None
            if not self.exchanges:
                self.writer.send([b"HTTP/1.1 100 Continue\r\n\r\n"])
        if not self.chunked and self.content_length - self._received > DIRECT_BYTES and not self.closing:
            self._begin_direct()

    def _parser_refused(self, cause: BaseException) -> None:
        if isinstance(cause, Refusal):
            self._refuse(cause.error, headers=cause.headers)
        elif isinstance(cause, HeadTooLarge):
            self._head_too_large()
        else:
            log.error("a request failed in the parser", exc_info=cause)
            self._refuse(TritonError("malformed HTTP request"))

    def who(self, token: bytes | None, model: str) -> tuple[Owner | None, bool]:
        """Who sends an infer request of `model` with this Authorization header; None if it is to be refused. And whether
        that may be remembered: not if requests are counted."""
        assert self.policy is not None
        try:
            account = self.policy.check("infer", () if token is None else ((b"authorization", token),), model)
        except TritonError:
            return None, False
        return account, account is not None and not account.client.requests_per_second

    def accepts_host(self, host: bytes) -> bool:
        """Whether this Host is allowed; the fast path asks for each Host that is new on this connection."""
        return host_problem(host, 1, "1.1") is None and self.origins.accepts_host(host)

    def _begin_direct(self) -> None:
        """Has the rest of the body received into one buffer of its length, without the parser."""
        parser = self._parser
        self._direct_request = (
            parser.get_method().decode("latin-1"),
            parser.get_http_version(),
            parser.should_keep_alive(),
        )
        self.direct = self._split_body(self._direct_request[0])
        if self.direct is None:
            # numpy does not touch the memory, so pages are used only as the body arrives
            self.direct = np.empty(self.content_length, np.uint8)
        self._direct_at = 0
        while self._direct_at < self._received:
            part = self.direct[self._direct_at : self._received]
            part[:] = np.frombuffer(self._body, np.uint8, len(part), self._direct_at)
            self._direct_at += len(part)
        self._body = b""

    def _split_body(self, method: str) -> SplitBody | None:
        """Buffers for an infer request with binary tensors whose model has memory for them; None for any other."""
        if (
            self.header_length is None
            or self.content_encoding is not None
            or self.policy is not None  # which looks at the request when it is complete
            or self._only_app
        ):
            return None
        route = routes.match(method, self.url.decode("latin-1"))
        text = leading_int(self.header_length)
        if route is None or route.verb != "infer" or not route.allowed or not 0 <= text < self.content_length:
            return None
        source = self.services.admission.body_source(route.model, route.version)
        memory = None if source is None else source(self.content_length - text)
        return None if memory is None else SplitBody(text, memory)

    def _head_too_large(self) -> None:
        text = f"request headers exceed the limit of {MAX_HEAD_BYTES} bytes"
        self._refuse(TritonError(text), 431)

    def _refuse(self, error: TritonError, status: int = 0, headers: Headers | None = None) -> None:
        """Answers a request that will not be read to its end, and closes the connection after that."""
        if self.closing:
            return  # the last request was seen already, so what follows it does not matter
        exchange = Exchange(self, "", "", "1.1", False)
        self.exchanges.append(exchange)
        self.closing = self._refused = True
        self.in_message = False
        self.direct = None
        exchange.refuse(error, status, headers)

    def end_of_input(self) -> None:
        self.ended = True
        for exchange in list(self.exchanges):
            exchange.disconnect(self.services)
