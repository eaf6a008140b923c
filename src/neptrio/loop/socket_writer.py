"""Writes to a non-blocking socket: answers are sent at once, and what the kernel does not take follows later.

The problem: sending each answer through trio's streams costs a checkpoint and a task switch.
The choice: flush() tries the socket directly from wherever the answer was made; what is left the poller
sends (loop/pending_output.py), or a task where there is no poller that could. Bytes leave in the order they were given.
The system call is in cext/loop/socket_writer_core.

Rules:
 1. send() never blocks and never raises. When the peer is gone, output is dropped and `broken` is True.
 2. The poller or one task sends what is pending, never both.
 3. The callers bound the `pending` bytes: they check `congested` before they produce more.
 4. No more than a MiB, or a little more if that is all, is given to the kernel before others are served: it is
    copied there. When somebody waits already, it is 256 KiB.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import trio

from neptrio.loop.slices import waiting_descriptor
from neptrio.loop.socket_writer_core import CONGESTED_BYTES, SocketWriterCore

if TYPE_CHECKING:
    from neptrio.loop.poller import Poller

RESET = struct.pack("ii", 1, 0)  # of SO_LINGER: to close is to reset

__all__ = ["CONGESTED_BYTES", "SocketWriter", "listen"]


class SocketWriter(SocketWriterCore):
    """The sending half of a connection."""

    def __init__(
        self, sock: socket.socket, start: Callable[[Any], None], poller: Poller | None = None
    ) -> None:
        """`start(task)` starts a task, such as a nursery's start_soon()."""
        super().__init__(sock, waiting_descriptor())
        self.on_drained: Callable[[], None] = nothing
        self._start = start
        self._poller = poller
        self._number = sock.fileno()
        self._writing = False
        self._emptied: trio.Event | None = None
        self._seen_taken = 0
        self._seen_ns = 0
        self._taken = 0  # pending bytes that the kernel has taken so far, in total

    def stalled(self, now_ns: int, limit_ns: int) -> bool:
        """True when the peer has taken no pending byte for `limit_ns`. To be called regularly.

        The time counts from the first call that found nothing taken since the call before it, so an answer that was
        only just made does not count against the peer.
        """
        if not self.pending or self._taken != self._seen_taken or not self._seen_ns:
            self._seen_taken = self._taken
            self._seen_ns = now_ns if self.pending else 0
            return False
        return now_ns - self._seen_ns > limit_ns

    def write_later(self) -> None:
        if self.queue and not self._writing:
            self._writing = True
            outputs = self._poller.outputs if self._poller is not None else None
            if outputs is not None:
                outputs.add(self._number, self)
            else:
                self.write_by_task()

    def write(self) -> bool:
        """Sends a portion of what is pending; False when nothing is left. For the poller."""
        if self.queue:
            sent = self.send_pending()
            if sent < 0:
                self.fail()
            else:
                self._taken += sent
        if self.queue or self.refill():
            return True
        self._writing = False
        self._tell_empty()
        self.on_drained()
        return False

    def refill(self) -> bool:
        """Called when the queue is empty: puts into it what follows, for writers that make their bytes as the kernel takes
        them. False when there is nothing."""
        return False

    def write_by_task(self) -> None:
        """Has a task send what is pending."""
        self._start(self._write)

    async def _write(self) -> None:
        try:
            while (self.queue or self.refill()) and not self.broken:
                sent = self.send_pending()
                if sent < 0:
                    self.fail()
                    break
                self._taken += sent
                if self.full:
                    await trio.lowlevel.wait_writable(self.sock)
                else:
                    await trio.lowlevel.checkpoint()  # then others have their turn
        except (OSError, trio.ClosedResourceError):
            self.fail()
        finally:
            self._writing = False
        if not self.queue:
            self._tell_empty()
        self.on_drained()

    def _tell_empty(self) -> None:
        if self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    def fail(self) -> None:
        """Drops pending output: the peer is gone, or the socket will be closed."""
        super().fail()
        if self._writing and self._poller is not None and self._poller.outputs is not None:
            self._poller.outputs.drop(self._number, self)
        self._tell_empty()

    def give_up(self) -> None:
        """The peer does not read, and the socket will be closed for it: what the kernel has taken is dropped, too. Otherwise
        it would be kept there, some MiB, until a peer that may never read it has."""
        try:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        except OSError:  # it is closed
            pass
        self.fail()

    def let_go(self) -> None:
        """The connection has ended: forgets it, which would otherwise live until the collector finds both."""
        self.on_drained = self._start = nothing

    async def drained(self) -> None:
        """Returns when the kernel has taken everything, or the writer is broken."""
        if self.queue and not self.broken:
            if self._emptied is None:
                self._emptied = trio.Event()
            await self._emptied.wait()


def nothing(*_: Any) -> None:
    """Nobody hears of it."""


def listen(address: str, port: int, backlog: int = 4096, reuse_port: bool = False) -> socket.socket:
    """A listening TCP socket. Raises OSError naming the address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((address, port))
        sock.listen(backlog)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {address}:{port}: {error.strerror}") from None
    sock.setblocking(False)
    return sock
