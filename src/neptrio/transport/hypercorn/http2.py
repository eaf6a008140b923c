"""REST over HTTP/2: hypercorn's protocol, with those parts replaced through which a client could harm the server.

The problem: hypercorn 0.18's HTTP/2 raises (and ends the connection for everybody on it) when an
answer overtakes its request or a client drops a stream; it pauses no sender whose client does not
read; it runs every request that is reset at once; PRIORITY frames fill a tree that then refuses
streams; and h2 waits for a whole frame before it looks at its length. The choice: keep hypercorn's
streams (the ASGI side), its HTTP/1.1 and its life cycle, and replace what lies between h2's events
and those streams: this class.

Rules:
 1. Frames are counted before h2 parses them. Frames that cost the client less than the server are charged to a budget
    (transport.http2.limits.Nuisance). When it is overdrawn, the connection ends with GOAWAY ENHANCE_YOUR_CALM, and
    nothing of the received bytes is parsed.
 2. A frame longer than the announced limit is refused as soon as its nine-byte head has come.
 3. If h2 raises a protocol error, the connection ends with the GOAWAY that h2 wrote; after any other exception, with
    GOAWAY INTERNAL_ERROR. Other connections are not affected.
 4. A stream holds at most HIGH_WATER bytes, and one more body event, that its client has not read; its app then waits
    in send(), and holds the rest. A connection whose streams hold more than HELD_BYTES, with what their answers have announced
    and not sent yet, takes no new request.
 5. If the same received bytes open and reset a stream, its request never reaches the app. Bytes with many frames are
    handled in slices, between which trio runs other tasks.
 6. If the answer is complete before the request, the stream ends with RST_STREAM(NO_ERROR); if the answer breaks off,
    with INTERNAL_ERROR. Data that still comes for it is dropped, and its flow-control credit is returned.
 7. A client must take each UNREAD_BYTES of an answer that waits within the request timeout, or the stream ends with
    RST_STREAM(CANCEL): who opens no window would otherwise keep the answer for ever.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from typing import Any

import h2.exceptions
import h2.settings
import trio
from h2.connection import ConnectionState
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.events import (
    Body,
    EndBody,
    InformationalResponse,
    Request,
    Response,
    StreamClosed,
)
from hypercorn.protocol.h2 import H2Protocol
from hypercorn.protocol.http_stream import HTTPStream
from hypercorn.utils import filter_pseudo_headers
from hyperframe.frame import GoAwayFrame

from neptrio.request.infer_request import monotonic_ns
from neptrio.transport.http2.header_encoder import HeaderEncoder
from neptrio.transport.http2.limits import ENHANCE_YOUR_CALM, PING_COST, Nuisance

log = logging.getLogger("neptrio.rest")

MAX_STREAMS = 256
MAX_FRAME_SIZE = 64 << 10
STREAM_WINDOW = 512 << 10
CONNECTION_WINDOW = 4 << 20
MAX_HEADER_LIST = 64 << 10
HIGH_WATER = 64 << 10  # bytes of an answer that may wait for the client's window
HELD_BYTES = 32 << 20
UNREAD_BYTES = 64 << 10
RESET_COST = 8  # an opened stream costs a task
FIRST_BUDGET = 1.5 * RESET_COST * MAX_STREAMS  # a new connection may reset all streams that it may open
SLICE = 32  # frames handled before other tasks run; a request counts as REQUEST_WEIGHT
REQUEST_WEIGHT = 4
SETTINGS_COST = 10
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, CONTINUATION = 0, 1, 2, 3, 4, 6, 9
COSTS = {RST_STREAM: RESET_COST, SETTINGS: SETTINGS_COST, PING: PING_COST, HEADERS: 0, CONTINUATION: 0}
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE_BYTES = 24
LAST_STREAM = 2**31 - 1


class FrameTooLarge(Exception):
    """A frame is longer than our SETTINGS allow."""


class FrameTracker:
    """Finds where frames begin and end in the bytes of a connection, and counts what they cost. Keeps no bytes."""

    def __init__(self, max_frame_size: int = MAX_FRAME_SIZE) -> None:
        self.complete = 0  # frames so far; a header block of several frames counts as one
        self._max = max_frame_size
        self._preface = PREFACE_BYTES
        self._head = bytearray()
        self._left = 0
        self._block = False  # a header block has begun and not ended
        self._kind = self._flags = 0
        self._weight = 0  # of the frames since the last cut
        self.cuts: list[int] = []  # where to cut the last fed bytes into slices
        self.resets: set[int] = set()  # streams that the last fed bytes reset

    @property
    def partial(self) -> bool:
        """True in the middle of a frame or of a header block."""
        return bool(self._head) or self._left > 0 or self._block

    def feed(self, data: bytes) -> int:
        """Takes the connection's next bytes; returns what their frames cost of the budget. Raises FrameTooLarge."""
        at = min(self._preface, len(data))
        self._preface -= at
        cost = 0
        self.cuts = []
        self.resets = set()
        while at < len(data):
            if self._left:
                step = min(self._left, len(data) - at)
                self._left -= step
                at += step
            else:
                step = min(9 - len(self._head), len(data) - at)
                self._head += data[at : at + step]
                at += step
                if len(self._head) < 9:
                    return cost
                self._left = int.from_bytes(self._head[:3], "big")
                if self._left > self._max:
                    raise FrameTooLarge(f"a frame of {self._left} bytes, the limit is {self._max}")
                self._kind, self._flags = self._head[3], self._head[4]
                if self._kind == RST_STREAM:
                    self.resets.add(int.from_bytes(self._head[5:9], "big") & LAST_STREAM)
                self._head.clear()
                cost += self._cost()
            if not self._left:
                if self._kind == HEADERS and not self._flags & END_HEADERS:
                    self._block = True
                elif self._kind == CONTINUATION and self._flags & END_HEADERS:
                    self._block = False
                self.complete += not self._block
                self._weight += REQUEST_WEIGHT if self._kind == HEADERS else 1
                if self._weight >= SLICE:
                    self._weight = 0
                    self.cuts.append(at)
        return cost

    def _cost(self) -> int:
        if self._kind == DATA:
            return 0 if self._left or self._flags & END_STREAM else 1
        if self._kind == SETTINGS and self._flags & ACK:
            return 1
        return COSTS.get(self._kind, 1)


