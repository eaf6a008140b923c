"""The client's end of an HTTP/2 connection that carries gRPC calls, on trio and h2.

Rules:
 1. One task reads the socket; calls write under a lock, so frames of one call leave in order.
 2. When the connection is gone, every call that is open and every new one raises ConnectionLost.
 3. Who is cancelled while it sends leaves the connection as it was for the others: what is left of a frame goes before
    the next one, and a call of which a part of a message was sent is reset.
 4. A call begins when the server has said how many there may be at once, and waits while there are as many.
 5. A server that is shutting down (GOAWAY) gets no new calls, and still answers those that it has taken. h2 would end the
    connection at once, so it never sees that frame.
 6. A call that the server ends before it has all of it is reset: nobody sends the rest, and rule 4 counts it no more.
 7. Received data is acknowledged as it is read from the socket, so a call whose messages nobody takes does
    not stop the others. Its messages stay in memory.
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import unquote

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import trio

SERVICE = "/inference.GRPCInferenceService/"
RECEIVE_BYTES = 256 << 10
WINDOW = 16 << 20
FRAME_HEAD = 9  # bytes
GOAWAY = 7  # the type of that frame


class ConnectionLost(Exception):
    """The connection to the server is gone; its calls get no more messages."""


class Call:
    """One gRPC call: send() framed messages, receive() until None, then `status` and `message`."""

    def __init__(self, connection: Connection, stream_id: int) -> None:
        self.status: int | None = None
        self.message = ""
        self._connection = connection
        self._stream_id = stream_id
        self.sent = False  # all of it
        self._buffer = bytearray()
        self._push, self._pull = trio.open_memory_channel[bytes](math.inf)

    async def send(self, message: bytes, end: bool = False) -> None:
        """Sends a message. Raises ConnectionLost, also when the server has ended the call."""
        if self.status is not None:
            raise ConnectionLost(f"the server has ended the call: {self.message or self.status}")
        data = b"\0" + len(message).to_bytes(4, "big") + message
        await self._connection.send(self._stream_id, data, end)

    async def finish(self) -> None:
        """Tells the server, if it has not ended the call, that no more messages follow."""
        if self.status is None:
            await self._connection.send(self._stream_id, b"", True)

    async def receive(self) -> bytes | None:
        """The next message, None after the last one. Raises ConnectionLost."""
        try:
            return await self._pull.receive()
        except trio.EndOfChannel:
            if self.status is None:
                raise ConnectionLost(self._connection.reason) from None
            return None

    async def cancel(self) -> None:
        """Gives the call up: the server is told to stop (RST_STREAM)."""
        await self._connection.reset(self._stream_id)

    def on_data(self, data: bytes) -> None:
        """Takes in the bytes of a DATA frame. Called by the connection's reader."""
        self._buffer += data
        while len(self._buffer) >= 5:
            size = int.from_bytes(self._buffer[1:5], "big")
            if len(self._buffer) < 5 + size:
                return
            self._push.send_nowait(bytes(self._buffer[5 : 5 + size]))
            del self._buffer[: 5 + size]

    def on_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Takes in headers or trailers. Called by the connection's reader."""
        found = dict(headers)
        if b"grpc-status" in found:
            self.status = int(found[b"grpc-status"])
            self.message = unquote(found.get(b"grpc-message", b"").decode())
        elif found.get(b":status", b"200") != b"200":
            self.status, self.message = (
                2,
                f"the server answered with HTTP status {found[b':status'].decode()}",
            )

    def close(self) -> None:
        """No more frames follow for this call. Called by the connection's reader."""
        self._push.close()


