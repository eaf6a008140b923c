"""Accepts new connections on one port.

Rules:
 1. `handle(sock, address)` starts the connection and must not block; the socket belongs to it from then on. It returns
    whether there was room for the connection: after a few without room, other tasks run before more are accepted.
 2. stop() first accepts everybody who has already connected and then closes the listener, because closing it resets
    connections that were not accepted.
 3. When no descriptor is left, one that is kept for this purpose is closed for a moment: connections are accepted and
    closed, so that they do not wait for ever and do not keep the loop busy.
 4. Connections that do not leave this machine are not paced (see same_machine).
 5. Where other processes accept from the same listener, an AcceptBalance says whose turn it is. Who has not stands back for
    PASSES passes of the loop, then for STAND_BACK_SECONDS, and accepts what is still there then.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable

import trio

from neptrio.loop import open_files
from neptrio.service.connections import AcceptBalance
from neptrio.transport.same_machine import paces, unpace

log = logging.getLogger("neptrio.connections")

AT_ONCE = 64  # connections accepted before other tasks run
TURNED_AWAY_AT_ONCE = 4
PASSES = 20  # of the loop: others that are awake have had their turn by then
STAND_BACK_SECONDS = 0.001
PAUSE_SECONDS = 0.1  # between attempts while there are no descriptors
NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts connections until it is stopped."""

    def __init__(
        self,
        listener: socket.socket,
        handle: Callable[[socket.socket, str], bool],
        balance: AcceptBalance | None = None,
    ) -> None:
        """`balance`: None where nobody else accepts from this listener."""
        self._listener = listener
        self._handle = handle
        self._balance = balance
        self._stopped = False
        self._spare = _spare()
        self._paces = paces(listener)
        listener.setblocking(False)

    async def run(self) -> None:
        """Accepts until stop() is called or it is cancelled; then closes the listener."""
        try:
            while not self._stopped:
                await trio.lowlevel.wait_readable(self._listener)
                await self._stand_back()
                try:
                    self._take()
                except OSError as error:
                    if self._stopped:
                        return
                    if error.errno in NONE_LEFT:
                        self._close_some()
                    log.warning("%s: connections are closed as they come", error.strerror)
                    await trio.sleep(PAUSE_SECONDS)
        except trio.ClosedResourceError:
            pass
        finally:
            self._stopped = True
            self._listener.close()
            self._give_up_spare()

    async def _stand_back(self) -> None:
        """Gives those whose turn it is the time to accept what waits."""
        balance = self._balance
        if balance is None or balance.accepts_next():
            return
        for _ in range(PASSES):
            await trio.lowlevel.checkpoint()
            if self._stopped or balance.accepts_next():
                return
        await trio.sleep(STAND_BACK_SECONDS)

    def stop(self) -> None:
        """Accepts everybody who has already connected, and nobody after that."""
        if self._stopped:
            return
        self._stopped = True
        try:
            while self._take():
                pass
        except OSError:
            pass  # no descriptors are left, so they cannot be served
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()

    def _take(self) -> int:
        """Accepts some of the waiting connections; returns how many. Raises OSError when no descriptors are left."""
        turned_away = 0
        balance = None if self._stopped else self._balance
        for taken in range(AT_ONCE):
            if taken and balance is not None and not balance.accepts_next():
                return taken
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return taken
            except ConnectionError:
                continue  # the peer left before it was accepted
            sock.setblocking(False)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._paces and address:
                unpace(sock, str(address[0]))
            turned_away += not self._handle(sock, str(address[0]) if address else "")
            if turned_away == TURNED_AWAY_AT_ONCE:
                return taken + 1
        return AT_ONCE

    def _close_some(self) -> None:
        """Does what rule 3 says, unless a thread opens files at this moment: then the next try does it."""
        if not open_files.taking.acquire(blocking=False):
            return
        try:
            self._give_up_spare()
            try:
                for _ in range(AT_ONCE):
                    self._listener.accept()[0].close()
            except OSError:
                pass  # nobody is left, or somebody else took the descriptor
            self._spare = _spare()
        finally:
            open_files.taking.release()

    def _give_up_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _spare() -> int:
    """Opens the descriptor that is kept for rule 3; -1 when there is none left."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
