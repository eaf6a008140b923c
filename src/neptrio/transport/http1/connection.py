"""The lean HTTP/1.1 connection: llhttp parses, infer requests are answered without a task.

The problem: hypercorn's own HTTP/1.1 (h11) costs about 400 us a request. The choice: plain
connections are parsed by httptools; an infer request goes from the parser's callback straight to
the inference service, and its answer is written from the completion. Every other route is a call of
the ASGI app in a task of its own (transport/rest/app_call.py). Infer requests of the plainest form
do not even meet the parser: cext/transport/http1/fast_path.

How bytes become requests is in transport.http1.input; the states of a connection are the table of cext/transport/http1/states.

Rules:
 1. Answers are sent in the order of the requests (pipelining): an exchange writes only while it is the oldest; later
    ones keep their answers until then, and those that come in parts wait when they keep much.
 2. When the peer closes its side, every request it has not been answered is cancelled (transport.http1.ending says
    how a connection ends).
 3. A malformed request gets 400, 408, 413 or 431 where an answer is still possible; then the connection is closed, and
    nothing after that request is read.
 4. Whatever a connection raises concerns that connection only.
 5. Memory is bounded: each head by the head limit, bodies by --http-max-input-size, exchanges by MAX_EXCHANGES and the
    bytes they hold, of answers that wait for earlier ones, too; while a peer does not read its answers, its requests are not read.
 6. Time is bounded: a request must be complete within the request timeout plus the time that its bytes take at
    MIN_BYTES_PER_SECOND, from when it began and all before it were answered: until then its client may wait for a 100. A peer that takes nothing of its answers for as long as the request timeout is cut off
    (see check()). An answer that waits for an earlier one keeps its model's instance: it is broken off when nothing of
    earlier ones comes for as long. The earlier one may wait for that very instance.
"""

from __future__ import annotations

import logging
from typing import Any

import trio

from neptrio.codec.http_json import HEADER_LENGTH
from neptrio.errors import TritonError, Unavailable
from neptrio.limits import MIN_BYTES_PER_SECOND
from neptrio.request.infer_request import Owner
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport.http1.ending import close, last_answers
from neptrio.transport.http1.exchange import Exchange, answer
from neptrio.transport.http1.fast_path import ExchangeCore
from neptrio.transport.http1.input import PREFACE, Http1Input
from neptrio.transport.http1.states import Event, State
from neptrio.transport.rest.infer import BINARY, JSON, Headers, error_body
from neptrio.transport.rest.port import Port
from neptrio.transport.wire import Wire

log = logging.getLogger("neptrio.http1")

SHUTTING_DOWN = "the server is shutting down and takes no new requests"
# by keep_alive: TritonError.alike -> the fast path's whole answer to all errors with that object
ANSWERS_OF_ALIKE: tuple[dict[object, list[Any]], dict[object, list[Any]]] = ({}, {})


