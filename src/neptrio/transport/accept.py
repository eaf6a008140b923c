"""New connections of one port.

Rules:
 1. `handle(sock, address)` starts the connection and must not block; the socket is its own from then on. It
    returns whether there is room for more: after a few that it had none for, the others have their turn.
 2. stop() takes whoever has connected already before it closes the listener: closing resets those.
 3. Where no descriptor is left, one that is held for this is given up for a moment: connections are taken
    and closed, so that they neither wait for ever nor keep the loop awake.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Callable

import trio

log = logging.getLogger("neptrio.connections")

AT_ONCE = 64  # connections that are taken before other tasks have their turn
TURNED_AWAY_AT_ONCE = 4
PAUSE_SECONDS = 0.1  # without descriptors
NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class Acceptor:
    """Accepts until it is stopped."""

    def __init__(self, listener: socket.socket, handle: Callable[[socket.socket, str], bool]) -> None:
        self._listener = listener
        self._handle = handle
        self._stopped = False
        self._spare = _spare()
        listener.setblocking(False)

    async def run(self) -> None:
        """Accepts until stop() or until it is cancelled; the listener is closed then."""
        try:
            while not self._stopped:
                await trio.lowlevel.wait_readable(self._listener)
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

    def stop(self) -> None:
        """Takes whoever has connected, and nobody after that."""
        if self._stopped:
            return
        self._stopped = True
        try:
            while self._take():
                pass
        except OSError:
            pass  # out of descriptors: they cannot be served
        trio.lowlevel.notify_closing(self._listener)
        self._listener.close()

    def _take(self) -> int:
        """Accepts some of those who wait; how many. Raises OSError when there are no descriptors."""
        turned_away = 0
        for taken in range(AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return taken
            except ConnectionError:
                continue  # gone before it was looked at
            sock.setblocking(False)
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            turned_away += not self._handle(sock, str(address[0]) if address else "")
            if turned_away == TURNED_AWAY_AT_ONCE:
                return taken + 1
        return AT_ONCE

    def _close_some(self) -> None:
        """Rule 3."""
        self._give_up_spare()
        try:
            for _ in range(AT_ONCE):
                self._listener.accept()[0].close()
        except OSError:
            pass  # nobody is left, or somebody else took the descriptor
        self._spare = _spare()

    def _give_up_spare(self) -> None:
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _spare() -> int:
    """A descriptor that can be given up; -1 when there is none."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1
