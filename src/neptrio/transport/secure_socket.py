"""TLS between a socket and its connection: the same calls as for a plain socket, with OpenSSL in between.

The problem: a connection over TLS that reads through a task of its own takes another, slower road than a plain one, and
whatever is written for one is missing on the other. The choice: OpenSSL works on memory (ssl.MemoryBIO). The poller
tells of the socket as of any other; what comes is decrypted into the buffer that plain connections receive into, and
what is sent is encrypted in front of the ordinary SocketWriter. So a connection does not know which of both it has.

Rules:
 1. receive() is receive() of loop.socket_writer_core: bytes in the thread's buffer, 0 at the end, -1 when there is nothing now.
 2. Decrypted bytes may be left although the socket has nothing to read. `more` says so, and whoever waits for the socket
    must have called receive() until it is False.
 3. One receive() reads from the socket at most once, so other connections have their turn.
 4. Records leave in the order in which they were made: those that OpenSSL makes by itself (tickets, answers to key
    updates, alerts) as well as the writer's, because one queue takes both.
 5. A peer that has OpenSSL make more than OWN_BYTES of records and does not read is done with: each of its key updates asks
    for one, and nobody else would bound them.
 6. Bytes to send are encrypted as the socket takes them, PORTION at a time: a large answer neither holds up the loop nor
    exists twice.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import trio

from neptrio.loop.socket_writer import SocketWriter
from neptrio.loop.socket_writer_core import RECEIVE_BYTES, received_view

if TYPE_CHECKING:
    from neptrio.loop.poller import Poller

HANDSHAKE_BYTES = 16 << 10  # received at once before the client has been let in
PORTION = 256 << 10  # bytes encrypted at once: a fraction of a millisecond
AT_ONCE = 1 << 20  # most bytes that one send() encrypts when the socket takes all
# for a client that speaks HTTP without TLS here, and would see an end without a word
_PLAIN_HTTP = b"This port speaks TLS: use https://\n"
PLAIN_HTTP = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
    % (len(_PLAIN_HTTP), _PLAIN_HTTP)
)
OWN_BYTES = 64 << 10  # most bytes of records that OpenSSL makes by itself while the peer takes none


class SecureSocket:
    """The server's side of TLS on a connected, non-blocking socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext) -> None:
        self.sock = sock
        self.more = False  # receive() may return something although the socket has nothing to read
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._ssl: Any = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._early = b""  # decrypted by look()
        self._ended = self._said_end = False
        self._writer: SecureSocketWriter | None = None

    # ------------------------------------------------------------ the handshake

    async def handshake(self) -> None:
        """Makes the handshake. Raises OSError (ssl.SSLError is one) when the client leaves or is not let in."""
        while True:
            try:
                self._ssl.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._flush()
            except ssl.SSLError as error:
                with trio.move_on_after(1):
                    if error.reason == "HTTP_REQUEST":
                        await self._send(memoryview(PLAIN_HTTP))
                    else:
                        await self._flush()  # the alert that says why
                raise
            await trio.lowlevel.wait_readable(self.sock)
            try:
                data = self.sock.recv(HANDSHAKE_BYTES)
            except (BlockingIOError, InterruptedError):
                continue
            if not data:
                raise ConnectionResetError("the client left during the TLS handshake")
            self._incoming.write(data)
        await self._flush()
        self.more = True  # the client's first request may have come together with the end of its handshake

    async def _flush(self) -> None:
        await self._send(memoryview(self._outgoing.read()))

    async def _send(self, data: memoryview) -> None:
        while data:
            try:
                data = data[self.sock.send(data) :]
            except (BlockingIOError, InterruptedError):
                await trio.lowlevel.wait_writable(self.sock)

    @property
    def protocol(self) -> str:
        """What ALPN has chosen, "" if nothing."""
        return self._ssl.selected_alpn_protocol() or ""

    def client_certificate(self) -> Any:
        """What the client has shown, as ssl.SSLSocket.getpeercert() returns it."""
        return self._ssl.getpeercert()

    # ------------------------------------------------------------ input

    def receive(self, most: int = RECEIVE_BYTES) -> int:
        """Decrypts up to `most` bytes into the thread's buffer (rules 1 to 3). Raises OSError when the connection is broken."""
        if self._early:
            early, self._early = self._early[:most], self._early[most:]
            received_view()[: len(early)] = early
            return len(early)
        if self.more:
            n = self._read(most)
            if n >= 0:
                return n
        if not self._pull(RECEIVE_BYTES):
            return -1
        return self._read(most)

    def _pull(self, most: int) -> bool:
        """Reads from the socket once; False when there is nothing now."""
        view = received_view()
        try:
            n = self.sock.recv_into(view, min(most, len(view)))
        except (BlockingIOError, InterruptedError):
            return False
        if n:
            self._incoming.write(view[:n])
        else:
            self._incoming.write_eof()
        self.more = True
        return True

    def _read(self, most: int) -> int:
        """Decrypts what OpenSSL was given: several records, as far as there are."""
        view, size = received_view(), 0
        if self._ended:
            return 0
        most = min(most, len(view))  # into nothing OpenSSL reads nothing, which would look like the end
        try:
            while size < most:
                n = self._ssl.read(most - size, view[size:])
                if n == 0:
                    self._ended = True
                    break
                size += n
        except ssl.SSLWantReadError:
            self.more = False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            self._ended = True  # without the closing alert, too: HTTP says itself where its messages end
        except ssl.SSLError:
            self._say()
            raise
        self._say()
        if size:
            return size
        return 0 if self._ended else -1

    def _say(self) -> None:
        """Sends what OpenSSL has to say by itself (rule 4). Raises OSError for a peer that does not read it (rule 5)."""
        if self._outgoing.pending and self._writer is not None:
            self._writer.send_records()

    def look(self) -> bool:
        """Receives a little; whether the peer has ended its side. What it has sent is kept for receive()."""
        if not self._early and not self._ended:
            n = self.receive(HANDSHAKE_BYTES)
            if n > 0:
                self._early = bytes(received_view()[:n])
        if self._early:
            self.more = True
        return self._ended and not self._early

    # ------------------------------------------------------------ output

    def writer(self, start: Callable[[Any], None], poller: Poller | None) -> SecureSocketWriter:
        """The connection's writer; there is one."""
        self._writer = SecureSocketWriter(self, start, poller)
        return self._writer

    def encrypt(self, data: Any) -> None:
        """Encrypts bytes; records() has the result. Raises ssl.SSLError."""
        self._ssl.write(data)

    def records(self) -> bytes:
        """The records that were made and not yet taken."""
        return self._outgoing.read()

    def say_end(self) -> None:
        """Sends the alert that tells the peer that nothing more follows, behind what waits to be sent; once."""
        if self._said_end:
            return
        self._said_end = True
        try:
            self._ssl.unwrap()
        except (ssl.SSLError, ValueError, OSError):
            pass  # the peer's own alert is not waited for
        with suppress(OSError):
            self._say()

    def let_go(self) -> None:
        """The connection has ended: ends that this and its writer refer to each other."""
        self._writer = None