class Outbox:
    """The part of an answer's body that waits until the client's flow-control window has room."""

    def __init__(self, unread_s: float = math.inf) -> None:
        """`unread_s`: seconds within which the client must take each UNREAD_BYTES, or all that waits."""
        self.size = 0  # bytes that wait
        self.stalled = False  # the client has not
        self._unread_s = unread_s
        self._taken = 0
        self.announced = 0  # bytes of the answer that its app has yet to give
        self.complete = False
        self.input_ended = False
        self.closed = False
        self._parts: deque[memoryview] = deque()
        self._moved = trio.Event()

    def moved(self) -> None:
        """Wakes push() and drained(), because bytes were sent or the stream has ended."""
        self._moved.set()
        self._moved = trio.Event()

    def close(self) -> None:
        """Ends the stream: drops what waits, and wakes push() and drained()."""
        self.closed = True
        self._parts.clear()
        self.size = self.announced = 0
        self.moved()

    def take(self, limit: int) -> bytes:
        """Removes up to `limit` bytes from the front."""
        first = self._parts[0]
        part = bytes(first[:limit])
        if len(first) > limit:
            self._parts[0] = first[limit:]
        else:
            self._parts.popleft()
        self.size -= len(part)
        self._taken += len(part)
        return part

    async def push(self, data: bytes) -> None:
        """Adds to the body; waits while more than HIGH_WATER bytes are unsent."""
        if not self.closed and data:
            self._parts.append(memoryview(data))
            self.size += len(data)
            self.announced = max(0, self.announced - len(data))
        await self._until(lambda: self.size <= HIGH_WATER)

    async def drained(self) -> None:
        """Returns when the whole answer is sent or the stream has ended."""
        await self._until(lambda: False)

    async def _until(self, reached: Callable[[], bool]) -> None:
        """Waits until then, or until the stream has ended, or is `stalled`."""
        renewed = self._taken
        with trio.CancelScope(deadline=trio.current_time() + self._unread_s) as scope:
            while not (reached() or self.closed):
                await self._moved.wait()
                if self._taken - renewed >= UNREAD_BYTES:
                    renewed = self._taken
                    scope.deadline = trio.current_time() + self._unread_s
        self.stalled = self.stalled or scope.cancelled_caught


