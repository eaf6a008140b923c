"""The socket that a process was started with."""

from __future__ import annotations

import socket


def own_socket(descriptor: int) -> socket.socket:
    """The socket of that number, which programs that this process starts do not get."""
    sock = socket.socket(fileno=descriptor)
    sock.set_inheritable(False)
    return sock
