"""Listening at a path of the file system (a Unix socket), for clients on the same machine.

Rules:
 1. Nobody can connect before the socket file has its mode: the kernel refuses connections until listen() is called,
    and that comes after chmod().
 2. A socket file that a dead server left behind is replaced. One at which somebody listens is not, and neither is
    anything that is no socket.
 3. The file is removed when the server stops, unless another server has replaced it in the meantime.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from pathlib import Path

LONGEST = 107  # bytes of a path that the kernel takes


class UnixListener:
    """A listening Unix socket and its file."""

    def __init__(self, path: Path, mode: int = 0o600, backlog: int = 128) -> None:
        """Raises OSError that names the path."""
        self.path = path
        if len(os.fsencode(path)) > LONGEST:
            raise OSError(f"cannot listen on unix:{path}: the path has more than {LONGEST} bytes")
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._make_room()
            self.sock.bind(str(path))
            self._file = _identity(path)
            os.chmod(path, mode)
            self.sock.listen(backlog)
        except OSError as error:
            self.sock.close()
            raise OSError(error.errno, f"cannot listen on unix:{path}: {error.strerror or error}") from None
        self.sock.setblocking(False)

    def _make_room(self) -> None:
        """Removes a socket file at which nobody listens (rule 2)."""
        try:
            mode = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise OSError("there is something else, which is no socket")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)  # whether it is accepted does not matter
            try:
                probe.connect(str(self.path))
            except ConnectionRefusedError:
                self.path.unlink(missing_ok=True)
                return
            except FileNotFoundError:
                return
            except BlockingIOError:
                pass  # its queue is full: somebody listens
        raise OSError("another server listens there")

    def remove(self) -> None:
        """Removes the file if it is still the one that was made here (rule 3). Leaves the socket open."""
        try:
            if _identity(self.path) == self._file:
                self.path.unlink()
        except OSError:
            pass  # somebody has removed it already


def _identity(path: Path) -> tuple[int, int]:
    state = path.lstat()
    return state.st_dev, state.st_ino


def client_name(sock: socket.socket) -> str:
    """Who is at the other end of a Unix socket, for the log: the user and the process, as far as the system tells."""
    try:
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return "unix"
    return f"unix uid={uid} pid={pid}"
