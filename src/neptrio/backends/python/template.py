"""The server's side of the template process (triton_python_backend_utils._process.template).

Rules:
 1. The first model that needs the template starts it. It ends LINGER seconds after the last process that was forked
    from it.
 2. A thread that outlives all that was forked from it starts it; that of the general template never ends. The kernel kills
    a template, and the processes forked from it, when the thread that started it ends (PR_SET_PDEATHSIG). They do outlive a
    template that is killed.
 3. If the template has ended, or does not answer within ANSWER_SECONDS, the next request for a process starts it again.
    If that fails, the caller starts a process in the ordinary way.
 4. A template is not believed: that of a model runs the model's code. Which process it has forked, the kernel says
    (children.Birth).
 5. A process that ends waits for nobody who waits for the template: its requests fail only once its end is told.
 6. The template belongs to the process that has started it. One that this process has forked starts its own.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton_python_backend_utils as utils
from neptrio.backends.python.children import Birth, Forked, Started
from neptrio.backends.python.printed_lines import records
from neptrio.errors import Internal, Reason
from neptrio.foreign import summary, text_of
from neptrio.loop import threads
from neptrio.loop.process_ends import HAS_PIDFDS, ends

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
SUPPORTED = sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") and HAS_PIDFDS


def _never() -> bool:
    """Somebody waits until the end."""
    return False


class Template:
    """Forks processes on request. Any thread."""

    rings = "compiled"  # the end of the rings that its processes have (triton_python_backend_utils._process)
    output: int | None = None  # where what it prints itself goes, None: where the server's goes

    _running: Started | None = None

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Called in a process that was forked (rule 6): the threads of its parent that may hold the locks are not there."""
        running, self._running = self._running, None
        if running is not None:
            running.close()
            running.returncode = 0  # so that nobody here waits for it
        self._lock = threading.Lock()  # held while the template is started and asked
        self._counting = threading.Lock()  # held for moments; guards what follows
        self._users = 0  # processes, and calls of fork()
        self._unwanted: Callable[[], bool] = _never  # of the call of fork() that has _lock
        self._timer: threading.Timer | None = None
        self._sock: socket.socket | None = None
        self._starts: queue.SimpleQueue[Callable[[], None] | None]
        self._starter: threading.Thread | None = None  # rule 2

    def fork(
        self,
        title: str,
        sock: int,
        environ: dict[str, str],
        limits: dict[str, Any],
        preload: Any = None,
        unwanted: Callable[[], bool] = _never,
    ) -> Forked:
        """Forks a process that gets the socket `sock`. With `preload`, it becomes the template of one model. `unwanted`:
        whether nobody waits for it any more, of which give_up() is told.

        Raises OSError, or NoThread.
        """
        ends.prepare()
        with self._counting:
            self._users += 1
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        try:
            with self._lock:
                self._unwanted = unwanted
                try:
                    return self._ask(title, sock, environ, limits, preload)
                except _Refused:
                    raise
                except OSError:
                    self._stop()
                    # a template that was killed is started again
                    return self._ask(title, sock, environ, limits, preload)
        except BaseException:
            self.release()
            raise

    def give_up(self) -> None:
        """One that waits in fork() has come to be unwanted. Any thread."""

    def release(self) -> None:
        """Called when a process that was forked here has ended. Never waits for the template (rule 5)."""
        with self._counting:
            self._users -= 1
            if self._users == 0:
                try:
                    self._timer = threads.start_later(LINGER, self._idle)
                except threads.NoThread:
                    self._end()

    def _idle(self) -> None:
        with self._counting:
            if self._users == 0:
                self._end()

    def _end(self) -> None:
        """Ends a template that nobody uses, so nobody has _lock."""
        self._stop()

    def _stop(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        process, self._running = self._running, None
        if process is not None:
            process.kill()  # it ends by itself, but for one that is stopped or hangs

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
            "rings": self.rings,
        }
        birth = Birth(ANSWER_SECONDS)
        try:
            reader, writer = os.pipe()
        except OSError:
            birth.close()
            raise
        try:
            try:
                descriptors = [sock, writer, birth.theirs.fileno()]
                socket.send_fds(self._sock, [json.dumps(asked).encode()], descriptors)
                birth.sent()
                self._answer()
                return Forked(birth.child(), reader)
            except BaseException:
                birth.give_up()
                os.close(reader)
                raise
        finally:
            os.close(writer)
            birth.close()

    def _answer(self) -> None:
        """Waits until the template says that it has forked. Raises OSError."""
        assert self._sock is not None
        answer = self._sock.recv(1 << 16)
        if not answer:
            raise ConnectionResetError("the template has ended")
        try:
            error = json.loads(answer).get("error")
        except (ValueError, AttributeError):
            error = "the template has answered what cannot be"
        if error is not None:
            raise _Refused(text_of(error))

    def _program(self) -> tuple[list[str], dict[str, str]]:
        """Arguments, to which its socket is added, and variables of a new template."""
        from neptrio.backends.python.limits import inherited

        return [sys.executable, "-u", "-c", BOOTSTRAP], {**inherited(), **dict.fromkeys(ONE_THREAD, "1")}

    def _started(self, sock: socket.socket) -> None:
        """Hears what a new template says first. Raises Unusable if nothing can be forked from it."""

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        ours.settimeout(ANSWER_SECONDS)
        answer: queue.SimpleQueue[OSError | Started] = queue.SimpleQueue()
        program, environ = self._program()

        def start() -> None:
            process: Started | None = None
            try:
                process = Started(
                    [*program, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self.output,
                    stderr=self.output,
                    pass_fds=[theirs.fileno()],
                    env=environ,
                    process_group=0,  # as in _process/template.py
                )
                process.begin()
                ends.watch(process, process.close)  # which reads its status
            except BaseException as error:
                # this thread must not end, since what it has started would end with it, and nobody may wait for ever
                if process is not None:
                    process.kill()
                    process.wait()
                    process.close()
                answer.put(error if isinstance(error, OSError) else OSError(summary(error)))
                return
            answer.put(process)

        try:
            if self._starter is None:
                self._starts = queue.SimpleQueue()
                self._starter = threads.start(self._start_each, self._starts, name="templates")
        except threads.NoThread:
            ours.close()
            theirs.close()
            raise
        self._starts.put(start)
        started = answer.get()
        theirs.close()
        try:
            if isinstance(started, OSError):
                ours.close()
                raise started
            self._running = started
        finally:
            del started  # which may refer to this frame
        self._sock = ours
        try:
            self._started(ours)
        except BaseException:
            self._stop()
            raise

    @staticmethod
    def _start_each(starts: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (start := starts.get()) is not None:
            start()


class _Refused(OSError):
    """The template is well and could not fork."""


class Unusable(_Refused):
    """Nothing can be forked from that interpreter: processes are started one by one."""


def _hang_up(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed


MOST_BYTES = 1 << 20  # of what a template is asked; the system may allow less than that
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # rule 1 of the template
template = Template()
os.register_at_fork(after_in_child=template.begin_anew)


class ModelTemplate(Template):
    """A template that has imported one model's file and called its preload(); the model's instances are forked from it.

    It lives until close(). If it was killed before, the next instance starts it again.
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
        self._preloading: Forked | None = None  # this process, until its preload() has ended
        self._reader: threading.Thread | None = None
        self._closed = False
        self._log = logging.getLogger("neptrio.model." + name)

    def release(self) -> None:
        pass  # it does not linger

    def give_up(self) -> None:
        process = self._preloading
        if process is not None and self._unwanted():
            process.kill()

    def kill(self) -> None:
        """Kills it. Any thread."""
        process = self._process
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Ends the template, for good: nobody would end one that an instance started after this."""
        with self._lock:
            self._closed = True
            self._stop()

    def _stop(self) -> None:
        super()._stop()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            ends.forget(process)
            if self._reader is not None:
                self._reader.join(ANSWER_SECONDS)
            process.close()
            template.release()

    def _start(self) -> None:
        if self._closed:
            raise Internal(f"the model '{self._name}' is unloaded", reason=Reason.BACKEND)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MOST_BYTES)
        try:
            process = template.fork(
                f"py:{self._name}"[:12] + "...",
                theirs.fileno(),
                self._environ,
                # what it runs is the model's code as well; niceness would be added twice
                {name: self._limits.get(name) for name in ("memory", "user", "withheld")},
                preload=self._preload,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process = self._preloading = process
        try:
            if self._unwanted():  # since before give_up() could see the process
                raise Internal(f"the start of '{self._name}' was given up", reason=Reason.BACKEND)
            # whatever it leaves behind that holds its socket: it is heard no more when it has ended
            ends.watch(process, lambda: _hang_up(ours))
            self._reader = threads.start(self._output, process, name=f"{self._name}-output")
            ours.settimeout(self._seconds)
            self._preloaded(ours)
        except BaseException:
            ours.close()
            self._stop()
            raise
        finally:
            self._preloading = None
        ours.settimeout(ANSWER_SECONDS)
        self._sock = ours

    def _preloaded(self, ours: socket.socket) -> None:
        """Waits for the end of the model's preload(). Raises Internal if it failed."""
        try:
            answer = json.loads(ours.recv(1 << 20) or b'{"error": "its process has ended"}')
            error = answer.get("error")
        except TimeoutError:
            error = f"it did not return within {self._seconds:g} s; its process was killed"
        except (OSError, ValueError, AttributeError) as found:
            error = f"its process has answered what cannot be ({type(found).__name__})"
        if error is not None:
            raise Internal(f"preload of '{self._name}' failed: {text_of(error)}", reason=Reason.BACKEND)

    def _output(self, process: Forked) -> None:
        for record, _ in records(process.stdout.fileno(), process.pidfd):
            self._log.info("%s", record)
        process.stdout.close()
