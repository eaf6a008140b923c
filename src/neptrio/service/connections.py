"""Limits how many connections there may be, in total and from one address.

The problem: a connection costs its peer nothing and the server a file descriptor. Whoever opens enough of them
leaves none for a health probe, the metrics page or a model's files. The choice: connections may not use the last
descriptors of the process. A connection beyond a limit is still accepted, on one of a few places kept for
such connections and for at most TURNED_AWAY_SECONDS: health probes are answered there as always, everything
else is told to try again later. While this happens, idle connections are closed after seconds instead of minutes.

Rules:
 1. A listener calls enter() for every connection it accepts, and leave() for each that was let in.
 2. The kernel gives the lowest free number to a new descriptor, so its number tells how many are in use,
    including those of models, their processes and files.
 3. The newest connection that is turned away takes the place of the oldest one: idle ones cannot keep the places.
 4. IPv6 addresses are counted by their /64 network, which is what one client usually owns.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from neptrio.errors import Unavailable
from neptrio.request.infer_request import monotonic_ns

log = logging.getLogger("neptrio.connections")

TURNED_AWAY_SECONDS = 5
PLACES = 12  # per listener, for connections that are turned away
PRESSED_SECONDS = 10  # how long idle connections end early after one was turned away
PRESSED_IDLE_SECONDS = 5.0
LEAST_KEPT_BACK, MOST_KEPT_BACK = 64, 512  # descriptors


def kept_back(descriptors: int) -> int:
    """How many of a process's `descriptors` connections may not use."""
    return min(max(LEAST_KEPT_BACK, descriptors // 8), MOST_KEPT_BACK, descriptors // 2)


def client_of(address: str) -> str:
    """The client that an address stands for: the address itself, or for IPv6 its /64 network (rule 4)."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


class TurnedAway(Unavailable):
    """There is no room for the connection; the answer says when to try again."""

    headers = ((b"retry-after", b"%d" % TURNED_AWAY_SECONDS),)


class HeldSockets:
    """Holds a few sockets; when it is full, the one held longest is shut down to make room (rule 3)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sockets: dict[socket.socket, None] = {}

    def take(self, sock: socket.socket) -> bool:
        """Gives a socket the newest place; False when the oldest socket had to be shut down for it.

        A socket that already has a place moves to the newest.
        """
        self.free(sock)
        made_way = False
        if len(self._sockets) >= self._most:
            oldest = next(iter(self._sockets))
            del self._sockets[oldest]
            made_way = True
            try:
                oldest.shutdown(socket.SHUT_RDWR)  # its reader sees the end of the stream and closes it
            except OSError:
                pass
        self._sockets[sock] = None
        return not made_way

    def free(self, sock: socket.socket) -> None:
        """The socket's connection has ended. Does nothing when it has no place."""
        self._sockets.pop(sock, None)


@dataclass(frozen=True)
class ConnectionsStatistics:
    """How many connections there are, and how many were turned away so far."""

    open: int
    clients: int
    turned_away: int


class AcceptBalance(Protocol):
    """Where several processes accept from one listener: says whether this one is to accept the next connection."""

    def accepts_next(self) -> bool: ...


class Connections:
    """Counts the connections of all listeners together. Trio thread only."""

    balance: AcceptBalance | None = None  # None: nobody else accepts from these listeners

    def __init__(self, most: int = 0, of_one_client: int = 0, descriptors: int = 1 << 20) -> None:
        """`most`, `of_one_client`: 0 = as many as `descriptors`, which is how many this process may open."""
        self._most = most or descriptors
        self._of_one = of_one_client
        self._line = descriptors - kept_back(descriptors)
        self._open = 0
        self._clients: Counter[str] = Counter()
        self._turned_away = 0
        self._pressed_until = 0
        self.on_press: Callable[[], None] | None = (
            None  # called when a connection was turned away for lack of room
        )

    def enter(self, descriptor: int, address: str) -> str:
        """Counts a new connection. Returns "" to let it in, else the reason why it is turned away."""
        client = client_of(address)
        if descriptor >= self._line:
            return self._turn_away("the server has no descriptors left for connections", address)
        if self._open >= self._most:
            return self._turn_away(
                f"the server has its most connections, {self._most} (--max-connections)", address
            )
        if self._of_one and self._clients[client] >= self._of_one:
            why = f"this address has its most connections, {self._of_one} (--max-connections-per-address)"
            return self._turn_away(why, address, pressed=False)
        self._open += 1
        self._clients[client] += 1
        return ""

    def _turn_away(self, why: str, address: str, pressed: bool = True) -> str:
        if pressed:
            self.press()
        self._turned_away += 1
        log.warning("%s: turned away a connection from %s", why, address)
        if pressed and self.on_press is not None:
            self.on_press()
        return f"{why}; try again in {TURNED_AWAY_SECONDS} seconds"

    def press(self) -> None:
        """There is no room for connections: those that idle should end soon."""
        self._pressed_until = int(monotonic_ns()) + PRESSED_SECONDS * 10**9

    def leave(self, address: str) -> None:
        """A connection that enter() let in has ended."""
        client = client_of(address)
        self._open -= 1
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    @property
    def open(self) -> int:
        """How many were let in and have not ended."""
        return self._open

    @property
    def pressed(self) -> bool:
        """True for PRESSED_SECONDS after a connection was turned away for lack of room: idle ones should end soon."""
        return int(monotonic_ns()) < self._pressed_until

    def statistics(self) -> ConnectionsStatistics:
        """The current numbers."""
        return ConnectionsStatistics(self._open, len(self._clients), self._turned_away)
