"""TLS for a connection: the interface of a SocketWriter over trio's SSLStream.

Slower than the plain writer (every byte is copied by the encryption anyway): a task per connection
writes what send() has queued.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trio

from neptrio.loop.socket_writer import CONGESTED_BYTES

CHUNK_BYTES = 256 << 10


def server_context(
    certificate: Path, key: Path, client_roots: Path | None, alpn: list[str]
) -> ssl.SSLContext:
    """A server's TLS context; with `client_roots`, clients must show a certificate of theirs.

    Raises OSError or ssl.SSLError naming the file that cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise OSError(f"cannot use the certificate '{certificate}' with the key '{key}': {error}") from None
    if client_roots is not None:
        try:
            context.load_verify_locations(client_roots)
        except (OSError, ssl.SSLError) as error:
            raise OSError(f"cannot use the root certificates '{client_roots}': {error}") from None
        context.verify_mode = ssl.CERT_REQUIRED
    context.set_alpn_protocols(alpn)
    return context


class SecureSocketWriter:
    """The sending half of a TLS connection; see loop.socket_writer.SocketWriter for the rules."""

    def __init__(self, stream: trio.SSLStream[trio.SocketStream], nursery: trio.Nursery) -> None:
        self.pending = 0
        self.broken = False
        self.on_drained: Callable[[], None] = lambda: None
        self._stream = stream
        self._nursery = nursery
        self._queue: deque[Any] = deque()
        self._writing = False
        self._emptied: trio.Event | None = None

    @property
    def congested(self) -> bool:
        """True while the peer does not keep up."""
        return self.pending > CONGESTED_BYTES

    def send(self, buffers: list[Any]) -> None:
        """Queues the buffers; they leave in order."""
        if self.broken:
            return
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            for at in range(0, len(view), CHUNK_BYTES):
                self._queue.append(view[at : at + CHUNK_BYTES])
            self.pending += len(view)
        if self._queue and not self._writing:
            self._writing = True
            self._nursery.start_soon(self._write)

    async def _write(self) -> None:
        try:
            while self._queue and not self.broken:
                parts, size = [], 0
                while self._queue and size < CHUNK_BYTES:
                    parts.append(self._queue.popleft())
                    size += len(parts[-1])
                await self._stream.send_all(b"".join(parts))
                self.pending -= min(size, self.pending)
        except (OSError, trio.BrokenResourceError, trio.ClosedResourceError, ssl.SSLError):
            self.fail()
        finally:
            self._writing = False
        self._tell_empty()
        self.on_drained()

    def _tell_empty(self) -> None:
        if self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    def fail(self) -> None:
        """The peer is gone: pending output is dropped."""
        self.broken = True
        self._queue.clear()
        self.pending = 0
        self._tell_empty()

    async def drained(self) -> None:
        """Returns when everything was handed to the transport, or the writer is broken."""
        if self._writing and not self.broken:
            if self._emptied is None:
                self._emptied = trio.Event()
            await self._emptied.wait()
