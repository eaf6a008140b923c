"""Server-side HTTP/2 with h2: the session for machines without libnghttp2.

Its interface and rules are those of cext/transport/http2/nghttp2_session.pyx, so the code above it and the tests are
the same. It is ten times slower and copies replies once more.

h2 has no graceful GOAWAY (sending one ends its state machine), so the GOAWAY frames of a drain are written here. And h2
raises in the middle of a chunk of input, so anything else in that chunk is lost together with the connection.
"""

from __future__ import annotations

import logging
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    DataReceived,
    PingAckReceived,
    PingReceived,
    PriorityUpdated,
    RemoteSettingsChanged,
    RequestReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import DenialOfServiceError, H2Error, ProtocolError, StreamClosedError
from h2.settings import SettingCodes, Settings
from hyperframe.frame import GoAwayFrame

from neptrio.transport.http2.header_encoder import HeaderEncoder
from neptrio.transport.http2.limits import (
    CANCEL,
    CONTENT_TYPE,
    ENHANCE_YOUR_CALM,
    FINE,
    GRPC,
    HEADER_BOMB,
    HEADERS_TOO_LARGE,
    INTERNAL_ERROR,
    MAX_HEADER_LIST,
    MAX_HEADERS,
    METHOD,
    NO_ERROR,
    TE,
    Nuisance,
    SessionLimits,
)
from neptrio.transport.http2.session import OpenStream
from neptrio.transport.http2.stream import Account, Totals

log = logging.getLogger("neptrio.http2")