class Http1Connection(Http1Input):
    """Reads requests from a socket and answers them in order."""

    def __init__(self, wire: Wire, port: Port, turned_away: str = "") -> None:
        """`turned_away`: why there is no room for this connection; it is answered that; health probes, and control verbs
        of those who may use them, are answered as usual."""
        super().__init__(wire, port, turned_away)
        wire.writer.on_drained = self._drained
        # headers that are forwarded or restrict are looked at by the general path, tokens by both
        self.asks_who = port.policy is not None
        self.fast_path = port.plain_tokens and not turned_away
        self.draining = bool(turned_away)
        self._scope = trio.CancelScope()
        wire.on_failed = self.over
        self._still_ns = 0  # when it was last seen that no answer waits, or that an earlier one goes on
        self.watching: trio.CancelScope | None = None  # of the task that notices the peer's end

    def open_requests(self) -> int:
        """How many requests are under way."""
        return len(self.exchanges)

    @property
    def held_bytes(self) -> int:
        """Bytes of unanswered requests, of those being received, and of answers that were not sent or not read."""
        coming = len(self._body) if self.direct is None else len(self.direct)
        coming += len(self.partial or b"") + len(self.later or b"")
        ready = sum(memoryview(buffer).nbytes for buffer in self.ready)
        return self.held + coming + ready + int(self.writer.pending)

    # ------------------------------------------------------------ requests

    def _request(self, method: str, version: str, keep_alive: bool, body: Any) -> None:
        """Handles a complete request."""
        if self.closing:
            return
        self.requests += 1
        keep_alive = keep_alive and version == "1.1" and not self.draining
        exchange = Exchange(self, method, self.head.url.decode("latin-1"), version, keep_alive)
        if not keep_alive:
            self.happens(Event.NO_MORE)
        exchange.held = len(body) + self.head.head_bytes
        if self.access is not None:
            exchange.logged(self.access, self.head, len(body))
        self.held += exchange.held
        self.exchanges.append(exchange)
        exchange.dispatch(self.head, body)

    # ------------------------------------------------------------ output

    def over(self) -> None:
        self._scope.cancel()

    def reply_error(self, exchange: ExchangeCore, error: TritonError, headers: Headers) -> None:
        alike = error.alike if not headers else None
        kept = ANSWERS_OF_ALIKE[exchange.keep_alive]
        output = kept.get(alike) if alike is not None else None
        if output is None:
            headers = [*JSON, *error.headers, *headers]
            output = answer("1.1", error.code.http, headers, error_body(error), exchange.keep_alive)
            if alike is not None:
                kept[alike] = output
        if exchange.access is not None:
            exchange.access.answers(error.code.http, sum(map(len, error_body(error))))
        exchange.output = list(output)

    def reply_with(
        self, exchange: ExchangeCore, extra: Headers, text: bytes, blobs: list[Any] | None
    ) -> None:
        headers = [*JSON, *extra]
        if blobs:
            headers = [BINARY, (HEADER_LENGTH, b"%d" % len(text)), *extra]
        exchange.output = answer("1.1", 200, headers, [text, *(blobs or ())], exchange.keep_alive)

    def _drained(self) -> None:
        if self.writer.broken:
            self._scope.cancel()
        if self.room is not None and self.has_room():
            self.room.set()

    def start_drain(self) -> None:
        """The server stops: the last answer tells the peer that the connection will be closed."""
        self.draining = True
        if self.exchanges:
            self.happens(Event.NO_MORE)
            self.exchanges[-1].keep_alive = False

    def end_grace(self) -> None:
        """From now on, a request whose head is not complete is not answered any more."""
        if self.exchanges:
            return
        if self.state == State.IDLE:
            self.over()
        elif self.state == State.HEAD:
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
            log.info("a connection is ended: its client does not read")
            self.writer.give_up()  # wakes whoever waits for room; unanswered requests are cancelled
            self.over()
            return
        behind = [each for each in self.exchanges if each.turn is not None] if len(self.exchanges) > 1 else ()
        if self.moved or not behind or self.writer.pending:  # what is pending is looked at above
            self.moved = False
            self._still_ns = now_ns
        elif now_ns - max(self._still_ns, self.since_ns) > request_timeout_ns:
            self._still_ns = now_ns
            log.info("an answer is broken off: it has waited too long for an earlier one on its connection")
            for exchange in behind:
                exchange.disconnect(self.services)
        if self.exchanges or self.closing:
            return
        if self.state != State.IDLE:
            earned = self.body_received * 1_000_000_000 // MIN_BYTES_PER_SECOND
            limit = request_timeout_ns + earned
            if pressed and self.state == State.HEAD:
                limit = min(limit, idle_timeout_ns)
            if now_ns - max(self.head.receive_start, self.since_ns) > limit:
                self._refuse(TritonError("the request did not arrive in time"), 408)
                self.loop_pass.end()
        elif self.requests == 0:
            if now_ns - self.since_ns > (idle_timeout_ns if pressed else request_timeout_ns):
                self._scope.cancel()
        elif idle_timeout_ns and now_ns - self.since_ns > idle_timeout_ns:
            self._scope.cancel()

    # ------------------------------------------------------------ the connection's task

    async def run(self) -> bytes:
        """Serves the connection until either side ends it. If the peer begins with HTTP/2, returns at once what it has sent,
        for the connection that takes over."""
        handed_over = b""
        try:
            with self._scope:
                first = await self._first_bytes()
                if first.startswith(PREFACE):
                    handed_over = first
                    return first
                self.pass_on(first)
                self.loop_pass.end()
                while not self.closing:
                    if not self.has_room():
                        await self._until_room()
                        continue
                    if self.later is not None:
                        data, self.later = self.later, None
                        self.pass_on(data)
                        self.loop_pass.end()
                        continue
                    await self.wire.read(self.take)
                await last_answers(self)
        except (OSError, trio.ClosedResourceError):
            pass
        finally:
            if not handed_over:
                self.direct = None
                await close(self, linger=self.state == State.REFUSED or self.draining)
                for exchange in self.exchanges:  # whose client has left before they were answered
                    if exchange.access is not None:
                        exchange.access.end()
                    if exchange.turn is not None:
                        exchange.turn.set()
                self.wire.let_go()
            self._parser = None
        return handed_over

    async def _until_room(self) -> None:
        """Waits until another request may be read."""
        self.room = trio.Event()
        self._watch_end()
        await self.room.wait()
        self.room = None
        if not self.paused:
            self._watch_no_more()

    def pause(self) -> None:
        """A worker does something for this connection: until resume() no request is looked at."""
        self.paused += 1
        self._watch_end()

    def resume(self) -> None:
        """It has done it."""
        self.paused -= 1
        if self.room is None and self.paused == 0:
            self._watch_no_more()
        if self.room is not None and self.has_room():
            self.room.set()

    def _watch_end(self) -> None:
        """Nothing is read from now on: has a task notice that the peer ends its side."""
        if (self.watching is None or self.watching.cancel_called) and not self.closing:
            self.watching = trio.CancelScope()
            self.wire.start(self._notice_end, self.watching)

    def _watch_no_more(self) -> None:
        if self.watching is not None:
            self.watching.cancel()

    async def _notice_end(self, scope: trio.CancelScope) -> None:
        """While nothing is read, notices that the peer ends its side, unless it sent something before."""
        try:
            with scope:
                if await self.wire.watch_end():
                    self.end_of_input()
                    self.loop_pass.end()
        except trio.BusyResourceError:
            pass
        except (OSError, trio.ClosedResourceError):
            self.end_of_input()
        finally:
            if self.watching is scope:  # else another has begun since this one was ended
                self.watching = None

    def who(self, token: bytes | None, model: str) -> tuple[Owner | None, bool]:
        policy = self.port.policy
        assert policy is not None
        try:
            given = () if token is None else ((b"authorization", token),)
            account = policy.check("infer", given, model, certificate=self.wire.certificate)
        except TritonError:
            return None, False
        return account, account is not None and not account.client.requests_per_second

    def _refuse(self, error: TritonError, status: int = 0) -> None:
        """Answers a request that will not be read to its end, and closes the connection after that."""
        if self.closing:
            return  # the last request was seen already, so what follows it does not matter
        # where no target has come, what came may be no request, and has no method
        method = self._parser.get_method().decode("latin-1") if self.access and self.head.url else ""
        exchange = Exchange(self, method, "", "1.1", False)
        if self.access is not None:
            exchange.logged(self.access, self.head, self.body_received)
        self.exchanges.append(exchange)
        self.happens(Event.REFUSAL)
        self.direct = None
        exchange.refuse(error, status)
