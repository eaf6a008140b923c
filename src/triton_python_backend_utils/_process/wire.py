"""The socket protocol between the server and the process of an isolated model.

The problem: requests and responses cross between processes. Large tensors must not be copied through a socket, and
shared memory must neither leak nor be reused while an array still uses it. The choice: a Unix socket carries frames of
JSON followed by small tensors. Large tensors lie in anonymous shared memory, whose descriptors are sent on the socket.

Rules:
 1. A frame is two little-endian 32-bit lengths (JSON, blob), the JSON object, the blob.
 2. A segment (a piece of shared memory) belongs to the side that made it. The other side maps it, and sends "free" when
    the last array in it is deleted; only then may the owner use it again.
 3. Segments have no names, so the kernel frees their memory when both processes have ended, whatever happened.
 4. Freed segments are kept for reuse up to IDLE_BYTES; beyond that both sides drop them.
 5. send() may be called from any thread, receive() from one. Finalizers (__del__) never block: the thread that holds
    the lock sends what they freed.
 6. Memory for a frame grows as its bytes arrive, so a length alone costs nothing; more than MOST_TEXT or MOST_BLOB is
    refused.
 7. Nothing that the other side sends is trusted. A segment must have the announced size and be sealed against
    shrinking, because reading beyond its end kills the reader. A tensor must lie within its segment. Otherwise Broken
    is raised.
"""

from __future__ import annotations

import array
import fcntl
import json
import mmap
import os
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .reserved import reserve

INLINE_BYTES = 32 << 10  # tensors up to this size travel in the frame
SMALLEST_SEGMENT = 64 << 10
IDLE_BYTES = 64 << 20
FRAME = struct.Struct("<II")
MOST_TEXT = 64 << 20  # bytes of a frame's JSON object
MOST_BLOB = 1 << 30  # and of its small tensors
FIRST_READ = 1 << 20  # bytes that are made room for before any has arrived
MOST_SEGMENTS = 4096  # of the other side's that are mapped: each holds a descriptor
MOST_DESCRIPTORS = 64  # that have come and that no message has taken yet
SEALED = hasattr(os, "memfd_create")
# the kernel's numbers: the module fcntl has their names from Python 3.9 on
F_ADD_SEALS, F_GET_SEALS = 1033, 1034
CLOEXEC = getattr(
    socket, "MSG_CMSG_CLOEXEC", 0
)  # programs that a model or the server starts get no descriptors of ours
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


class Broken(ValueError):
    """The other side sent something that the protocol does not allow."""


def sealed_memory(size: int) -> int:
    """Makes `size` bytes of anonymous shared memory that keeps its size; returns its descriptor. Linux only."""
    fd = os.memfd_create("model-tensor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        reserve(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _memory(size: int) -> int:
    """Makes `size` bytes of anonymous shared memory; returns its descriptor."""
    if SEALED:
        fd = sealed_memory(size)
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
        os.ftruncate(fd, size)
    return fd


def _check(fd: int, size: int) -> None:
    """Raises Broken if the other side's memory is shorter than `size` bytes or could be shortened."""
    try:
        kept = not SEALED or bool(fcntl.fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK)
    except OSError:
        kept = False
    if not kept:
        raise Broken("a segment that is not sealed")
    if type(size) is not int or not 0 < size <= os.fstat(fd).st_size:
        raise Broken(f"a segment that does not have {size} bytes")


class Segment:
    """One piece of shared memory."""

    def __init__(self, id: int, fd: int, size: int) -> None:
        self.id = id
        self.size = size
        self._map = mmap.mmap(fd, size)
        self.array = np.frombuffer(self._map, dtype=np.uint8)


class Lease:
    """Keeps the memory of a received tensor. When it is deleted, the owner may reuse the memory."""

    def __init__(self, wire: Wire, segment: Segment, size: int) -> None:
        self._wire = wire
        self._segment = segment
        self.nbytes = size
        self.address = int(segment.array.__array_interface__["data"][0])

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "typestr": "|u1", "shape": (self.nbytes,), "data": (self.address, False)}

    def __del__(self) -> None:
        self._wire.free(self._segment.id)


