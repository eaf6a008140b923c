"""The server's side of the template process (triton_python_backend_utils._process.template).

Rules:
 1. The first model that needs the template starts it. It ends LINGER seconds after the last process that was forked
    from it.
 2. A thread that never ends starts it. The kernel kills a template, and the processes forked from it, when the thread
    that started it ends (PR_SET_PDEATHSIG). They do outlive a template that is killed.
 3. If the template has ended, the next request for a process starts it again. If that fails, the caller starts a
    process in the ordinary way.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton_python_backend_utils as utils
from neptrio.backends.python.output import records
from neptrio.errors import Internal, Reason

log = logging.getLogger("neptrio.python")

PACKAGE = Path(utils.__file__).parent
BOOTSTRAP = """
import sys, importlib.util as u
sys.path[:1] = [] if sys.path[:1] == [""] else sys.path[:1]
from triton_python_backend_utils._process.template import main
main(int(sys.argv[1]))
"""
LINGER = 5.0
ANSWER_SECONDS = 30.0
SUPPORTED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


class Forked:
    """A process forked from a template; it is a child of the server. Has those parts of subprocess.Popen that are used
    here."""

    def __init__(self, pid: int, output: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdout = open(output, "rb")  # noqa: SIM115  # closed by its reader
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)

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
                    os.close(self._pidfd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits up to `timeout` seconds for its end; returns its status. Raises subprocess.TimeoutExpired."""
        with self._lock:
            if self.returncode is not None:
                return self.returncode
            pidfd = os.dup(self._pidfd)
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            if not poll.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("model", timeout or 0)
        finally:
            os.close(pidfd)
        status = self.poll()
        assert status is not None
        return status

    def kill(self) -> None:
        """SIGKILL."""
        with self._lock:
            if self.returncode is None:
                try:
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
                except ProcessLookupError:
                    pass


class Template:
    """Forks processes on request. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._users = 0
        self._timer: threading.Timer | None = None
        self._starts: queue.SimpleQueue[Callable[[], None]]
        self._starter: threading.Thread | None = None  # rule 2

    def fork(
        self, title: str, sock: int, environ: dict[str, str], limits: dict[str, Any], preload: Any = None
    ) -> Forked:
        """Forks a process that gets the socket `sock`. With `preload`, it becomes the template of one model.

        Raises OSError.
        """
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            try:
                made = self._ask(title, sock, environ, limits, preload)
            except OSError:
                self._stop()
                made = self._ask(
                    title, sock, environ, limits, preload
                )  # a template that was killed is started again
            self._users += 1
            return made

    def release(self) -> None:
        """Called when a process that was forked here has ended."""
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._timer = threading.Timer(LINGER, self._idle)
                self._timer.daemon = True
                self._timer.start()

    def _idle(self) -> None:
        with self._lock:
            if self._users == 0:
                self._stop()

    def _stop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def _ask(
        self, title: str, sock: int, environ: dict[str, str], limits: dict[str, Any], preload: Any = None
    ) -> Forked:
        if self._sock is None:
            self._start()
        assert self._sock is not None
        asked = {
            "title": title,
            "server": os.getpid(),
            "environ": environ,
            "limits": limits,
            "preload": preload,
        }
        reader, writer = os.pipe()
        try:
            socket.send_fds(self._sock, [json.dumps(asked).encode()], [sock, writer])
            answer = self._sock.recv(1 << 16)
            if not answer:
                raise ConnectionResetError("the template has ended")
            told = json.loads(answer)
            if "pid" not in told:
                raise OSError(told["error"])
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return Forked(told["pid"], reader)

    def _start(self) -> None:
        from neptrio.backends.python.limits import inherited

        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.settimeout(ANSWER_SECONDS)
        answer: queue.SimpleQueue[OSError | None] = queue.SimpleQueue()

        def start() -> None:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-c", BOOTSTRAP, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env={**inherited(), **dict.fromkeys(ONE_THREAD, "1")},
                    process_group=0,  # as in _process/template.py
                )
            except OSError as error:
                answer.put(error)
                return
            threading.Thread(target=process.wait, name="template", daemon=True).start()
            answer.put(None)

        if self._starter is None:
            self._starts = queue.SimpleQueue()
            self._starter = threading.Thread(target=self._start_for_ever, name="templates", daemon=True)
            self._starter.start()
        self._starts.put(start)
        failure = answer.get()
        theirs.close()
        try:
            if failure is not None:
                ours.close()
                raise failure
        finally:
            del failure  # which refers to this frame
        self._sock = ours

    def _start_for_ever(self) -> None:
        while True:
            self._starts.get()()


ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # rule 1 of the template
template = Template()


class ModelTemplate(Template):
    """A template that has imported one model's file and called its preload(); the model's instances are forked from it.

    It lives until close(). If it was killed, the next instance starts it again.
    """

    def __init__(
        self,
        name: str,
        preload: dict[str, Any],
        environ: dict[str, str],
        limits: dict[str, Any],
        seconds: float,
    ) -> None:
        super().__init__()
        self._name = name
        self._preload = preload
        self._environ = environ
        self._limits = limits
        self._seconds = seconds
        self._process: Forked | None = None
        self._log = logging.getLogger("neptrio.model." + name)

    def release(self) -> None:
        pass  # it does not linger

    def kill(self) -> None:
        """Kills it, because the load that waits for it was given up. Any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the template."""
        with self._lock:
            self._stop()

    def _stop(self) -> None:
        super()._stop()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            template.release()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            process = template.fork(
                f"py:{self._name}"[:12] + "...",
                theirs.fileno(),
                self._environ,
                # what it runs is the model's code as well; niceness would be added twice
                {name: self._limits[name] for name in ("memory", "user")},
                preload=self._preload,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process = process
        threading.Thread(
            target=self._output, args=(process,), name=f"{self._name}-output", daemon=True
        ).start()
        ours.settimeout(self._seconds)
        try:
            answer = json.loads(ours.recv(1 << 20) or b'{"error": "its process has ended"}')
        except TimeoutError:
            answer = {"error": f"it did not return within {self._seconds:g} s; its process was killed"}
        if "error" in answer:
            ours.close()
            self._stop()
            raise Internal(f"preload of '{self._name}' failed: {answer['error']}", reason=Reason.BACKEND)
        ours.settimeout(ANSWER_SECONDS)
        self._sock = ours

    def _output(self, process: Forked) -> None:
        for record, _ in records(process.stdout.fileno()):
            self._log.info("%s", record)
        process.stdout.close()