class SecureSocketWriter(SocketWriter):
    """The sending half of a TLS connection. `pending` counts what is not encrypted yet as well."""

    def __init__(self, secure: SecureSocket, start: Callable[[Any], None], poller: Poller | None) -> None:
        super().__init__(secure.sock, start, poller)
        self._secure = secure
        self._own = 0  # bytes that send_records() was given since the socket last took all
        self._plain: deque[memoryview] = (
            deque()
        )  # not encrypted: only while encrypted bytes wait in the queue

    def send(self, buffers: list[Any]) -> None:
        """Encrypts and sends the buffers in order, now as far as the socket takes them, the rest later."""
        if self.broken or not buffers:
            return
        if len(buffers) == 1 and not self.queue and len(buffers[0]) <= PORTION and type(buffers[0]) is bytes:
            if buffers[0]:
                try:
                    self._secure.encrypt(buffers[0])
                except ssl.SSLError:
                    self.fail()
                    return
                super().send([self._secure.records()])
            return
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            if len(view):
                self._plain.append(view)
                self.pending += len(view)
        sent = 0
        while not self.queue and not self.broken and sent < AT_ONCE:
            records = self._encrypted()
            if not records:
                return
            sent += len(records)
            super().send([records])
        if not self.queue and self.refill():
            self.write_later()

    def send_records(self) -> None:
        """Sends records that OpenSSL has made by itself. Raises OSError where that are too many for a peer that does not read."""
        records = self._secure.records()
        self._own = self._own + len(records) if self.queue else 0
        if self._own > OWN_BYTES:
            self.give_up()
            raise ConnectionAbortedError("the peer asks for records of TLS and does not read")
        super().send([records])

    def refill(self) -> bool:
        if self.broken or not self._plain:
            return False
        records = self._encrypted()
        if records:
            self.append([records])
        return bool(records)

    def _encrypted(self) -> bytes:
        """The records of the next PORTION of bytes; b"" when there are none, or the connection has just failed."""
        parts: list[memoryview] = []
        size = 0
        while self._plain and size < PORTION:
            first = self._plain.popleft()
            if len(first) > PORTION - size:
                self._plain.appendleft(first[PORTION - size :])
                first = first[: PORTION - size]
            parts.append(first)
            size += len(first)
        self.pending -= size
        if not size:
            return b""
        try:
            # one call makes as few records as possible
            self._secure.encrypt(parts[0] if len(parts) == 1 else b"".join(parts))
        except ssl.SSLError:
            self.fail()
            return b""
        return self._secure.records()

    def fail(self) -> None:
        self._plain.clear()
        super().fail()
