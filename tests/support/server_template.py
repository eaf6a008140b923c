"""A process that has imported the server, from which ServerProcess forks servers.

Importing takes most of the second in which a server starts, and the suite starts hundreds of servers. So each process of
pytest has one template. A server is a child of the process of pytest all the same (clone() of the models' templates), has
its own arguments, environment and standard error, and runs `neptrio.cli.main()` as the command does.

What libraries read while they are loaded cannot be given to a process that is forked. So a server whose environment
differs in more than LATE starts the ordinary way, and every server does with NEPTRIO_TEST_TEMPLATE=0.

The package is imported in the template only: tests/clients run where it is not installed.
"""

from __future__ import annotations

import atexit
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parents[2]
# how the names of variables begin that the server reads when it needs them
LATE = ("NEPTRIO_", "TRITONSERVER_", "OTEL_", "PYTEST_", "TMPDIR", "XDG_CACHE_HOME")
# a thread of the template is missing in what it forks
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}
PACKET = 1 << 20
USED = os.environ.get("NEPTRIO_TEST_TEMPLATE") != "0" and platform.machine() in ("x86_64", "aarch64")


class Forked:
    """A process that the template has forked, with those methods of Popen that tests use."""

    def __init__(self, pid: int, stderr: TextIO) -> None:
        self.pid = pid
        self.stderr = stderr
        self.returncode: int | None = None
        self._end = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, negative for a signal, or None while it runs."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
                    os.close(self._end)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            poll = select.poll()
            poll.register(self._end, select.POLLIN)
            poll.poll(None if timeout is None else timeout * 1000)
        status = self.poll()
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("neptrio", timeout)
        return status

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Template:
    """The process of pytest's side; started with the first server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}

    def _start(self) -> None:
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", __name__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env={**os.environ, **ONE_THREAD},
            )
        self._environment = dict(os.environ)
        atexit.register(self._stop)

    def _stop(self) -> None:
        self._sock.close()
        assert self._process is not None
        self._process.wait(60)

    def fork(self, arguments: list[str], environment: dict[str, str]) -> Forked | None:
        """A server with these arguments, or None if this environment needs a process that is started anew."""
        with self._lock:
            if self._process is None:
                self._start()
            names = environment.keys() | self._environment.keys()
            differing = [name for name in names if environment.get(name) != self._environment.get(name)]
            if any(not name.startswith(LATE) for name in differing):
                return None
            ours, stderr = os.pipe()
            asked = {"arguments": arguments, "environment": environment, "folder": os.getcwd()}
            try:
                socket.send_fds(self._sock, [json.dumps(asked).encode()], [stderr])
            finally:
                os.close(stderr)
            pid = int(self._sock.recv(PACKET))
        return Forked(pid, os.fdopen(ours, encoding="utf-8"))


_template = _Template()


def start(arguments: list[str], env: dict[str, str] | None) -> Forked | None:
    """Forks `neptrio` with these arguments, or returns None where it has to be started the ordinary way."""
    return _template.fork(arguments, dict(os.environ) if env is None else env) if USED else None


def _serve(sock: socket.socket) -> list[str]:
    """Forks a process for each request until the socket is closed. Returns in the forked ones, with the arguments."""
    from triton_python_backend_utils._process.template import clone

    while True:
        data, descriptors, _, _ = socket.recv_fds(sock, PACKET, 1)
        if not data:
            sock.close()
            raise SystemExit(0)
        (stderr,) = descriptors
        pid = clone()
        if pid == 0:
            sock.close()
            os.dup2(stderr, 2)
            os.close(stderr)
            asked = json.loads(data)
            os.environ.clear()
            os.environ.update(asked["environment"])
            os.chdir(asked["folder"])
            arguments: list[str] = asked["arguments"]
            return arguments
        os.close(stderr)
        sock.send(str(pid).encode())


def _main() -> int:
    from neptrio import cli, server  # noqa: F401

    arguments = _serve(socket.socket(fileno=int(sys.argv[1])))
    sys.argv = ["neptrio", *arguments]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(_main())
