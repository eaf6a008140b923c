"""An HTTP/2 client that works with frames: it sends exactly what a test says, valid or not."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Iterable
from typing import Any

from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
# the server may share its process and the GIL with this client, and be busy with a thousand calls before it answers one;
# only a failing test waits so long
SILENCE_SECONDS = 300


def frame(kind: int, flags: int, stream_id: int, payload: bytes = b"") -> bytes:
    """The bytes of a frame, which need not be a valid one."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream_id) + payload


def message(body: bytes, flag: int = 0) -> bytes:
    """A gRPC message with its 5-byte frame header."""
    return bytes([flag]) + struct.pack(">I", len(body)) + body


class Reply:
    """What was received on one stream."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.data = bytearray()
        self.ended = False
        self.reset: int | None = None

    @property
    def done(self) -> bool:
        return self.ended or self.reset is not None

    @property
    def status(self) -> int:
        """grpc-status of the trailers."""
        return int(self.headers[-1]["grpc-status"])

    @property
    def text(self) -> str:
        """grpc-message of the trailers."""
        return self.headers[-1].get("grpc-message", "")

    @property
    def messages(self) -> list[bytes]:
        """Message bodies received so far."""
        found, at = [], 0
        while at + 5 <= len(self.data):
            (n,) = struct.unpack_from(">I", self.data, at + 1)
            if at + 5 + n > len(self.data):
                break
            found.append(bytes(self.data[at + 5 : at + 5 + n]))
            at += 5 + n
        return found


class RawClient:
    """A connection, which sends SETTINGS at once. `replies[stream_id]` fills as frames are read. `ends` are the ids of streams
    in the order in which the server ended them: threads of other clients may tell of two answers in another order.

    `credit`: send WINDOW_UPDATE frames for what was read, as clients do.
    """

    def __init__(
        self,
        address: str,
        *,
        settings: dict[int, int] | None = None,
        credit: bool = True,
        preface: bool = True,
    ) -> None:
        host, _, port = address.rpartition(":")
        self.sock = socket.create_connection((host, int(port)), timeout=SILENCE_SECONDS)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.authority = address
        self.replies: dict[int, Reply] = {}
        self.frames: list[Frame] = []
        self.ends: list[int] = []
        self.goaway: GoAwayFrame | None = None
        self.closed = False
        self.server_settings: dict[int, int] = {}
        self.credit = credit
        self.encoder = Encoder()
        self._decoder = Decoder()
        self._decoder.max_allowed_table_size = 4096
        self._buffer = bytearray()
        self.acks = 0
        if preface:
            self.send(PREFACE + SettingsFrame(0, settings=settings or {}).serialize())
            self.until(lambda: self.server_settings, "the server's SETTINGS: its windows hold from then on")

    # ------------------------------------------------------------ sending

    def send(self, data: bytes) -> None:
        """Sends bytes as they are."""
        self.sock.sendall(data)

    def headers(
        self,
        stream_id: int,
        path: str = INFER,
        extra: Iterable[tuple[str, str]] = (),
        end: bool = False,
        override: dict[str, str | None] | None = None,
    ) -> bytes:
        """A HEADERS frame of a gRPC request; `override` changes or (None) leaves out a header."""
        fields: dict[str, str | None] = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": self.authority,
            "te": "trailers",
            "content-type": "application/grpc",
            "user-agent": "raw",
            **(override or {}),
        }
        block = self.encoder.encode([*((k, v) for k, v in fields.items() if v is not None), *extra])
        self.replies[stream_id] = Reply()
        return frame(1, 0x4 | (1 if end else 0), stream_id, block)

    def data(self, stream_id: int, payload: bytes, end: bool = True, size: int = 16384) -> bytes:
        """The payload as DATA frames of at most `size` bytes."""
        parts = [payload[i : i + size] for i in range(0, len(payload), size)] or [b""]
        return b"".join(
            frame(0, 1 if end and i == len(parts) - 1 else 0, stream_id, part) for i, part in enumerate(parts)
        )

    def start(
        self, stream_id: int, body: bytes, path: str = INFER, extra: Iterable[tuple[str, str]] = ()
    ) -> None:
        """A whole unary request."""
        self.send(self.headers(stream_id, path, extra) + self.data(stream_id, message(body)))

    def call(
        self, stream_id: int, body: bytes, path: str = INFER, extra: Iterable[tuple[str, str]] = ()
    ) -> Reply:
        """A whole unary call."""
        self.start(stream_id, body, path, extra)
        return self.finish(stream_id)

    def reset(self, stream_id: int, code: int = 8) -> None:
        """RST_STREAM."""
        self.send(RstStreamFrame(stream_id, error_code=code).serialize())

    def window(self, stream_id: int, size: int) -> None:
        """WINDOW_UPDATE."""
        self.send(WindowUpdateFrame(stream_id, window_increment=size).serialize())

    def ping(self, payload: bytes = b"12345678") -> None:
        """PING."""
        self.send(PingFrame(0, opaque_data=payload).serialize())

    def sync(self) -> None:
        """Returns once the server has handled everything sent before."""
        seen = self.acks
        self.ping()
        self.until(lambda: self.acks > seen, "the answer to a PING")

    # ------------------------------------------------------------ receiving

    def read(self) -> list[Frame]:
        """Blocks for some bytes; handles and returns the frames that are complete. [] at the end."""
        if self.closed:
            return []
        while True:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionError:
                data = b""
            if not data:
                self.closed = True
                return []
            self._buffer += data
            found = self._parse()
            if found:
                return found

    def _parse(self) -> list[Frame]:
        found: list[Frame] = []
        at = 0
        while len(self._buffer) - at >= 9:
            made, length = Frame.parse_frame_header(memoryview(self._buffer)[at : at + 9])
            if len(self._buffer) - at < 9 + length:
                break
            made.parse_body(memoryview(self._buffer[at + 9 : at + 9 + length]))
            at += 9 + length
            self.handle(made)
            found.append(made)
        del self._buffer[:at]
        return found

    def handle(self, got: Frame) -> None:
        """Notes and answers a frame; a test that puts another function here has a client that does neither."""
        if not isinstance(got, DataFrame):
            self.frames.append(got)
        reply = self.replies.setdefault(got.stream_id, Reply()) if got.stream_id else None
        if isinstance(got, HeadersFrame) and reply is not None:
            reply.headers.append(dict(self._decoder.decode(got.data)))
            reply.ended = reply.ended or "END_STREAM" in got.flags
        elif isinstance(got, DataFrame) and reply is not None:
            reply.data += got.data
            reply.ended = reply.ended or "END_STREAM" in got.flags
            if self.credit and got.flow_controlled_length:
                back = WindowUpdateFrame(0, window_increment=got.flow_controlled_length).serialize()
                if not reply.ended:
                    back += WindowUpdateFrame(
                        got.stream_id, window_increment=got.flow_controlled_length
                    ).serialize()
                self._answer(back)
        elif isinstance(got, RstStreamFrame) and reply is not None:
            reply.reset = got.error_code
        elif isinstance(got, SettingsFrame):
            if "ACK" not in got.flags:
                self.server_settings.update(got.settings)
                self._answer(SettingsFrame(0, flags=["ACK"]).serialize())
        elif isinstance(got, PingFrame):
            if "ACK" in got.flags:
                self.acks += 1
            else:
                self._answer(PingFrame(0, flags=["ACK"], opaque_data=got.opaque_data).serialize())
        elif isinstance(got, GoAwayFrame):
            self.goaway = got
        if reply is not None and reply.ended and got.stream_id not in self.ends[-1:]:
            self.ends.append(got.stream_id)

    def _answer(self, data: bytes) -> None:
        """Sends a reply to frames that were read. Ignores a closed connection: its last bytes are still to be read."""
        try:
            self.send(data)
        except ConnectionError:
            pass

    def until(self, condition: Callable[[], Any], what: str = "") -> None:
        """Reads until `condition()` holds; AssertionError at the end of the connection or after SILENCE_SECONDS."""
        while not condition():
            try:
                alive = self.read()
            except TimeoutError:
                alive = []
            if not alive:
                assert condition(), (
                    f"the connection ended or fell silent before: {what}; GOAWAY {self.goaway}"
                )

    def finish(self, stream_id: int) -> Reply:
        """Reads until the stream has ended."""
        reply = self.replies[stream_id]
        self.until(lambda: reply.done, f"the end of stream {stream_id}")
        return reply

    def until_closed(self) -> None:
        """Reads until the server closes the connection."""
        while not self.closed:
            self.read()

    def close(self) -> None:
        self.sock.close()

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
