"""Server-side HTTP/2 with h2: the session for machines without libnghttp2.

Its interface and rules are those of cext/transport/http2/nghttp2_session.pyx, so the code above it and the tests are
the same. It is ten times slower and copies replies once more.

h2 has no graceful GOAWAY (sending one ends its state machine), so the GOAWAY frames of a drain are written here. And h2
raises in the middle of a chunk of input, so anything else in that chunk is lost together with the connection.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from h2 import events
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.exceptions import DenialOfServiceError, H2Error, ProtocolError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from neptrio.transport.http2 import limits as lim
from neptrio.transport.http2.h2_headers import HeaderBlock, HeaderEncoder, malformed
from neptrio.transport.http2.session import OpenStream
from neptrio.transport.http2.session_core import Http2Session
from neptrio.transport.http2.stream import Totals

log = logging.getLogger("neptrio.http2")

OUTPUT_BYTES = 1 << 20  # most bytes of one data_to_send(); the rest waits until the writer has taken these
HEADERS_BYTES = 64  # what a frame of headers counts of these
LAST_STREAM = 0x7FFFFFFF
TOO_MANY_PINGS = "too_many_pings"
REFUSED_STREAM = 7
COSTS = {
    events.WindowUpdated: 1,
    events.RemoteSettingsChanged: 10,
    events.SettingsAcknowledged: 1,
    events.PriorityUpdated: 1,
}


def let_go(connection: H2Connection) -> None:
    """Nothing more is received: drops what the connection is referred to by from inside, which would keep it until the
    collector finds it. Does nothing where h2 has no such table."""
    vars(connection).get("_frame_dispatch_table", {}).clear()


class Session(Http2Session):
    """One HTTP/2 connection's state; the rules are those of cext/transport/http2/nghttp2_session.pyx."""

    def __init__(
        self,
        open_stream: OpenStream,
        flood_budget: lim.FloodBudget | None = None,
        *,
        limits: lim.SessionLimits = lim.GRPC,
        totals: Totals | None = None,
    ) -> None:
        super().__init__(open_stream, flood_budget, limits, totals)
        self._last_stream = 0
        self._refuse_after = LAST_STREAM
        self._pending: dict[int, Any] = {}  # streams with something to send, served in turn
        self._out = bytearray()
        self._conn = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                validate_inbound_headers=False,
            )
        )
        self._conn.encoder = HeaderEncoder()
        self._conn.local_settings = Settings(
            client=False,
            initial_values={
                SettingCodes.MAX_CONCURRENT_STREAMS: limits.streams,
                SettingCodes.INITIAL_WINDOW_SIZE: limits.stream_window,
                SettingCodes.MAX_FRAME_SIZE: limits.frame_size,
                SettingCodes.MAX_HEADER_LIST_SIZE: lim.HEADER_BOMB,
            },
        )
        self._conn.max_inbound_frame_size = limits.frame_size
        self._conn.decoder.max_header_list_size = lim.HEADER_BOMB
        self._conn.initiate_connection()
        self._conn.increment_flow_control_window(limits.connection_window - 65535)

    # ------------------------------------------------------------ input

    def receive(self, data: Any, now_ns: int = 0) -> None:
        if not len(data) or self.dead:
            return
        self.arrived(data, now_ns)
        self.has_output = True
        try:
            for event in self._conn.receive_data(bytes(data)):
                self.charge(COSTS.get(type(event), 0))
                handler = HANDLERS.get(type(event))
                if handler is not None and not self.flooded and not self.dead:
                    handler(self, event)
            self.endless()
            if self.too_large:  # h2 says so when all of it has come, and keeps it until then
                self._fail(f"a frame of {self.too_large} bytes", lim.FRAME_SIZE_ERROR)
        except DenialOfServiceError as error:
            self._fail(str(error), lim.ENHANCE_YOUR_CALM)
        except ProtocolError as error:
            self.dead = True  # h2 has queued its own GOAWAY
            self.failure = str(error) or type(error).__name__
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", lim.INTERNAL_ERROR)
        if self.flooded:
            self._fail(self.failure or "", lim.ENHANCE_YOUR_CALM)

    def _request(self, event: events.RequestReceived) -> None:
        stream_id = event.stream_id or 0
        headers = [(bytes(name), bytes(value)) for name, value in event.headers or ()]
        if stream_id > self._refuse_after or malformed(headers):
            self._rst(stream_id, REFUSED_STREAM if stream_id > self._refuse_after else lim.PROTOCOL_ERROR)
            return
        self._last_stream = max(self._last_stream, stream_id)
        block = HeaderBlock(headers)
        assert self.open_stream is not None
        try:
            opened: Any = self.open_stream(self, stream_id, block.get(b":path") or b"", block)
            opened.note_opened(block.size)
            if not opened.ended:  # it was reset at once
                self.streams[stream_id] = opened
        except Exception:
            log.exception("stream %d failed", stream_id)
            self._rst(stream_id, lim.INTERNAL_ERROR)
            stream = self._pending.pop(stream_id, None)  # the stream has already begun to answer
            if stream is not None:
                self.reset_stream(stream, lim.INTERNAL_ERROR)

    def _data(self, event: events.DataReceived) -> None:
        size = event.flow_controlled_length or 0
        self.held_credit += size
        if not self.holding:
            self.release()
        stream = self.streams.get(event.stream_id or 0)
        if stream is None or stream.ended:
            return
        if self._call(stream, stream.receive, event.data):
            stream.withheld += size
            if not stream.paused:
                self.resume_input(stream)

    def _end_of_input(self, event: events.StreamEnded) -> None:
        stream = self.streams.get(event.stream_id or 0)
        if stream is not None and not stream.input_ended:
            stream.input_ended = True
            self._call(stream, stream.end_of_input)

    def _reset_by_peer(self, event: events.StreamReset) -> None:
        self._close(event.stream_id or 0, int(event.error_code or 0))
        self.charge(1 if event.remote_reset else 0)

    def _ping(self, event: events.PingReceived) -> None:
        if not self.flood_budget.pinged(len(self.streams)):
            self.flood(TOO_MANY_PINGS)

    def _ping_acked(self, event: events.PingAckReceived) -> None:
        self.pings_acked += 1

    def _call(self, stream: Any, method: Callable[..., Any], *args: Any) -> bool:
        """Calls a method of a stream. If it raises, the stream is reset, and False is returned."""
        try:
            method(*args)
        except Exception:
            log.exception("stream %d failed", stream.stream_id)
            self.reset(stream, lim.INTERNAL_ERROR)
            return False
        return True

    def _fail(self, why: str, code: int) -> None:
        if not self.dead:
            self.dead = True
            self.failure = why
            # gRPC's clients ask less often when they read this text, and only then
            text = why.encode() if why == TOO_MANY_PINGS else b""
            self._goaway(self.last_stream, code, text)

    def _goaway(self, last_stream: int, code: int, text: bytes = b"") -> None:
        self._out += self._conn.data_to_send()
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code, additional_data=text)
        self._out += frame.serialize()
        self.has_output = True

    def _close(self, stream_id: int, code: int) -> None:
        stream = self.streams.pop(stream_id, None)
        self._pending.pop(stream_id, None)
        if stream is not None and not stream.ended:
            self.reset_stream(stream, code)

    def connection_lost(self) -> None:
        self.dead = True
        for stream_id in list(self.streams):
            self._close(stream_id, lim.CANCEL)
        self._pending.clear()
        let_go(self._conn)
        self.open_stream = None  # it refers to the connection

    # ------------------------------------------------------------ output

    def output_ready(self, stream: Any) -> None:
        self.has_output = True
        if not stream.ended and not self.dead:
            self._pending[stream.stream_id] = stream

    def reset(self, stream: Any, code: int = lim.CANCEL) -> None:
        self._rst(stream.stream_id, code)
        self._close(stream.stream_id, code)
        if not stream.ended:  # it is being opened
            self.reset_stream(stream, code)

    def _rst(self, stream_id: int, code: int) -> None:
        self._ask(self._conn.reset_stream, stream_id, code)

    def _ask(self, method: Callable[..., Any], *args: Any) -> None:
        """Has h2 send something, unless that comes too late: the stream is closed or half closed."""
        if self.dead:
            return
        self.has_output = True
        try:
            method(*args)
        except (H2Error, KeyError):
            pass

    def resume_input(self, stream: Any) -> None:
        stream.paused = False
        if stream.withheld and not stream.ended:
            size, stream.withheld = stream.withheld, 0
            self._ask(self._conn.increment_flow_control_window, size, stream.stream_id)

    def release(self) -> None:
        self.holding = False
        credit, self.held_credit = self.held_credit, 0
        if credit:
            self._ask(self._conn.increment_flow_control_window, credit)

    def ping(self) -> None:
        self._ask(self._conn.ping, b"\0" * 8)

    def start_drain(self) -> None:
        if not self.draining and not self.dead:
            self.draining = True
            self._goaway(LAST_STREAM, lim.NO_ERROR)

    def finish_drain(self) -> None:
        if not self.dead:
            self._refuse_after = self.last_stream
            self._goaway(self.last_stream, lim.NO_ERROR)

    def terminate(self, code: int) -> None:
        self._fail("terminated", code)

    @property
    def last_stream(self) -> int:
        return self._last_stream

    @property
    def finished(self) -> bool:
        done = self.dead or (self._refuse_after != LAST_STREAM and not self.streams)
        return done and not self.has_output

    def data_to_send(self) -> list[Any]:
        if not self.has_output:
            return []
        self.has_output = False
        if not self.dead:
            self._pump()
        self._out += self._conn.data_to_send()
        out, self._out = self._out, bytearray()
        return [bytes(out)] if out else []

    def _pump(self) -> None:
        """Sends a frame from each pending stream in turn, until windows or OUTPUT_BYTES are used up."""
        room = OUTPUT_BYTES
        turn = list(self._pending)
        while turn and room > 0:
            sent_some: list[int] = []
            for stream_id in turn:
                stream = self._pending.get(stream_id)
                if stream is None or room <= 0:
                    continue
                try:
                    sent = self._send_some(stream_id, stream)
                except (H2Error, KeyError) as error:
                    log.debug("stream %d closed while sending: %s", stream_id, str(error))
                    self._close(stream_id, lim.CANCEL)
                    continue
                if sent:
                    room -= sent + 9
                    sent_some.append(stream_id)
            turn = sent_some
        self.has_output = self.has_output or room <= 0

    def _send_some(self, stream_id: int, stream: Any) -> int:
        """Sends one part of a reply. Returns its bytes, 0 when there is no more or the window is closed."""
        conn = self._conn
        if not stream.headers_sent:
            stream.headers_sent = True
            self.flood_budget.strikes = 0
            whole = stream.trailers is not None and not stream.out_bytes and stream.whole_head()
            if whole:
                self._end(stream_id, stream, whole)
            else:
                conn.send_headers(stream_id, stream.head())
            return HEADERS_BYTES
        if stream.out_bytes:
            n = min(conn.local_flow_control_window(stream_id), conn.max_outbound_frame_size, stream.out_bytes)
            if n > 0:
                conn.send_data(stream_id, b"".join(stream.take(n)))
                self.work += 3
                if not stream.out_bytes and stream.trailers is None:
                    self._call(stream, stream.on_writable)
            return max(int(n), 0)
        if stream.trailers is not None:
            self._end(stream_id, stream, stream.trailers)
        else:
            del self._pending[stream_id]
        return 0

    def _end(self, stream_id: int, stream: Any, headers: list[tuple[bytes, bytes]]) -> None:
        if headers:
            self._conn.send_headers(stream_id, headers, end_stream=True)
        else:
            self._conn.end_stream(stream_id)
        self.work += 2
        stream.over()
        if not stream.input_ended:
            self._rst(stream_id, lim.NO_ERROR)
        self._close(stream_id, lim.NO_ERROR)


HANDLERS: dict[type, Callable[[Session, Any], None]] = {
    events.RequestReceived: Session._request,
    events.DataReceived: Session._data,
    events.StreamEnded: Session._end_of_input,
    events.StreamReset: Session._reset_by_peer,
    events.PingReceived: Session._ping,
    events.PingAckReceived: Session._ping_acked,
}
