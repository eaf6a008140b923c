"""One HTTP/2 connection, of gRPC or REST: its bytes go to a session, whose streams answer.

The problem: gRPC and REST over HTTP/2 need the same life (a preface in time, answers that are read, PINGs, GOAWAY twice, a
close that loses nothing), and a fault repaired in one was left in the other. The choice: this class is that life; what a
stream is, subclasses say (open_stream).

The life is a table; whatever is not in it does nothing:

| state | event | next state |
|---|---|---|
| greeting | the preface has come | serving |
| greeting | something else came, the time is over, the peer has left | closing |
| serving | the peer has closed its side; everything is sent and GOAWAY was; the session is dead; close() | closing |
| closing | output is sent or its time is over, the peer has ended or LINGER_S are over | closed |

Rules:
 1. The preface must come within HANDSHAKE_S; a connection that is told to drain before that is closed after DRAIN_ROUND_TRIP_NS.
 2. Draining: GOAWAY is sent twice, at once with the highest possible stream number, and with the last stream's when the
    client has answered a PING or DRAIN_ROUND_TRIP_NS are over. Streams that were opened before are answered.
 3. Closing: output has CLOSE_S to leave; then our side ends, and the client's last bytes are read for LINGER_S.
 4. While answers of all connections leave little room (`output_limit`, half of it), a stream whose client does not take
    UNREAD bytes of its answer within `unread_ns` is reset. With `unread_always` it is so at any time.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import trio

from neptrio.loop.socket_writer_core import received_view
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services
from neptrio.service.connections import TURNED_AWAY_SECONDS
from neptrio.transport.http2.connection_core import Http2Core
from neptrio.transport.http2.limits import CANCEL, ENHANCE_YOUR_CALM
from neptrio.transport.http2.session import Http2Session
from neptrio.transport.tls import HANDSHAKE_S
from neptrio.transport.wire import Wire

log = logging.getLogger("neptrio.http2")

DRAIN_ROUND_TRIP_NS = 10**9  # for so long after the first GOAWAY, streams opened before it was seen are taken
LINGER_S = 0.5  # how long the client's last bytes are read after our side is closed
ENGINE_S = 0.001  # how long the engine first has for answers, when the client has closed its side
CLOSE_S = 10.0  # how long the last bytes of answers may take to leave
NEVER_MS = 2**31 - 1
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class State(Enum):
    """The states of the table."""

    GREETING = 0
    SERVING = 1
    CLOSING = 2
    CLOSED = 3


@dataclass(frozen=True)
class ConnectionTimes:
    """When something is done on a connection, in milliseconds; NEVER_MS: never, `idle` and `age_grace` 0: never."""

    keepalive: int = NEVER_MS
    keepalive_timeout: int = NEVER_MS
    keepalive_without_calls: bool = False
    age: int = 0
    age_grace: int = 0
    idle: int = 0


class Http2Connection(Http2Core):
    """One connection; subclasses open its streams."""

    unread_always = False

    def __init__(
        self,
        wire: Wire,
        services: Services,
        times: ConnectionTimes,
        turned_away: str = "",
        prefix: bytes = b"",
    ) -> None:
        """`turned_away`: why there is no room for it. `prefix` was read from it already."""
        super().__init__(wire, services)
        self.client = wire.client
        self.certificate = wire.certificate
        wire.on_failed = self.close
        self.turned_away = turned_away
        self.session = self.new_session()
        self._state = State.GREETING
        self._times = times
        self._prefix = prefix
        self._timers = services.loop.timers
        self._scope = trio.CancelScope()
        self._pending_timers: dict[str, Timer] = {}
        self._last_stream = 0  # the newest stream at _idle()'s last check
        self._pinged_at = 0
        self._drain_asked = False

    # ------------------------------------------------------------ subclasses say

    def new_session(self) -> Http2Session:
        """The session of this connection."""
        raise NotImplementedError

    def stranger(self) -> bytes:
        """What a client gets that does not speak HTTP/2."""
        return b""

    # ------------------------------------------------------------ streams

    def now(self) -> int:
        """The monotonic clock in nanoseconds."""
        return int(monotonic_ns())

    @property
    def speaking(self) -> bool:
        """Whether the client's preface has come."""
        return self._state is not State.GREETING

    @property
    def closing(self) -> bool:
        """Whether it has ended, but for its last bytes."""
        return self._state in (State.CLOSING, State.CLOSED)

    def open_requests(self) -> int:
        """How many streams are open."""
        return len(self.session.streams)

    def streams(self) -> list[Any]:
        """The open streams."""
        opened: Mapping[int, Any] = self.session.streams
        return list(opened.values())

    def park(self, stream: Any) -> None:
        self.parked.append(stream)
        self.session.hold()

    def unpark(self) -> None:
        while self.parked and not self.overfull:
            self.parked.popleft().start()
        if not self.parked:
            self.session.release()

    def waiting_input(self) -> tuple[int, Any] | None:
        """When the client last sent something (monotonic ns), and the stream that holds most bytes of an incomplete
        request. None if there is no incomplete request."""
        if not self.session.account.in_bytes:
            return None
        return self.received_at, max(self.streams(), key=lambda stream: stream.input_held)

    def check_unread(self, now_ns: int, limit_ns: int) -> None:
        """Resets streams, and ends the connection, whose client does not read (rule 4). To be called regularly."""
        pressed = self.unread_always or 2 * self.totals.out_bytes > self.output_limit
        for stream in self.streams():
            if stream.stalled(now_ns, limit_ns) and pressed:
                log.info("an answer is given up: its client does not read")
                self.session.reset(stream, CANCEL)
                self.flush_soon()
        if self.wire.writer.stalled(now_ns, limit_ns) and pressed:
            log.info("a connection is ended: its client does not read")
            self.wire.writer.give_up()
            self.close()

    # ------------------------------------------------------------ output

    def flush_soon(self) -> None:
        """Asks for output to be sent, outside of a pass of the loop: ends a pass, which flushes it."""
        self.loop_pass.want_flush(self)
        self.loop_pass.end()

    def pass_ends(self) -> None:
        """Ends a pass of the loop for requests that were submitted by a task and not by take()."""
        self.flush_soon()

    # ------------------------------------------------------------ input

    async def run(self) -> None:
        """Serves the connection until either side ends it."""
        try:
            with self._scope:
                if await self._greet():
                    if not self.session.dead and not self.writer.broken:
                        await self.wire.read(self.take)
                    if self.services.admission.forwards:
                        await self._last_answers()
        except (OSError, trio.ClosedResourceError, trio.BrokenResourceError):
            pass
        finally:
            greeted, self._state = self.speaking, State.CLOSING
            for timer in self._pending_timers.values():
                timer.cancel()
            self._pending_timers.clear()
            self.session.connection_lost()
            self.parked.clear()
            self.loop_pass.end()
            with trio.CancelScope(shield=True):
                await self._close(greeted)
            self.wire.let_go()
            self._state = State.CLOSED

    async def _greet(self) -> bool:
        """Reads the preface. False if the client does not speak HTTP/2 or takes too long."""
        with trio.move_on_after(TURNED_AWAY_SECONDS if self.turned_away else HANDSHAKE_S):
            first = bytearray(self._prefix)
            while len(first) < len(PREFACE) and first == PREFACE[: len(first)]:
                n = await self.wire.receive_some()
                if not n:
                    return False
                first += received_view()[:n]
            if not first.startswith(PREFACE):
                self.writer.send([self.stranger()])
                return False
            self._state = State.SERVING
            self.wire.writer.on_drained = self.flush_soon
            self._start_timers()
            self.feed(first)
            self.loop_pass.end()
            if self._drain_asked:
                self.start_drain()
            return True
        return False

    async def _last_answers(self) -> None:
        """The client has closed its sending side, or has gone. Cancels its requests, and sends what the engine has
        answered nevertheless. Without front ends that is unnecessary: what is answered at once was answered before."""
        pause = ENGINE_S
        with trio.move_on_after(CLOSE_S):
            while not self.session.dead and not self.writer.broken:
                requests = [request for stream in self.streams() for request in stream.requests()]
                if not requests:
                    break
                for request in requests:
                    self.services.admission.cancel(request)
                self.loop_pass.end()
                await trio.sleep(pause)
                pause = min(2 * pause, LINGER_S)

    async def _close(self, greeted: bool) -> None:
        """Sends the last bytes and closes (rule 3)."""
        if greeted and self.session.wants_output:
            self.writer.send(self.session.data_to_send())
        with trio.move_on_after(CLOSE_S):
            await self.wire.writer.drained()
        if not self.writer.broken:
            await self.wire.end(LINGER_S)
        self.wire.close()

    # ------------------------------------------------------------ time

    def _start_timers(self) -> None:
        times = self._times
        if times.age:
            spread = random.uniform(0.9, 1.1)  # so that clients do not all reconnect at once
            self._at("age", times.age * spread, self._too_old)
        self._at("keepalive", times.keepalive, self._keep_alive)
        if times.idle:
            self._at("idle", times.idle, self._idle)
        if self.turned_away:
            self._at("turned away", TURNED_AWAY_SECONDS * 1000, self.start_drain)

    def _at(self, name: str, delay_ms: float, callback: Callable[[], None]) -> None:
        if delay_ms < NEVER_MS:
            if name in self._pending_timers:
                self._pending_timers[name].cancel()
            self._pending_timers[name] = self._timers.at(self.now() + int(delay_ms * 1e6), callback)

    def _too_old(self) -> None:
        self.start_drain()
        if self._times.age_grace:
            self._at("grace", self._times.age_grace, self.close)

    def _idle(self) -> None:
        """Called at an interval: ends the connection if it had no stream since the last check."""
        last_stream = self.session.last_stream
        if not self.session.streams and last_stream == self._last_stream:
            self.start_drain()
            return
        self._last_stream = last_stream
        self._at("idle", self._times.idle, self._idle)

    def _keep_alive(self) -> None:
        times = self._times
        silent_ms = (self.now() - self.received_at) / 1e6
        if silent_ms < times.keepalive:
            self._at("keepalive", times.keepalive - silent_ms, self._keep_alive)
        elif self.session.streams or times.keepalive_without_calls:
            self.session.ping()
            self._pinged_at = self.now()
            self.want_flush()
            soon_ms = min(times.keepalive, times.keepalive_timeout)
            self._at("keepalive", soon_ms, self._await_answer)
        else:
            self._at("keepalive", times.keepalive, self._keep_alive)

    def _await_answer(self) -> None:
        """Checks whether anything came since the last PING; closes the connection when its time is over."""
        times = self._times
        if self.received_at >= self._pinged_at:
            self._keep_alive()
            return
        left_ms = times.keepalive_timeout - (self.now() - self._pinged_at) / 1e6
        if left_ms > 0:
            self._at("keepalive", min(left_ms, times.keepalive), self._await_answer)
        else:
            log.debug("the client at %s does not answer PING", self.client)
            self.wire.writer.give_up()
            self.close()

    # ------------------------------------------------------------ end

    def start_drain(self) -> None:
        """Sends GOAWAY: no new streams are taken, open ones finish, then the connection ends (rule 2)."""
        if self.draining or (self._drain_asked and not self.speaking):
            return
        if not self.speaking:  # the session does not speak yet
            self._drain_asked = True
            self._at("drain", DRAIN_ROUND_TRIP_NS / 1e6, self._close_unless_it_speaks)
            return
        self.draining = True
        self.drain_acked = self.session.pings_acked
        self.session.start_drain()
        self.session.ping()  # its answer shows that the client has seen the GOAWAY
        self._pending_timers["drain"] = self._timers.at(self.now() + DRAIN_ROUND_TRIP_NS, self.finish_drain)
        for stream in self.streams():
            stream.on_drain()
        self.flush_soon()

    def _close_unless_it_speaks(self) -> None:
        if not self.speaking:
            self.close()

    def finish_drain(self) -> None:
        timer = self._pending_timers.pop("drain", None)
        if timer is not None:
            timer.cancel()
            self.session.finish_drain()
            for stream in self.streams():
                stream.on_drain()
            self.want_flush()

    def abort(self, why: str) -> None:
        """Ends the connection because of what its client does, with a GOAWAY that says so."""
        log.info("an HTTP/2 connection ended: %s", why)
        self.session.terminate(ENHANCE_YOUR_CALM)
        self.flush_soon()

    def close(self) -> None:
        self._scope.cancel()
