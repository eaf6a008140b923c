"""The input of a lean HTTP/1.1 connection: from bytes on the socket to complete requests.

The problem and the choice are those of transport.http1.connection, whose lower half this is: what the fast path leaves goes
through llhttp, whose callbacks gather one request at a time; large bodies of known length go past it.

Rules:
 1. An upgrade that a client offers is not accepted, h2c included: the request, its body and what follows it are
    HTTP/1.1. HTTP/1.1 requests name one Host (transport.host_header).
 2. Chunked encoding wins over a Content-Length beside it, which clients send that write chunks by hand. Such a request
    is the connection's last, since a proxy in front may have used the length instead (RFC 9112, 6.1). Every other
    Transfer-Encoding is refused.
 3. No byte of a body is kept that the budget of all connections did not grant.
 4. Bytes are parsed only while there is room for the requests in them; the rest waits in `later`.
 5. What comes of a chunked request without being a part of its body (sizes, extensions, trailers, whole or not) may be as
    long as a head before the next part. The parser joins a trailer's pieces anew whenever one comes, and tells nobody.
"""

from __future__ import annotations

import logging
import re
from typing import Any

import httptools
import numpy as np

from neptrio.codec.compression import too_large
from neptrio.codec.http_json import HEADER_LENGTH
from neptrio.errors import TritonError, raise_it
from neptrio.limits import MAX_HEAD_BYTES
from neptrio.loop.socket_writer import SocketWriter
from neptrio.loop.socket_writer_core import received_view
from neptrio.service.connections import TurnedAway
from neptrio.transport.host_header import host_problem
from neptrio.transport.http1.fast_path import Http1FastPath
from neptrio.transport.http1.states import Event, State
from neptrio.transport.rest import routes
from neptrio.transport.rest.body import SplitBody
from neptrio.transport.rest.exchange import Carrier, always_answered, most_body
from neptrio.transport.rest.head import HeadTooLarge
from neptrio.transport.rest.infer import leading_int
from neptrio.transport.rest.port import Port
from neptrio.transport.wire import Wire

log = logging.getLogger("neptrio.http1")

DIRECT_BYTES = 32 << 10  # bodies of which more bytes are to come are received into a buffer of their own
CHUNKED_STEP = 1 << 20  # bytes of chunked bodies that are taken from the budget at once
DIRECT_READ = 1 << 20  # bytes of a body received at once
FEW_BYTES = 1 << 10  # bytes parsed at once: they cannot contain many pipelined requests
PIECE_BYTES = 4 << 10  # bytes parsed at a time while searching for the end of a head
PREFACE = b"PRI * HTTP/2.0"
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)(.*)", re.S)