class Wire:
    """One end of the socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._freed: deque[int] = deque()
        self._next = 0
        self._idle: dict[int, list[Segment]] = {}
        self._idle_bytes = 0
        self._used: dict[int, Segment] = {}
        self._theirs: dict[int, Segment] = {}
        self._fds: deque[int] = deque()
        self._pool = threading.Lock()

    # ------------------------------------------------------------ sending

    def send(self, message: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Sends a message. `rows` are its tensors as tensor_row() made them, parts of `message`.

        Raises OSError when the other side is gone.
        """
        with self._lock:
            blobs, at = [], 0
            for row in rows:
                data = row.pop("data")
                if len(data) <= INLINE_BYTES:
                    row["at"] = [at, len(data)]
                    blobs.append(data)
                    at += len(data)
                else:
                    segment = self._take(len(data))
                    segment.array[: len(data)] = data
                    row["seg"] = [segment.id, len(data)]
            self._write(message, blobs, at)
        self._announce()

    def _take(self, size: int) -> Segment:
        room = SMALLEST_SEGMENT
        while room < size:
            room *= 2
        with self._pool:
            idle = self._idle.get(room)
            if idle:
                segment = idle.pop()
                self._idle_bytes -= room
                self._used[segment.id] = segment
                return segment
        fd = _memory(room)
        try:
            self._next += 1
            segment = Segment(self._next, fd, room)
            self._used[segment.id] = segment
            self._write({"t": "segment", "id": segment.id, "size": room}, [], 0, [fd])
        finally:
            os.close(fd)
        return segment

    def _write(
        self, message: dict[str, Any], blobs: list[Any], blob_bytes: int, fds: Sequence[int] = ()
    ) -> None:
        freed = []
        while self._freed:
            freed.append(self._freed.popleft())
        if freed:
            message["free"] = freed
        text = json.dumps(message, separators=(",", ":")).encode()
        head = FRAME.pack(len(text), blob_bytes) + text
        sent = 0
        if fds:
            rights = (
                socket.SOL_SOCKET,
                socket.SCM_RIGHTS,
                array.array("i", fds),
            )  # Python 3.8 has no send_fds()
            sent = self._sock.sendmsg([head], [rights])
        self._sock.sendall(head[sent:])
        if blobs:
            self._sock.sendall(b"".join(bytes(blob) for blob in blobs))

    def send_descriptors(self, message: dict[str, Any], descriptors: list[int]) -> None:
        """Sends a message without tensors, and descriptors that receive() puts into it.

        Raises OSError when the other side is gone.
        """
        with self._lock:
            self._write({**message, "fds": len(descriptors)}, [], 0, descriptors)
        self._announce()

    def free(self, id: int) -> None:
        """Called when the last array in a received segment is deleted. Does not wait for the lock."""
        self._freed.append(id)
        self._announce()

    def _announce(self) -> None:
        while self._freed and self._lock.acquire(blocking=False):
            try:
                self._write({"t": "free"}, [], 0)
            except OSError:  # the other side is gone, and its memory with it
                self._freed.clear()
            finally:
                self._lock.release()

    # ------------------------------------------------------------ receiving

    def receive(self) -> dict[str, Any] | None:
        """The next message, its small tensors' memory in message["blob"]; None at the end.

        Raises Broken, or whatever text that is no message makes Python raise (ValueError, KeyError and the like).
        """
        while True:
            head = self._read(FRAME.size)
            if head is None:
                return None
            text_bytes, blob_bytes = FRAME.unpack(head)
            if text_bytes > MOST_TEXT or blob_bytes > MOST_BLOB:
                raise Broken(
                    f"a message of {text_bytes} and {blob_bytes} bytes; at most {MOST_TEXT} and {MOST_BLOB} are read"
                )
            text = self._read(text_bytes)
            blob = self._read(blob_bytes)
            if text is None or blob is None:
                return None
            message: dict[str, Any] = json.loads(bytes(text))
            if type(message) is not dict:
                raise Broken("a message that is no object")
            for id in message.pop("free", ()):
                self._reuse(id)
            kind = message["t"]
            if kind == "segment":
                fd = self._descriptor()
                try:
                    _check(fd, message["size"])
                    if len(self._theirs) >= MOST_SEGMENTS:
                        raise Broken(f"more than {MOST_SEGMENTS} segments")
                    self._theirs[message["id"]] = Segment(message["id"], fd, message["size"])
                finally:
                    os.close(fd)
            elif kind == "drop":
                self._theirs.pop(message["id"], None)
            elif kind != "free":
                if "fds" in message:
                    if not 0 <= message["fds"] <= len(self._fds):
                        raise Broken(f"{message['fds']} descriptors that have not come")
                    message["descriptors"] = [self._fds.popleft() for _ in range(message["fds"])]
                message["blob"] = blob
                return message

    def _descriptor(self) -> int:
        if not self._fds:
            raise Broken("a descriptor that has not come")
        return self._fds.popleft()

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

    def _reuse(self, id: int) -> None:
        dropped = False
        with self._pool:
            segment = self._used.pop(id, None)
            if segment is None:
                return
            if self._idle_bytes + segment.size <= IDLE_BYTES:
                self._idle.setdefault(segment.size, []).append(segment)
                self._idle_bytes += segment.size
            else:
                dropped = True
        if dropped:
            threading.Thread(target=self._drop, args=(id,), daemon=True).start()

    def _drop(self, id: int) -> None:
        try:
            self.send({"t": "drop", "id": id}, [])
        except OSError:
            pass

    def memory(self, row: dict[str, Any], blob: bytearray) -> Any:
        """A received tensor's memory: a Lease, or a writable memoryview of its own bytes."""
        if "seg" in row:
            id, size = row["seg"]
            segment = self._theirs.get(id)
            if segment is None or not 0 <= size <= segment.size:
                raise Broken(f"a tensor of {size} bytes outside of its segment")
            return Lease(self, segment, size)
        at, size = row["at"]
        if not (0 <= at <= len(blob) and 0 <= size <= len(blob) - at):
            raise Broken(f"a tensor of {size} bytes outside of its message")
        return memoryview(blob)[at : at + size]

    def statistics(self) -> dict[str, int]:
        """Segments of ours in use and idle, and theirs that are mapped."""
        with self._pool:
            return {
                "used": len(self._used),
                "idle": sum(len(v) for v in self._idle.values()),
                "theirs": len(self._theirs),
            }

    def close(self) -> None:
        """Closes the socket and forgets the segments; arrays that are still held stay valid."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._sock.close()
        while self._fds:
            os.close(self._fds.popleft())
        with self._pool:
            self._idle.clear()
            self._used.clear()
            self._theirs.clear()
            self._idle_bytes = 0


def tensor_row(name: str, dtype: int, shape: Any, data: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A tensor of a message that is to be sent; `data` is a flat uint8 array or bytes."""
    row = {"n": name, "d": dtype, "s": list(shape), "data": data}
    rows.append(row)
    return row
