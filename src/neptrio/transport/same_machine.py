"""Connections between processes of one machine are not paced.

Problem: a machine may have BBR as its congestion control (`sysctl net.ipv4.tcp_congestion_control`), which suits long
ways. It sends at the rate it has measured, by a timer for every few segments, also to a client on the same machine,
where nothing can be congested: the timers take a quarter of the processors' time of an answer of 1 MiB.

Choice: where that is the machine's choice, connections that never leave it get Reno, which every Linux has, which every
user may choose, and which only slows down when something is lost. All other connections stay as the machine wants them.
"""

from __future__ import annotations

import socket

PACING = b"bbr"  # and its later versions, bbr2 and bbr3
PLAIN = b"reno"
_LONGEST_NAME = 16  # bytes, TCP_CA_NAME_MAX of Linux


def paces(listener: socket.socket) -> bool:
    """Whether connections that `listener` accepts would be paced; False where nobody can tell."""
    if listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        chosen = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _LONGEST_NAME)
        return chosen.startswith(PACING)
    except OSError:
        return False


def stays(address: str, own: str) -> bool:
    """Whether a connection from `address` to `own`, both IP addresses, stays on this machine."""
    address, own = (text.removeprefix("::ffff:") for text in (address, own))
    return address.startswith("127.") or address == own


def unpace(sock: socket.socket, address: str) -> None:
    """Ends pacing on an accepted connection from `address` if it stays on this machine."""
    try:
        if stays(address, str(sock.getsockname()[0])):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, PLAIN)
    except OSError:
        pass  # it is only slower so