class Http1Input(Carrier, Http1FastPath):
    """Reads and parses; the connection, which inherits from it, handles what is complete and what is refused."""

    writer: SocketWriter

    def __init__(self, wire: Wire, port: Port, turned_away: str) -> None:
        services = port.services
        super().__init__(wire, services)
        self.port = port
        self.access = port.access
        self.max_body = port.max_body
        self._turned_away = turned_away
        self._held = services.held
        self._let_in = 0  # bytes of the current message that the budget has granted
        self._parser: Any = self._new_parser()
        self._body: Any = b""
        self._most_body = 0
        self._direct_at = 0
        self._direct_request = ("", "", False)
        self._head_seen = 0  # bytes since the head under way began; a piece may begin with those of others
        self._beside_body = 0  # bytes since the head or the last part of a chunked body (rule 5)
        self._offered = False  # the head under way offers an upgrade and will be parsed without it

    def _new_parser(self) -> Any:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_chunked_length=True)  # rule 2
        return parser

    # ------------------------------------------------------------ the connection overrides these

    def _request(self, method: str, version: str, keep_alive: bool, body: Any) -> None:
        """Handles a complete request."""
        raise NotImplementedError

    def _refuse(self, error: TritonError, status: int = 0) -> None:
        """Answers a request that will not be read to its end, and closes the connection after that."""
        raise NotImplementedError

    # ------------------------------------------------------------ parser callbacks; a TritonError refuses the request

    def on_headers_complete(self) -> None:
        self.happens(Event.HEAD_READ)
        self._head_seen = 0
        self._body = b""
        self.body_received = self._beside_body = 0
        absolute = _ABSOLUTE.match(self.head.url)
        raise_it(host_problem(self.head.get(b"host"), self.head.hosts, self._parser.get_http_version()))
        if absolute is not None:  # a proxy's form
            path = absolute[2] if absolute[2].startswith(b"/") else b"/" + absolute[2]
            self.head.aim(absolute[1], path)
            raise_it(host_problem(absolute[1], 1, "1.1"))
        if self._turned_away:
            method = self._parser.get_method().decode("latin-1")
            route = routes.match(method, self.head.url.decode("latin-1"))
            if not always_answered(self, self.head, method, route):
                raise TurnedAway(self._turned_away)
        self._offered = self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT"
        if self.head.chunked:
            self._only_chunked()
        self._most_body = most = self._limit_of_body()
        if self.head.content_length > most:
            raise too_large(most, most == self.max_body)
        self._let_in = DIRECT_BYTES
        if self.head.content_length > DIRECT_BYTES:
            self._let_in = self.head.content_length
        if max(self.head.head_bytes, self.head.content_length) > DIRECT_BYTES:
            self._take(self.head.head_bytes + max(0, self.head.content_length))
        expect = self.head.get(b"expect") or b""
        self.continue_due = expect.lower() == b"100-continue" and self._parser.get_http_version() != "1.0"

    def _only_chunked(self) -> None:
        """Refuses other encodings (rule 2): beside a Content-Length the parser would use the length for them, and without
        one wait for the end of the connection."""
        given = [
            value.strip().lower() for name, value in self.head.headers if name.lower() == b"transfer-encoding"
        ]
        if given != [b"chunked"]:
            text = b", ".join(given).decode("latin-1")
            raise TritonError(f"malformed HTTP request: Transfer-Encoding must be chunked, got '{text}'")

    def _limit_of_body(self) -> int:
        """Bytes that the body under way may have."""
        limit = self.port.body_limit
        most = self.max_body if limit is None else limit(self.head.url)
        length = -1 if self.head.chunked else max(0, self.head.content_length)
        return most_body(
            most, self._parser.get_method().decode("latin-1"), self.head.url.decode("latin-1"), length
        )

    def _take(self, size: int) -> None:
        """Takes bytes of a request from the budget of all connections."""
        if self.port.counted:
            self._held.take(size)

    def on_body(self, data: bytes) -> None:
        self.continue_due = False
        self._beside_body = 0
        self.body_received += len(data)
        while self.body_received > self._let_in:  # a chunked body has no announced length
            self._let_in += CHUNKED_STEP
            self._take(CHUNKED_STEP)
        if self.body_received > self._most_body:
            raise too_large(self._most_body, self._most_body == self.max_body)
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
        self.happens(Event.WHOLE)
        body, self._body = self._body, b""
        parser = self._parser
        keep_alive = parser.should_keep_alive() and not (self.head.chunked and self.head.content_length >= 0)
        self._request(parser.get_method().decode("latin-1"), parser.get_http_version(), keep_alive, body)

    # ------------------------------------------------------------ the socket

    async def _first_bytes(self) -> bytes:
        """Reads the first bytes, which tell HTTP/1 from HTTP/2: of HTTP/2 the whole PREFACE. Empty when the peer has left."""
        first = b""
        while True:
            n = await self.wire.receive_some()
            if n == 0:
                self.end_of_input()
                return b""
            first += bytes(received_view()[:n])
            if first.startswith(PREFACE) or not PREFACE.startswith(first):
                return first

    def receive_direct(self) -> None:
        buffer, at = self.direct, self._direct_at
        length = len(buffer)
        # once, then other connections are served
        n = self.wire.receive_into(buffer[at : at + DIRECT_READ])
        if n == 0:
            self.end_of_input()
        if n <= 0:
            return
        self.continue_due = False
        self._direct_at = self.body_received = at = at + n
        if at == length:
            method, version, keep_alive = self._direct_request
            self.direct = None
            self.happens(Event.WHOLE)
            self._parser = self._new_parser()
            self._request(method, version, keep_alive, buffer)

    def end_of_input(self) -> None:
        self.happens(Event.INPUT_ENDED)
        for exchange in list(self.exchanges):
            exchange.disconnect(self.services)

    # ------------------------------------------------------------ the parser

    def feed(self, data: Any) -> None:
        """Parses bytes while there is room for the requests in them; the rest is kept in `later`."""
        at, size = 0, len(data)
        while at < size and not self.closing:
            if not self.has_room():
                self.later = bytes(data[at:])
                return
            end = at + self._piece(data, at)
            self._parse(data[at:end] if end - at < size else data)
            if self.state == State.HEAD:
                # the parser calls nothing back for a header that does not end
                self._head_seen += end - at
                if self._head_seen > MAX_HEAD_BYTES + PIECE_BYTES:
                    self._head_too_large()
            elif self.state == State.BODY and self.head.chunked:
                self._beside_body += end - at
                # a piece may begin with a part of the body
                if self._beside_body > MAX_HEAD_BYTES + PIECE_BYTES:
                    self._head_too_large()
            at = end
        if size and not self.closing:
            self._parsed()

    def _piece(self, data: Any, at: int) -> int:
        """How many bytes to parse before checking for room again: a head, or a body of many bytes."""
        left = len(data) - at
        if left <= FEW_BYTES:
            return left
        if self.state != State.BODY:
            end = bytes(data[at : at + PIECE_BYTES]).find(b"\r\n\r\n")
            return end + 4 if end >= 0 else min(left, PIECE_BYTES)
        if self.head.chunked:
            return min(left, PIECE_BYTES)
        return min(left, max(self.head.content_length - self.body_received, 1))

    def _parse(self, data: Any) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._parser.get_method() == b"CONNECT":
                self.happens(Event.NO_MORE)
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
        lines = [b"%b %b HTTP/%b" % (method, self.head.url, version)]
        lines += [b"%b: %b" % pair for pair in self.head.headers if pair[0].lower() != b"upgrade"]
        self._parser = httptools.HttpRequestParser(self)
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n")
        if len(rest) and not self.closing:
            self._parse(rest)

    def _parsed(self) -> None:
        """Goes on with the current message after received bytes were parsed."""
        if self.state != State.BODY:
            return
        if self.continue_due:
            self.go_ahead()
        if not self.head.chunked and self.head.content_length - self.body_received > DIRECT_BYTES:
            self._begin_direct()

    def _parser_refused(self, cause: BaseException) -> None:
        if isinstance(cause, TritonError):
            self._refuse(cause)
        elif isinstance(cause, HeadTooLarge):
            self._head_too_large()
        else:
            log.error("a request failed in the parser", exc_info=cause)
            self._refuse(TritonError("malformed HTTP request"))

    def _head_too_large(self) -> None:
        text = f"request headers exceed the limit of {MAX_HEAD_BYTES} bytes"
        self._refuse(TritonError(text), 431)

    # ------------------------------------------------------------ large bodies

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
            self.direct = np.empty(self.head.content_length, np.uint8)
        self._direct_at = 0
        while self._direct_at < self.body_received:
            part = self.direct[self._direct_at : self.body_received]
            part[:] = np.frombuffer(self._body, np.uint8, len(part), self._direct_at)
            self._direct_at += len(part)
        self._body = b""
        self.happens(Event.PAST_PARSER)

    def _split_body(self, method: str) -> SplitBody | None:
        """Buffers for an infer request with binary tensors whose model has memory for them; None for any other."""
        header_length = self.head.get(HEADER_LENGTH)
        if (
            header_length is None
            or self.head.get(b"content-encoding") is not None
            or self.port.policy is not None  # which looks at the request when it is complete
            or self.port.only_app
        ):
            return None
        route = routes.match(method, self.head.url.decode("latin-1"))
        text = leading_int(header_length)
        if (
            route is None
            or route.verb != "infer"
            or not route.allowed
            or not 0 <= text < self.head.content_length
        ):
            return None
        source = self.services.admission.body_source(route.model, route.version)
        memory = None if source is None else source(self.head.content_length - text)
        return None if memory is None else SplitBody(text, memory)