class Connection:
    """One connection and its open calls. Made by open_client(); the rules are on top of this module."""

    def __init__(self, stream: trio.SocketStream, authority: str) -> None:
        self.reason = "the connection is closed"
        self._stream = stream
        self._authority = authority
        # Triton servers send status messages that end with a space, which HTTP/2 forbids
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(header_encoding=False, validate_inbound_headers=False)
        )
        self._calls: dict[int, Call] = {}
        self._cut: list[
            int
        ] = []  # streams of calls that the server has just ended, and of which there was more to send
        self._lock = trio.Lock()
        self._received = bytearray()  # the beginning of a frame
        self._going = False  # the server takes no new calls
        self._unsent = bytearray()  # of frames that are made
        self._settled = False  # the server's settings have come
        self._changed = trio.Event()  # windows, settings, or calls under way; a new one each time
        self._lost = False

    async def start(self) -> None:
        """Sends the HTTP/2 connection preface."""
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(WINDOW)
        await self._flush()

    async def call(self, method: str) -> Call:
        """Opens a call. Raises ConnectionLost."""
        self._check()
        while not self._settled or (
            self._h2.open_outbound_streams >= self._h2.remote_settings.max_concurrent_streams
        ):
            await self._changed.wait()
            self._check()
        stream_id = self._h2.get_next_available_stream_id()
        call = self._calls[stream_id] = Call(self, stream_id)
        self._h2.send_headers(
            stream_id,
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", SERVICE + method),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
            ],
        )
        self._h2.increment_flow_control_window(WINDOW, stream_id)
        try:
            await self._flush()
        except trio.Cancelled:
            await self._give_up(stream_id)
            raise
        return call

    def _check(self) -> None:
        if self._lost or self._going:
            raise ConnectionLost(self.reason)

    async def _flush(self) -> None:
        async with self._lock:
            self._unsent += self._h2.data_to_send()
            while self._unsent:
                try:
                    # not send_all(), which does not say how much went when it is cancelled
                    sent = await self._stream.socket.send(self._unsent)
                except (OSError, trio.ClosedResourceError) as error:
                    self._lose(f"the connection to {self._authority} broke: {error}")
                    raise ConnectionLost(self.reason) from None
                del self._unsent[:sent]

    def _tell(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def send(self, stream_id: int, data: bytes, end: bool) -> None:
        """Sends data of a call as fast as HTTP/2's flow control windows allow. Raises ConnectionLost."""
        try:
            await self._send(stream_id, memoryview(data), end)
        except trio.Cancelled:
            await self._give_up(stream_id)
            raise

    async def _give_up(self, stream_id: int) -> None:
        """Resets a call whose task is cancelled, for a second at most."""
        with trio.CancelScope(shield=True), trio.move_on_after(1):
            await self.reset(stream_id)

    async def _send(self, stream_id: int, view: memoryview, end: bool) -> None:
        try:
            while True:
                if self._lost:
                    raise ConnectionLost(self.reason)
                call = self._calls.get(stream_id)
                if call is None:
                    raise ConnectionLost("the server has ended the call")
                room = min(
                    self._h2.local_flow_control_window(stream_id), self._h2.max_outbound_frame_size, len(view)
                )
                if len(view) and room <= 0:
                    await self._changed.wait()
                    continue
                last = room == len(view)
                self._h2.send_data(stream_id, bytes(view[:room]), end_stream=end and last)
                call.sent = end and last
                await self._flush()
                if last:
                    return
                view = view[room:]
        except (h2.exceptions.StreamClosedError, h2.exceptions.NoSuchStreamError):
            raise ConnectionLost("the server has ended the call") from None

    async def reset(self, stream_id: int) -> None:
        """Resets a call's HTTP/2 stream if it is still open."""
        if stream_id in self._calls and not self._lost:
            self._calls.pop(stream_id).close()
            try:
                self._h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
            except h2.exceptions.ProtocolError:
                return
            self._tell()
            await self._flush()

    def _lose(self, reason: str) -> None:
        if not self._lost:
            self._lost = True
            self.reason = reason
        self._tell()
        for call in self._calls.values():
            call.close()
        self._calls.clear()

    async def run(self) -> None:
        """Reads from the socket and hands frames to their calls until the connection ends."""
        try:
            while True:
                data = await self._stream.receive_some(RECEIVE_BYTES)
                if not data:
                    self._lose(self.reason if self._going else f"{self._authority} closed the connection")
                    return
                for event in self._h2.receive_data(self._for_h2(data)):
                    self._handle(event)
                self._end_cut()
                await self._flush()
        except (trio.BrokenResourceError, trio.ClosedResourceError, h2.exceptions.ProtocolError) as error:
            self._lose(f"the connection to {self._authority} broke: {error}")
        except ConnectionLost:
            pass

    def _end_cut(self) -> None:
        """Resets the calls that the server has ended early, unless it did that itself."""
        for stream_id in self._cut:
            self._h2.reset_stream(stream_id, h2.errors.ErrorCodes.CANCEL)
        if self._cut:
            self._cut.clear()
            self._tell()

    def _for_h2(self, data: bytes) -> bytes:
        """The whole frames that have come, without GOAWAY (rule 5)."""
        self._received += data
        kept, at = bytearray(), 0
        while len(self._received) - at >= FRAME_HEAD:
            size = int.from_bytes(self._received[at : at + 3], "big")
            if size > self._h2.max_inbound_frame_size:  # which h2 is to refuse
                kept += self._received[at:]
                at = len(self._received)
                break
            end = at + FRAME_HEAD + size
            if end > len(self._received):
                break
            frame = self._received[at:end]
            at = end
            if frame[3] == GOAWAY and size >= 8:
                self._goes(
                    int.from_bytes(frame[9:13], "big") & 0x7FFFFFFF, int.from_bytes(frame[13:17], "big")
                )
            else:
                kept += frame
        del self._received[:at]
        return bytes(kept)

    def _goes(self, last: int, code: int) -> None:
        """The server takes no new calls, and has taken none behind the stream `last`."""
        why = f" (HTTP/2 error {code})" if code else ""
        self._going = True
        self.reason = f"the server at {self._authority} is shutting down{why}"
        for stream_id in [number for number in self._calls if number > last]:
            self._calls.pop(stream_id).close()
        self._tell()

    def _handle(self, event: Any) -> None:
        call = self._calls.get(getattr(event, "stream_id", None) or 0)
        if isinstance(event, h2.events.DataReceived):
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            if call is not None:
                call.on_data(event.data)
        elif isinstance(event, h2.events.StreamReset):
            if event.stream_id in self._cut:
                self._cut.remove(event.stream_id)
            if call is not None:
                call.status, call.message = 1, f"the server reset the call (HTTP/2 error {event.error_code})"
                self._calls.pop(event.stream_id).close()
            self._tell()
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self._settled = self._settled or isinstance(event, h2.events.RemoteSettingsChanged)
            self._tell()
        elif call is None:
            return
        elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            call.on_headers(event.headers)
        elif isinstance(event, h2.events.StreamEnded):
            self._calls.pop(event.stream_id).close()
            if not call.sent:
                self._cut.append(event.stream_id)
            self._tell()