OUTPUT_BYTES = 1 << 20  # most bytes of one data_to_send(); the rest waits until the writer has taken these
LAST_STREAM = 0x7FFFFFFF
TOO_MANY_PINGS = "too_many_pings"
USUAL_HEADERS = (b"content-type", b"te", b"user-agent")
PSEUDO = (b":method", b":scheme", b":path", b":authority")
HOP_BY_HOP = (b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade")


def malformed(headers: list[tuple[bytes, bytes]]) -> bool:
    """True for headers that RFC 9113 (8.2, 8.3) treats as a stream error."""
    pseudo: set[bytes] = set()
    plain = False
    for name, value in headers:
        if not name or name != name.lower() or name in HOP_BY_HOP or b"\0" in value or b"\n" in value:
            return True
        if name == b"te" and value != b"trailers":
            return True
        if name[:1] == b":":
            if plain or name in pseudo or name not in PSEUDO:
                return True
            pseudo.add(name)
        else:
            plain = True
    return not {b":method", b":scheme", b":path"} <= pseudo


class HeaderBlock:
    """A request's headers, with the interface of the nghttp2 session's."""

    def __init__(self, headers: list[tuple[bytes, bytes]]) -> None:
        self._headers = headers
        self.has_timeout = self.get(b"grpc-timeout") is not None
        self.has_custom = any(
            name not in USUAL_HEADERS and not name.startswith((b":", b"grpc-")) for name, _ in headers
        )
        self.problem = self._judge()

    def __call__(self) -> list[tuple[bytes, bytes]]:
        return self._headers

    def get(self, name: bytes) -> bytes | None:
        """The value of the first header of that name, or None."""
        for key, value in self._headers:
            if key == name:
                return value
        return None

    def plain_rest(self) -> None:
        """No request is plain: what is faster about those would be lost in h2."""

    def _judge(self) -> int:
        size = sum(len(name) + len(value) + 32 for name, value in self._headers)
        if len(self._headers) > MAX_HEADERS or size > MAX_HEADER_LIST:
            return HEADERS_TOO_LARGE
        if self.get(b":method") != b"POST":
            return METHOD
        content_type = (self.get(b"content-type") or b"").partition(b";")[0]
        if content_type not in (b"application/grpc", b"application/grpc+proto"):
            return CONTENT_TYPE
        return FINE if self.get(b"te") == b"trailers" else TE


def let_go(connection: H2Connection) -> None:
    """Nothing more is received: drops what the connection is referred to by from inside, which would keep it until the
    collector finds it. Does nothing where h2 has no such table."""
    vars(connection).get("_frame_dispatch_table", {}).clear()


class Session:
    """One HTTP/2 connection's state; the rules are those of cext/transport/http2/nghttp2_session.pyx."""

    def __init__(
        self,
        open_stream: OpenStream,
        nuisance: Nuisance | None = None,
        *,
        limits: SessionLimits = GRPC,
        totals: Totals | None = None,
    ) -> None:
        self.open_stream: OpenStream | None = open_stream
        self.account = Account(totals)
        self.nuisance = nuisance or Nuisance()
        self.streams: dict[int, Any] = {}
        self.dead = False
        self.failure: str | None = None
        self.draining = False
        self.pings_acked = 0
        self.partial = False  # h2 does not tell
        self.begun = 0
        self._last_stream = 0
        self._refuse_after = LAST_STREAM
        self._pending: dict[int, Any] = {}  # streams with something to send, served in turn
        self._out = bytearray()
        self._has_output = True
        self._credit = 0
        self._holding = False
        self._stream_credit: dict[int, int] = {}
        self._frameless = 0
        self._most_frameless = 2 * limits.frame_size
        self._work = 0
        self._conn = H2Connection(
            H2Configuration(
                client_side=False,
                header_encoding=None,
                validate_outbound_headers=False,
                normalize_outbound_headers=False,
                # h2 would end the whole connection; malformed() ends the stream
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
                SettingCodes.MAX_HEADER_LIST_SIZE: HEADER_BOMB,
            },
        )
        self._conn.max_inbound_frame_size = limits.frame_size
        self._conn.decoder.max_header_list_size = HEADER_BOMB
        self._conn.initiate_connection()
        self._conn.increment_flow_control_window(limits.connection_window - 65535)

    # ------------------------------------------------------------ input

    def receive(self, data: Any, now_ns: int = 0) -> None:
        """Takes bytes from the peer. Never raises: a protocol error makes the session `dead`."""
        if not len(data) or self.dead:
            return
        self.nuisance.refill(now_ns, self._work)
        self._work = 0
        self._has_output = True
        self._frameless += len(data)
        try:
            events = self._conn.receive_data(bytes(data))
        except DenialOfServiceError as error:
            self._fail(str(error), ENHANCE_YOUR_CALM)
            return
        except ProtocolError as error:
            self.dead = True  # h2 has queued its own GOAWAY
            self.failure = str(error) or type(error).__name__
            return
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}", INTERNAL_ERROR)
            return
        if events:
            self._frameless = 0
        elif self._frameless > self._most_frameless:
            self._fail(f"{self._frameless} bytes without a whole frame", ENHANCE_YOUR_CALM)
        for event in events:
            self._handle(event)
            if self.dead:
                return
        self._return_credit()

    def _handle(self, event: Any) -> None:
        if isinstance(event, DataReceived):
            self._data(event)
        elif isinstance(event, RequestReceived):
            self._request(event)
        elif isinstance(event, StreamEnded):
            self._end_of_input(event.stream_id)
        elif isinstance(event, StreamReset):
            self._pending.pop(event.stream_id, None)
            self._close(event.stream_id, int(event.error_code))
            if event.remote_reset:
                self._charge(1)
        elif isinstance(event, WindowUpdated):
            self._charge(1)
        elif isinstance(event, PingReceived):
            if not self.nuisance.pinged(len(self.streams)):
                self._fail(TOO_MANY_PINGS, ENHANCE_YOUR_CALM)
        elif isinstance(event, PingAckReceived):
            self.pings_acked += 1
        elif isinstance(event, RemoteSettingsChanged):
            self._charge(10)
        elif isinstance(event, SettingsAcknowledged | PriorityUpdated):
            self._charge(1)

    def _request(self, event: Any) -> None:
        stream_id = event.stream_id
        if stream_id > self._refuse_after:
            self._rst(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        self._last_stream = max(self._last_stream, stream_id)
        headers = [(bytes(name), bytes(value)) for name, value in event.headers]
        if malformed(headers):
            self._rst(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        block = HeaderBlock(headers)
        assert self.open_stream is not None
        try:
            opened: Any = self.open_stream(self, stream_id, block.get(b":path") or b"", block)
            if not opened.ended:  # it was reset at once
                self.streams[stream_id] = opened
        except Exception:
            log.exception("stream %d failed", stream_id)
            self._rst(stream_id, ErrorCodes.INTERNAL_ERROR)
            stream = self._pending.pop(stream_id, None)  # the stream has already begun to answer
            if stream is not None:
                self._reset_stream(stream, INTERNAL_ERROR)

    def _data(self, event: Any) -> None:
        stream_id, size = event.stream_id, event.flow_controlled_length
        self._credit += size
        if not event.data and not event.stream_ended:
            self._charge(1)
        stream = self.streams.get(stream_id)
        if stream is None or stream.ended:
            return
        try:
            stream.receive(event.data)
        except Exception:
            log.exception("stream %d failed", stream_id)
            self._rst(stream_id, ErrorCodes.INTERNAL_ERROR)
            self._close(stream_id, INTERNAL_ERROR)
            return
        if stream.paused:
            stream.withheld += size
        else:
            self._stream_credit[stream_id] = self._stream_credit.get(stream_id, 0) + size

    def _end_of_input(self, stream_id: int) -> None:
        stream = self.streams.get(stream_id)
        if stream is None or stream.input_ended:
            return
        stream.input_ended = True
        self._stream_credit.pop(stream_id, None)
        try:
            stream.end_of_input()
        except Exception:
            log.exception("stream %d failed", stream_id)
            self._rst(stream_id, ErrorCodes.INTERNAL_ERROR)
            self._close(stream_id, INTERNAL_ERROR)

    def _return_credit(self) -> None:
        """Sends window updates for the bytes that arrived, one per stream and chunk."""
        try:
            if self._credit and not self._holding:
                credit, self._credit = self._credit, 0
                self._conn.increment_flow_control_window(credit)
            credits, self._stream_credit = self._stream_credit, {}
            for stream_id, size in credits.items():
                if size and stream_id in self.streams:
                    self._give(stream_id, size)
        except H2Error as error:
            self._fail(str(error), INTERNAL_ERROR)

    def _give(self, stream_id: int, size: int) -> None:
        try:
            self._conn.increment_flow_control_window(size, stream_id)
        except (StreamClosedError, KeyError):
            pass
        except ProtocolError:
            pass  # the stream is half closed, so nobody needs its window

    def _charge(self, cost: int) -> None:
        if not self.nuisance.spend(cost):
            self._fail("too many control frames", ENHANCE_YOUR_CALM)

    def _fail(self, why: str, code: int) -> None:
        if not self.dead:
            self.dead = True
            self.failure = why
            # gRPC's clients ask less often when they read this text, and only then
            text = why.encode() if why == TOO_MANY_PINGS else b""
            self._goaway(self._last_stream, code, text)

    def _goaway(self, last_stream: int, code: int, text: bytes = b"") -> None:
        self._out += self._conn.data_to_send()
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=code, additional_data=text)
        self._out += frame.serialize()
        self._has_output = True

    def _close(self, stream_id: int, code: int) -> None:
        stream = self.streams.pop(stream_id, None)
        self._pending.pop(stream_id, None)
        if stream is not None and not stream.ended:
            self._reset_stream(stream, code)

    def _reset_stream(self, stream: Any, code: int) -> None:
        try:
            stream.reset_by_peer(code)
        except Exception:
            log.exception("on_reset of stream %d failed", stream.stream_id)

    def connection_lost(self) -> None:
        """The transport is gone: resets every open call."""
        self.dead = True
        self._pending.clear()
        for stream in list(self.streams.values()):
            self._reset_stream(stream, CANCEL)
        self.streams.clear()
        let_go(self._conn)
        self.open_stream = None  # it refers to the connection

    # ------------------------------------------------------------ output

    def output_ready(self, stream: Any) -> None:
        """To be called when a stream has something new to send: headers, data or its end."""
        self._has_output = True
        if not stream.ended and not self.dead:
            self._pending[stream.stream_id] = stream

    def reset(self, stream: Any, code: int = CANCEL) -> None:
        """Ends a call at once with RST_STREAM."""
        self._rst(stream.stream_id, code)
        if stream.stream_id not in self.streams and not stream.ended:  # it is being opened
            self._reset_stream(stream, code)
        self._close(stream.stream_id, code)

    def _rst(self, stream_id: int, code: int) -> None:
        if self.dead:
            return
        self._has_output = True
        try:
            self._conn.reset_stream(stream_id, code)
        except H2Error:
            pass  # closed already

    def resume_input(self, stream: Any) -> None:
        """Returns the flow-control credit withheld while the stream was paused."""
        stream.paused = False
        if stream.withheld and not stream.ended and not self.dead:
            size, stream.withheld = stream.withheld, 0
            self._give(stream.stream_id, size)
            self._has_output = True

    def hold(self) -> None:
        """Withholds the connection's flow-control credit: the peer can send only the rest of its window."""
        self._holding = True

    def release(self) -> None:
        """Ends hold() and returns the credit."""
        self._holding = False
        if not self.dead:
            self._return_credit()
            self._has_output = True

    def ping(self) -> None:
        """Queues a PING; `pings_acked` counts the answers."""
        if not self.dead:
            self._conn.ping(b"\0" * 8)
            self._has_output = True

    def start_drain(self) -> None:
        """Tells the peer not to open new calls; open ones go on."""
        if not self.draining and not self.dead:
            self.draining = True
            self._goaway(LAST_STREAM, NO_ERROR)

    @property
    def last_stream(self) -> int:
        """The last stream that was opened, 0: none."""
        return self._last_stream

    def finish_drain(self) -> None:
        """Sends the final GOAWAY: calls after the last one received are ignored."""
        if not self.dead:
            self._refuse_after = self._last_stream
            self._goaway(self._last_stream, NO_ERROR)

    def terminate(self, code: int) -> None:
        """Sends a GOAWAY with an error code; the session is dead once its output was sent."""
        self._fail("terminated", code)

    @property
    def wants_output(self) -> bool:
        """True when data_to_send() may return something."""
        return self._has_output

    @property
    def finished(self) -> bool:
        """True when neither side has anything more to send."""
        done = self.dead or (self._refuse_after != LAST_STREAM and not self.streams)
        return done and not self._has_output

    def data_to_send(self) -> list[Any]:
        """The buffers to send, in order; [] when there are none."""
        if not self._has_output:
            return []
        self._has_output = False
        if not self.dead:
            self._pump()
        self._out += self._conn.data_to_send()
        out, self._out = self._out, bytearray()
        return [bytes(out)] if out else []

    def _pump(self) -> None:
        """Sends a frame from each pending stream in turn, until windows or OUTPUT_BYTES are used up."""
        room = OUTPUT_BYTES
        blocked: set[int] = set()
        while len(blocked) < len(self._pending):
            for stream_id, stream in list(self._pending.items()):
                if stream_id in blocked or stream_id not in self._pending:
                    continue
                if room <= 0:
                    self._has_output = True
                    return
                try:
                    sent = self._send_some(stream_id, stream)
                except (H2Error, KeyError) as error:
                    log.debug("stream %d closed while sending: %s", stream_id, error)
                    self._close(stream_id, CANCEL)
                    continue
                if sent is None:
                    blocked.add(stream_id)
                else:
                    room -= sent + 9

    def _send_some(self, stream_id: int, stream: Any) -> int | None:
        """Sends one part of a reply. Returns the bytes sent, None when the window is closed."""
        conn = self._conn
        if not stream.headers_sent:
            stream.headers_sent = True
            self.nuisance.strikes = 0
            whole = stream.trailers is not None and not stream.out_bytes and stream.whole_head()
            if whole:
                self._end(stream_id, stream, whole)
            else:
                conn.send_headers(stream_id, stream.head())
            return 64
        if stream.out_bytes:
            n = min(conn.local_flow_control_window(stream_id), conn.max_outbound_frame_size, stream.out_bytes)
            if n <= 0:
                return None
            conn.send_data(stream_id, b"".join(stream.take(n)))
            self._work += 3
            if not stream.out_bytes and stream.trailers is None:
                try:
                    stream.on_writable()
                except Exception:
                    log.exception("stream %d failed", stream_id)
                    self._rst(stream_id, ErrorCodes.INTERNAL_ERROR)
                    self._close(stream_id, INTERNAL_ERROR)
            return int(n)
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
        del self._pending[stream_id]
        self._work += 2
        stream.over()
        if not stream.input_ended:
            self._rst(stream_id, NO_ERROR)
        self._close(stream_id, NO_ERROR)
