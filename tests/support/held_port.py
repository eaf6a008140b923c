"""Ports for programs that are told which to take, and of which one may be started again later."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port() -> Iterator[int]:
    """A free port of 127.0.0.1 that the system gives to nobody else meanwhile: who asks for this very port, and for SO_REUSEADDR as
    servers do, can listen there, since this socket does not."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
