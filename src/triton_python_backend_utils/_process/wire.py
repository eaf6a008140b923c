"""The socket between the server and the process of an isolated model.

The problem: batches, answers and calls cross on rings in shared memory (ring_child.py). What is left is rare, and the
descriptors of memory cannot cross in memory. The choice: a Unix socket carries frames of JSON, with descriptors where they
are needed.

Rules:
 1. A frame is a little-endian 32-bit length and a JSON object of so many bytes. What is no JSON lies in sealed memory, whose
    descriptor comes along.
 2. send() may be called from any thread, receive() from one.
 3. Memory for a frame grows as its bytes arrive, so a length alone costs nothing; more than MOST_TEXT is refused.
 4. Nothing that the other side sends is trusted: a message takes no descriptors that have not come, and no more than
    MOST_DESCRIPTORS wait for theirs. Otherwise Broken is raised.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from .._errors import TritonModelException
from .._host import FORKED

FRAME = struct.Struct("<I")
MOST_TEXT = 64 << 20  # bytes of a frame's JSON object
FIRST_READ = 1 << 20  # bytes that are made room for before any has arrived
MOST_DESCRIPTORS = 64  # that have come and that no message has taken yet
# programs that a model or the server starts get no descriptors of ours
CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Broken(ValueError):
    """The other side sent something that the protocol does not allow."""


class Wire:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._fds: deque[int] = deque()
        self._left = False

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a message, and descriptors that receive() puts into it. Raises OSError when the other side is gone."""
        if self._left:
            raise TritonModelException(FORKED)
        if descriptors:
            message = {**message, "fds": len(descriptors)}
        text = json.dumps(message, separators=(",", ":")).encode()
        frame = FRAME.pack(len(text)) + text
        with self._lock:
            sent = 0
            if descriptors:  # Python 3.8 has no send_fds()
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
                sent = self._sock.sendmsg([frame], [rights])
            self._sock.sendall(frame[sent:])

    def leave(self) -> None:
        """The socket is another process's, which has forked this one: nothing is sent any more."""
        self._left = True

    def receive(self) -> dict[str, Any] | None:
        """The next message, in message["descriptors"] what came with it, if anything did; None at the end.

        Raises Broken, or whatever text that is no message makes Python raise (ValueError, KeyError and the like).
        """
        head = self._read(FRAME.size)
        if head is None:
            return None
        (size,) = FRAME.unpack(head)
        if size > MOST_TEXT:
            raise Broken(f"a message of {size} bytes; at most {MOST_TEXT} are read")
        text = self._read(size)
        if text is None:
            return None
        message: dict[str, Any] = json.loads(bytes(text))
        if type(message) is not dict:
            raise Broken("a message that is no object")
        message.pop("descriptors", None)
        if "fds" in message:
            if not 0 <= message["fds"] <= len(self._fds):
                raise Broken(f"{message['fds']} descriptors that have not come")
            message["descriptors"] = [self._fds.popleft() for _ in range(message["fds"])]
        return message

    def _read(self, size: int) -> bytearray | None:
        buffer, have = bytearray(min(size, FIRST_READ)), 0
        while have < size:
            if have == len(buffer):  # as much again as has arrived
                buffer.extend(bytes(min(have, size - have)))
            try:
                with memoryview(buffer) as view, view[have:] as rest:
                    n, ancillary, _, _ = self._sock.recvmsg_into([rest], 256, CLOEXEC)
            except OSError:
                return None
            for _, _, data in ancillary:
                for i in range(0, len(data) - 3, 4):
                    self._fds.append(int.from_bytes(data[i : i + 4], "little"))
            if len(self._fds) > MOST_DESCRIPTORS:
                raise Broken("descriptors without messages")
            if n == 0:
                return None
            have += n
        return buffer

    def close(self) -> None:
        """Closes the socket, and the descriptors that no message has taken."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
