"""Messages on the socket between the engine and a front end: everything but infer requests.

A frame is its kind, the number of the call that it belongs to, and bytes. Calls are numbered by the front end.

Rules:
 1. send() never waits: frames leave in order, from a task. So whoever may send much asks for leave: after each
    piece of a body, and after each message of a stream, the sender waits for NEXT (Call.room).
 2. A frame of more than MOST bytes is refused before it is read.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator
from enum import IntEnum
from typing import Any

import trio

HEAD = struct.Struct("<QII")  # id, bytes that follow, kind
MOST = (2 << 30) + (1 << 20)  # a gRPC message has at most 2 GiB
PIECE = 256 << 10  # bytes of a body that are sent at once
AHEAD = 4  # pieces that may be under way before the first is taken
RECEIVE_BYTES = 64 << 10


class Kind(IntEnum):
    """What a frame is about."""

    # to the engine
    HTTP = 1  # a whole HTTP request: u32 length of the JSON, the JSON, the body
    CALL = 2  # a gRPC call begins: JSON
    HALF_CLOSE = 3  # the client sends no more messages
    GONE = 4  # the client has gone
    KNOWN = 5  # id: the generation of the table of models that is in use now
    AUDIT = 6  # something to be recorded in the audit log: JSON
    READY = 7  # connections are accepted
    ROW = 8  # what the front end holds: JSON; id: of the last question that it has seen
    ENTER = 9  # a connection was accepted and asks to be let in: the client's address
    LEAVE = 10  # a connection that was let in has ended: the client's address
    LOG = 11  # lines that were logged: JSON, [[milliseconds, level, text], ...]
    # to the front end
    HEADERS = 16  # of an HTTP answer: JSON with status and headers; of a gRPC answer: JSON with metadata
    BODY = 17
    END = 18  # of an HTTP answer; JSON
    TRAILERS = 19  # of a gRPC answer: JSON
    TABLE = 20  # id: its generation; JSON
    DRAIN = 21
    ASK = 22  # for a ROW, now; id: of the question
    ENTERED = 23  # to an ENTER: JSON, why the connection is turned away, or ""
    PRESSED = 24  # a connection was turned away for lack of room
    REOPEN = 25  # the log's file
    CLIENTS = 26  # what --auth-config says: pickled; before the TABLE of the same generation
    # both ways
    MESSAGE = 32  # of a gRPC call
    NEXT = 33  # one more piece or message may come


class Frames:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = trio.SocketStream(trio.socket.from_stdlib_socket(sock))
        self._waiting: deque[bytes] = deque()
        self._news = trio.Event()

    def send(self, kind: Kind, number: int = 0, payload: bytes = b"") -> None:
        """Sends a frame; returns at once."""
        self._waiting.append(HEAD.pack(number, len(payload), kind))
        if payload:
            self._waiting.append(payload)
        self._news.set()

    def send_json(self, kind: Kind, number: int, document: Any) -> None:
        """Sends a frame with a document."""
        self.send(kind, number, json.dumps(document).encode())

    async def write(self) -> None:
        """Writes what is to be sent. Raises trio.BrokenResourceError at the other side's end."""
        while True:
            while self._waiting:
                parts, size = [], 0
                while self._waiting and size < PIECE:
                    part = self._waiting.popleft()
                    parts.append(part)
                    size += len(part)
                await self._stream.send_all(parts[0] if len(parts) == 1 else b"".join(parts))
            self._news = trio.Event()
            await self._news.wait()

    async def read(self) -> AsyncGenerator[tuple[int, int, bytes], None]:
        """(kind, number, payload) of each frame, until the other side has ended. Raises ValueError (rule 2)."""
        got = bytearray()
        while True:
            while len(got) < HEAD.size:
                if not await self._more(got):
                    return
            number, size, kind = HEAD.unpack_from(got)
            if size > MOST:
                raise ValueError(f"a frame of {size} bytes")
            while len(got) < HEAD.size + size:
                if not await self._more(got):
                    return
            payload = bytes(got[HEAD.size : HEAD.size + size])
            del got[: HEAD.size + size]
            yield kind, number, payload

    async def _more(self, got: bytearray) -> bool:
        try:
            data = await self._stream.receive_some(RECEIVE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            return False
        got += data
        return bool(data)

    async def close(self) -> None:
        """Closes the socket at once."""
        await trio.aclose_forcefully(self._stream)


class Room:
    """How much more may be sent before the other side has asked for it (rule 1)."""

    def __init__(self) -> None:
        self._left = AHEAD
        self._changed = trio.Event()

    def more(self) -> None:
        """NEXT has come."""
        self._left += 1
        self._changed.set()

    async def take(self) -> None:
        """Waits until one more piece may be sent."""
        while self._left <= 0:
            self._changed = trio.Event()
            await self._changed.wait()
        self._left -= 1


def texts(pairs: Any) -> list[list[str]]:
    """Headers as JSON can carry them."""
    return [[bytes(name).decode("latin-1"), bytes(value).decode("latin-1")] for name, value in pairs]


def pairs(found: Any) -> list[tuple[bytes, bytes]]:
    """Headers of what texts() made."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in found]