class Http2(H2Protocol):
    """One connection; hypercorn calls initiate() and handle(), its streams call stream_send()."""

    unread_s = math.inf  # rule 7

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.connection.encoder = HeaderEncoder()
        codes = h2.settings.SettingCodes
        self.connection.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: MAX_STREAMS,
                codes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                codes.MAX_FRAME_SIZE: MAX_FRAME_SIZE,
                codes.MAX_HEADER_LIST_SIZE: MAX_HEADER_LIST,
            },
        )
        self.connection.max_inbound_frame_size = MAX_FRAME_SIZE
        self.connection.decoder.max_header_list_size = MAX_HEADER_LIST
        self.frames = FrameTracker()
        self.outboxes: dict[int, Outbox] = {}
        self._nuisance = Nuisance()
        self._nuisance.budget = FIRST_BUDGET
        self._work = 0
        self._last_stream = 0
        self._last_call = False  # the final GOAWAY is sent: no new stream is taken
        self._answered = trio.Event()  # the client has answered our PING

    @property
    def idle(self) -> bool:
        return not self.streams

    @property
    def partial_input(self) -> int | None:
        """A number that identifies the frame or header block that is incomplete now; None if there is none."""
        return self.frames.complete if self.frames.partial else None

    def held_bytes(self) -> int:
        """Bytes of answers that wait for the client, here or with the app."""
        return sum(outbox.size + outbox.announced for outbox in self.outboxes.values())

    async def initiate(
        self, headers: list[tuple[bytes, bytes]] | None = None, settings: bytes | None = None
    ) -> None:
        await super().initiate(headers, settings)
        self.connection.increment_flow_control_window(CONNECTION_WINDOW - 65535)
        await self._flush()

    async def goodbye(self) -> None:
        """Sends GOAWAY before the server ends an idle connection."""
        if self._last_call:
            return  # drain() has sent it
        if self.connection.state_machine.state is not ConnectionState.CLOSED:
            self.connection.close_connection()
        await self._flush()

    async def drain(self, grace_s: float) -> None:
        """Sends GOAWAY twice, so that streams which the client opened before it saw the first are served (RFC 9113, 6.8).

        Returns after the second: when the client has answered a PING, or after `grace_s` seconds.
        """
        if self.closed or self.connection.state_machine.state is ConnectionState.CLOSED:
            return
        self.connection.ping(b"draining")
        await self._go_away(LAST_STREAM)
        with trio.move_on_after(grace_s):
            await self._answered.wait()
        self._last_call = True
        await self._go_away(self._last_stream)

    async def _go_away(self, last_stream: int) -> None:
        """Sends a GOAWAY past h2, which would otherwise take the connection for ended."""
        frame = GoAwayFrame(0, last_stream_id=last_stream, error_code=ErrorCodes.NO_ERROR).serialize()
        await self.send(RawData(data=self.connection.data_to_send() + frame))

    # ------------------------------------------------------------ input

    async def handle(self, event: Event) -> None:
        if isinstance(event, RawData):
            if event.data and not self.closed:
                await self._input(event.data)
        elif isinstance(event, Closed):
            self.closed = True
            for stream_id in list(self.streams):
                await self._close_stream(stream_id)
            for outbox in self.outboxes.values():
                outbox.close()
            self.outboxes.clear()
            await self.has_data.set()

    async def _input(self, data: bytes) -> None:
        self._nuisance.refill(int(monotonic_ns()), self._work)
        self._work = 0
        try:
            cost = self.frames.feed(data)
            if cost and not self._nuisance.spend(cost):
                await self._fail(ENHANCE_YOUR_CALM, "too many control frames")
                return
            at = 0
            for cut in (*self.frames.cuts, len(data)):
                if at and at < cut:
                    await trio.lowlevel.checkpoint()
                if at < cut and not self.closed:
                    await self._handle_events(self.connection.receive_data(data[at:cut]))
                at = cut
        except FrameTooLarge as error:
            await self._fail(ErrorCodes.FRAME_SIZE_ERROR, str(error))
        except h2.exceptions.ProtocolError as error:
            await self._fail(error.error_code, str(error))
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            raise
        except Exception as error:
            await self._fail(ErrorCodes.INTERNAL_ERROR, f"{type(error).__name__}: {error}")

    async def _fail(self, code: int, why: str) -> None:
        """Ends the connection with GOAWAY (h2 may have written it already)."""
        log.info("an HTTP/2 connection ended: %s", why)
        data = self.connection.data_to_send()
        if self.connection.state_machine.state is not ConnectionState.CLOSED:
            data += GoAwayFrame(0, last_stream_id=self._last_stream, error_code=code).serialize()
        await self.send(RawData(data=data))
        await self.send(Closed())

    async def _handle_events(self, events: list[Any]) -> None:
        undone = self.frames.resets
        for event in events:
            if isinstance(event, RequestReceived):
                self._last_stream = max(self._last_stream, event.stream_id)
                if event.stream_id not in undone:
                    await self._request(event)
            elif isinstance(event, DataReceived):
                stream = self.streams.get(event.stream_id)
                if stream is not None:
                    await stream.handle(Body(stream_id=event.stream_id, data=event.data))
                self.connection.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, StreamEnded):
                outbox = self.outboxes.get(event.stream_id)
                if outbox is not None:
                    outbox.input_ended = True
                if event.stream_id in self.streams:
                    await self.streams[event.stream_id].handle(EndBody(stream_id=event.stream_id))
            elif isinstance(event, StreamReset):
                self._forget(event.stream_id)
                await self._close_stream(event.stream_id)
            elif isinstance(event, (WindowUpdated, RemoteSettingsChanged)):
                await self.has_data.set()
            elif isinstance(event, PingAckReceived):
                self._answered.set()
            elif isinstance(event, ConnectionTerminated):
                await self.send(Closed())
        await self._flush()

    async def _request(self, event: RequestReceived) -> None:
        stream_id: Any = event.stream_id
        if self._last_call or self.held_bytes() > HELD_BYTES:
            self.connection.reset_stream(stream_id, ErrorCodes.REFUSED_STREAM)
            return
        await self._create_stream(event)
        await self.send(Updated(idle=False))

    async def _create_stream(self, request: RequestReceived) -> None:
        stream_id: Any = request.stream_id
        fields: Any = request.headers
        found = dict(fields)
        path = found.get(b":path", b"")
        if not path.isascii() or found[b":method"] == b"CONNECT":
            self.connection.reset_stream(stream_id, ErrorCodes.PROTOCOL_ERROR)
            return
        stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            stream_id,
        )
        self.streams[stream_id] = stream
        outbox = self.outboxes[stream_id] = Outbox(self.unread_s)
        outbox.input_ended = request.stream_ended is not None
        await stream.handle(
            Request(
                stream_id=stream_id,
                headers=filter_pseudo_headers(fields),
                http_version="2",
                method=found[b":method"].decode("latin-1").upper(),
                raw_path=path,
                state=self.connection_state,
            )
        )

    # ------------------------------------------------------------ output

    async def stream_send(self, event: Any) -> None:
        """Called by hypercorn's stream with each event of its answer."""
        try:
            if isinstance(event, (InformationalResponse, Response)):
                status = [(b":status", b"%d" % event.status_code)]
                self.connection.send_headers(event.stream_id, status + event.headers)
                self.outboxes[event.stream_id].announced = _announced(event.headers)
                self._work += 2
                await self._flush()
            elif isinstance(event, Body):
                await self.has_data.set()
                outbox = self.outboxes[event.stream_id]
                await outbox.push(event.data)
                await self._end_stalled(event.stream_id, outbox)
            elif isinstance(event, EndBody):
                outbox = self.outboxes[event.stream_id]
                outbox.complete = True
                outbox.announced = 0
                await self.has_data.set()
                await outbox.drained()
                await self._end_stalled(event.stream_id, outbox)
            elif isinstance(event, StreamClosed):
                await self._finish(event.stream_id)
        except (KeyError, h2.exceptions.ProtocolError):
            pass  # the stream or the connection has ended; the app gets a disconnect event

    async def _end_stalled(self, stream_id: int, outbox: Outbox) -> None:
        """Ends a stream whose client does not read (rule 7)."""
        if outbox.stalled and not outbox.closed:
            log.info("an HTTP/2 stream ended: its client does not read")
            self._forget(stream_id)
            self.connection.reset_stream(stream_id, ErrorCodes.CANCEL)
            await self._close_stream(stream_id)
            await self._flush()

    async def _finish(self, stream_id: int) -> None:
        if stream_id in self.outboxes and not self.closed:  # the answer broke off
            self._forget(stream_id)
            self.connection.reset_stream(stream_id, ErrorCodes.INTERNAL_ERROR)
            await self._flush()
        await self._close_stream(stream_id)
        if self.idle and self._last_call:
            await self.send(Closed())
        else:
            await self.send(Updated(idle=self.idle))

    async def send_task(self) -> None:
        """Sends one frame of each stream in turn, while flow control allows any."""
        while not self.closed:
            progress = False
            for stream_id, outbox in list(self.outboxes.items()):
                try:
                    sent = self._send_some(stream_id, outbox)
                except (KeyError, h2.exceptions.ProtocolError):
                    self._forget(stream_id)
                    continue
                if sent:
                    progress = True
                    self._work += 3
                    await self._flush()
            if not progress:
                await self.has_data.wait()
                await self.has_data.clear()

    def _send_some(self, stream_id: int, outbox: Outbox) -> bool:
        """Sends one frame of a stream. False if it has nothing to send or its window is full."""
        if outbox.closed or not (outbox.size or outbox.complete):
            return False
        connection = self.connection
        if outbox.size:
            room = min(
                connection.local_flow_control_window(stream_id),
                connection.max_outbound_frame_size,
                MAX_FRAME_SIZE,
            )
            if room <= 0:
                return False
            part = outbox.take(room)
            connection.send_data(stream_id, part, end_stream=outbox.complete and not outbox.size)
        else:
            connection.end_stream(stream_id)
        if outbox.complete and not outbox.size:
            if not outbox.input_ended:
                connection.reset_stream(stream_id, ErrorCodes.NO_ERROR)
            self._forget(stream_id)
        else:
            outbox.moved()
        return True

    def _forget(self, stream_id: int) -> None:
        outbox = self.outboxes.pop(stream_id, None)
        if outbox is not None:
            outbox.close()


def _announced(headers: list[tuple[bytes, bytes]]) -> int:
    """The bytes of a body, as its headers announce it; 0 if they do not."""
    return next((int(value) for name, value in headers if name == b"content-length"), 0)
