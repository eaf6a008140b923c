"""Who may connect: how many connections there may be, of everybody and of one address.

The problem: a connection costs its peer nothing and the server a descriptor; whoever opens enough of them
has the server without one for a health probe, the metrics page or a model's file. The choice: descriptors
above a line are kept back. A connection beyond a limit is not left waiting: it is taken on one of a few
places of its own, for TURNED_AWAY_SECONDS, where health probes are answered as always and everything else is
told to come again. While that happens, idle connections end after seconds instead of minutes.

Rules:
 1. A front asks enter() for every connection it accepts, and owes leave() for each that was let in.
 2. A descriptor's number says how many are in use: the kernel gives the lowest. Whoever opens them (models,
    their processes, files) is counted without being asked.
 3. The newest connection that is turned away takes the oldest one's place: idle ones cannot hold them.
 4. Addresses of IPv6 are counted by their /64, which is what one client has.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections import Counter
from dataclasses import dataclass

from neptrio.request.infer_request import monotonic_ns

log = logging.getLogger("neptrio.connections")

TURNED_AWAY_SECONDS = 5
PLACES = 12  # of a front, for connections that are turned away
PRESSED_SECONDS = 10  # after a connection was turned away
PRESSED_IDLE_SECONDS = 5.0
RETRY_AFTER = b"%d" % TURNED_AWAY_SECONDS
LEAST_KEPT_BACK, MOST_KEPT_BACK = 64, 512  # descriptors


def kept_back(descriptors: int) -> int:
    """How many of a process's descriptors connections may not take."""
    return min(max(LEAST_KEPT_BACK, descriptors // 8), MOST_KEPT_BACK, descriptors // 2)


def client_of(address: str) -> str:
    """Whose an address is: itself, or for IPv6 the network of one client."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Network((found, 64), strict=False))


class Places:
    """Room for a few sockets; the one that has been there longest makes way (rule 3)."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sockets: dict[socket.socket, None] = {}

    def take(self, sock: socket.socket) -> bool:
        """Gives a socket a place, or a new one behind all others; False when somebody made way for it."""
        self.free(sock)
        made_way = False
        if len(self._sockets) >= self._most:
            oldest = next(iter(self._sockets))
            del self._sockets[oldest]
            made_way = True
            try:
                oldest.shutdown(socket.SHUT_RDWR)  # whoever reads from it finds its end
            except OSError:
                pass
        self._sockets[sock] = None
        return not made_way

    def free(self, sock: socket.socket) -> None:
        """The socket's connection has ended. Harmless where it has no place."""
        self._sockets.pop(sock, None)


@dataclass(frozen=True)
class ConnectionsStatistics:
    """What there is now, and what has been."""

    open: int
    clients: int
    turned_away: int


class Connections:
    """The connections of all fronts together. Trio thread only."""

    def __init__(self, most: int = 0, of_one_client: int = 0, descriptors: int = 1 << 20) -> None:
        """`most`, `of_one_client`: 0 = as many as there are descriptors; `descriptors` the process may have."""
        self._most = most or descriptors
        self._of_one = of_one_client
        self._line = descriptors - kept_back(descriptors)
        self._open = 0
        self._clients: Counter[str] = Counter()
        self._turned_away = 0
        self._pressed_until = 0

    def enter(self, descriptor: int, address: str) -> str:
        """A connection came. "" lets it in, anything else says why it is turned away."""
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
            self._pressed_until = int(monotonic_ns()) + PRESSED_SECONDS * 10**9
        self._turned_away += 1
        log.warning("%s: turned away a connection from %s", why, address)
        return f"{why}; try again in {TURNED_AWAY_SECONDS} seconds"

    def leave(self, address: str) -> None:
        """A connection that was let in has ended."""
        client = client_of(address)
        self._open -= 1
        self._clients[client] -= 1
        if not self._clients[client]:
            del self._clients[client]

    @property
    def pressed(self) -> bool:
        """True while there are more clients than places: idle connections should end soon."""
        return int(monotonic_ns()) < self._pressed_until

    def statistics(self) -> ConnectionsStatistics:
        """What there is now."""
        return ConnectionsStatistics(self._open, len(self._clients), self._turned_away)
