"""Connections between processes of one machine: not paced, and where that is better for all others, not as fast as they can.

Problem: a machine may have BBR as its congestion control (`sysctl net.ipv4.tcp_congestion_control`), which suits long
ways. It sends at the rate it has measured, by a timer for every few segments, also to a client on the same machine,
where nothing can be congested: the timers take a quarter of the processors' time of an answer of 1 MiB.

Choice: where that is the machine's choice, connections that never leave it get Reno, which every Linux has, which every
user may choose, and which only slows down when something is lost. All other connections stay as the machine wants them.

Problem: the system lets a client on the same machine put many MiB of a body into its connection at once. It does so inside
the kernel, which takes the core from nobody there for a millisecond and more, while the loop keeps the other core to take
them out. A worker will read that body for far longer than this takes, so nobody is served sooner for it, but everybody
else waits.

Choice: while such a body comes, the connection holds BOUND bytes: its client sleeps and wakes several times per millisecond,
and others have the cores in between. Bodies that are used as they are (binary tensors) come as fast as they can.
"""

from __future__ import annotations

import socket
import sys

PACING = b"bbr"  # and its later versions, bbr2 and bbr3
PLAIN = b"reno"
_LONGEST_NAME = 16  # bytes, TCP_CA_NAME_MAX of Linux
BOUND = 128 << 10  # bytes; Linux makes twice as many of it, for what surrounds them
_UNLOCK = 72  # SO_BUF_LOCK of Linux 5.16: 0 lets the system choose the size again
_CONGESTION = getattr(socket, "TCP_CONGESTION", None)  # not everywhere


def paces(listener: socket.socket) -> bool:
    """Whether connections that `listener` accepts would be paced; False where nobody can tell."""
    if _CONGESTION is None or listener.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return listener.getsockopt(socket.IPPROTO_TCP, _CONGESTION, _LONGEST_NAME).startswith(PACING)
    except OSError:
        return False


def stays(address: str, own: str) -> bool:
    """Whether a connection from `address` to `own`, both IP addresses, stays on this machine."""
    address, own = (text.removeprefix("::ffff:") for text in (address, own))
    return address.startswith("127.") or address == own


def unpace(sock: socket.socket, address: str) -> None:
    """Ends pacing on an accepted connection from `address` if it stays on this machine."""
    try:
        if _CONGESTION is not None and stays(address, str(sock.getsockname()[0])):
            sock.setsockopt(socket.IPPROTO_TCP, _CONGESTION, PLAIN)
    except OSError:
        pass  # it is only slower so


def bound(sock: socket.socket, bounded: bool) -> None:
    """Has a connection hold little of what comes, or as much as the system thinks best, if it stays on this machine."""
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or not sys.platform.startswith("linux"):
            return
        if not stays(str(sock.getpeername()[0]), str(sock.getsockname()[0])):
            return
        if bounded:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BOUND)
        else:
            sock.setsockopt(socket.SOL_SOCKET, _UNLOCK, 0)
    except OSError:
        pass  # an older kernel; the connection works as well
