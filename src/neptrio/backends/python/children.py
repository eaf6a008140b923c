"""Child processes of the server that run a model's code: their status, their end, their pidfd.

Rules:
 1. A pidfd is opened once, when the child begins, and closed by close(): nothing that happens later needs another.
 2. Which process a template has forked is said by the kernel, not by the template: the process sends a byte, and the
    kernel adds who has sent it (Birth). It is then known to be a child of the server, and none that had ended. It does
    nothing before it is told to go on.
 3. A child that cannot be watched is killed before anybody learns of it.
 4. The status of every child is read: of those that nobody waits for by loop.process_ends.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import threading
from typing import Any

from neptrio.loop import process_ends
from neptrio.loop.process_ends import ends

CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group


class _Child:
    pidfd = -1

    def close(self) -> None:
        """Closes the pidfd of a child that has ended."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)


class Forked(_Child):
    """A process forked from a template; it is a child of the server. Has those parts of subprocess.Popen that are used
    here."""

    def __init__(self, pid: int, output: int | None = None) -> None:
        """`pid` is a child of the server whose status nobody has read; `output` the descriptor to read its output from.

        Raises OSError; the child is killed then, and `output` still open."""
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()
        try:
            self.pidfd = process_ends.opened(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        # closed by its reader
        self.stdout: Any = None if output is None else open(output, "rb")  # noqa: SIM115

    def poll(self) -> int | None:
        """The exit status as subprocess gives it, None while the process runs."""
        with self._lock:
            if self.returncode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # other code has waited for it
                    pid, status = self.pid, 0
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits up to `timeout` seconds for its end; returns its status. Raises subprocess.TimeoutExpired."""
        if not process_ends.wait(self, timeout):
            raise subprocess.TimeoutExpired("model", timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        """SIGKILL."""
        with self._lock:
            if self.returncode is not None:
                return
            try:
                if self.pidfd >= 0:
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                else:
                    os.kill(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


class Started(_Child, subprocess.Popen[bytes]):
    """A process of a program of its own."""

    def begin(self) -> None:
        """To be called first. Raises OSError; the process is killed then."""
        try:
            self.pidfd = process_ends.opened(self.pid)
        except OSError:
            self.kill()
            self.wait()
            raise


class Birth:
    """Says which process was forked; `theirs` is what the template passes to it (rule 2)."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: how long to wait for the process. Raises OSError."""
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            self._ours.settimeout(seconds)
        except OSError:
            self.close()
            raise

    def fileno(self) -> int:
        """It can be read when child() does not wait."""
        return self._ours.fileno()

    def sent(self) -> None:
        """The template has `theirs`; the end of the process is now noticed here."""
        self.theirs.close()

    def child(self) -> int:
        """Waits for the process; returns its id. Raises OSError if it has ended, or is no child of the server."""
        pid = _sender(self._ours)
        if pid is None:
            raise ConnectionResetError("the forked process has ended at once")
        if not _is_child(pid):
            raise ConnectionResetError(f"process {pid}, which the template gave, is no child of the server")
        self._ours.send(b"g", socket.MSG_NOSIGNAL)
        return pid

    def give_up(self) -> None:
        """Nobody will wait for the process: it is killed now, or when it says that it is there, and its status is read. To
        be called after an error."""
        ends.reap(_Unwanted(self._ours))

    def close(self) -> None:
        """Closes both ends."""
        self._ours.close()
        self.theirs.close()


class _Unwanted:
    """A process whose birth was given up, as process_ends watches it: by the socket on which it says that it is there, which
    the kernel closes when it has ended."""

    def __init__(self, sock: socket.socket) -> None:
        """Takes the socket over."""
        sock.setblocking(False)
        self._sock = socket.socket(fileno=sock.detach())
        self.pidfd = self._sock.fileno()
        self._pid = 0

    def poll(self) -> int | None:
        """Kills it once it is known; its status, None until that was read. 0 if there is no such process."""
        if not self._pid:
            try:
                pid = _sender(self._sock)
            except BlockingIOError:
                return None
            except OSError:
                pid = None
            if pid is None or not _is_child(pid):
                return 0
            os.kill(pid, signal.SIGKILL)
            self._pid = pid
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # other code has waited for it
            return 0
        return status if pid else None

    def close(self) -> None:
        """Lets go of the socket."""
        self._sock.close()


def _sender(sock: socket.socket) -> int | None:
    """Who has sent a byte; None if nobody will. Raises OSError."""
    data, ancillary, _, _ = sock.recvmsg(1, socket.CMSG_SPACE(CREDENTIALS.size))
    for level, kind, value in ancillary:
        if data and (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            return int(CREDENTIALS.unpack_from(value)[0])
    return None


def _is_child(pid: int) -> bool:
    """Whether it is a child of the server whose status nobody has read."""
    if pid <= 0:
        return False
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True
