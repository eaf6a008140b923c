"""One process of an isolated model, from its start to its end. After a crash the next process is another Process.

Rules:
 1. The code that makes a Process calls close() exactly once. That leaves no child, thread or descriptor behind,
    whatever state the child is in.
 2. send() blocks while the child does not read. So the trio thread never calls it; it uses post(), whose functions are
    called in order on the writer thread.
 3. `on_end` is called once, on the reader thread, after the child has ended and its exit status was read.
 4. The end of a child is noticed by its pidfd (loop.process_ends), which ends its socket, too: a process that the model
    has started may hold the other end. All threads exist before the child does.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from neptrio import process_parts
from neptrio.backends.python import memory_group, template
from neptrio.backends.python.children import Started
from neptrio.backends.python.environment import variables
from neptrio.backends.python.environment_template import FIND_UTILITIES, PACKAGE, environment_templates
from neptrio.backends.python.limits import launched
from neptrio.backends.python.printed_lines import records
from neptrio.errors import Internal, Killed, Reason
from neptrio.foreign import summary, text_of
from neptrio.loop import threads
from neptrio.loop.process_ends import ends
from triton_python_backend_utils._process.wire import Wire

BOOTSTRAP = f"""{FIND_UTILITIES}
if sys.argv[3] == "compiled":
    from triton_python_backend_utils._process.compiled_ring import main
else:
    from triton_python_backend_utils._process.plain_ring import main
from triton_python_backend_utils._process.limits import apply
import json
apply(json.loads(sys.argv[4]))
main(int(sys.argv[2]))
"""
ENDED = (errno.EPIPE, errno.ECONNRESET, errno.ENOTCONN, errno.EBADF)  # of its socket, or here it is closed
LAST_LINES = 12  # of the child's output that are part of the error when it ends
KILL_SECONDS = 2.0
OUTPUT_SECONDS = 5.0  # output.records() takes less where there are pidfds
_alive: weakref.WeakSet[Process] = weakref.WeakSet()


def kill_all() -> None:
    """Kills every child. Called before the server exits without waiting for threads that are stuck."""
    for process in list(_alive):
        process.kill()


process_parts.kill.append(kill_all)


class Process:
    """A running child."""

    def __init__(
        self,
        name: str,
        python: str | None,
        on_message: Callable[[Process, dict[str, Any]], None],
        on_end: Callable[[Process], None],
        environ: dict[str, str] | None = None,
        limits: dict[str, Any] | None = None,
        origin: template.Template = template.template,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`python` is the path of the interpreter, None for the server's. `environ` and `limits` are made by
        neptrio.backends.python.limits. `origin` is the template that the process is forked from, if forking is
        possible and the interpreter is the server's; others have templates of their own (environment_template.py). `unwanted`: see
        template.Template.fork()."""
        self.name = name
        self.ended = threading.Event()
        self.killed_for = ""  # why the server has killed it, "" if it has not
        self._on_message = on_message
        self._on_end = on_end
        self._log = logging.getLogger("neptrio.model." + name)
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._template = False
        self._child: Any = None
        self._threads: list[threading.Thread] = []
        self._begun = threading.Event()
        self._given_up = False
        given = dict(os.environ) if environ is None else environ
        source: template.Template | None = origin if template.SUPPORTED else None
        if python is not None:
            source = environment_templates.find(python, given, limits or {})
            given = variables(python, given)
        self._origin = source
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket = ours
        self._group: memory_group.MemoryGroup | None = None
        if limits is not None and limits.get("memory"):
            self._group = memory_group.made(name, limits["memory"])
            if self._group is not None:
                limits = {**limits, "memory": None}
        try:
            ends.prepare()
            for role, target in (("output", self._output), ("writer", self._write), ("reader", self._read)):
                self._threads.append(threads.start(self._when_begun, target, name=f"{name}-{role}"))
            if source is not None:
                try:
                    self._child = source.fork(
                        f"py:{name}", theirs.fileno(), given, limits or {}, unwanted=unwanted
                    )
                    self._template = True
                except template.Unusable as error:
                    self._log.debug("%s", error)
                except OSError as error:
                    self._log.warning("the template process cannot be used, a new one is started: %s", error)
            if self._child is None:
                later = json.dumps({name: (limits or {}).get(name) for name in ("threads", "withheld")})
                program = [python or sys.executable, "-u", "-c", BOOTSTRAP, str(PACKAGE)]
                program += [str(theirs.fileno()), "compiled" if python is None else "plain", later]
                arguments, environ_of_it = launched(program, given, limits)
                self._child = Started(
                    arguments,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    pass_fds=[theirs.fileno()],
                    env=environ_of_it,
                    process_group=0,  # as in _process/template.py
                )
                self._child.begin()
            if self._group is not None:
                self._group.add(self._child.pid)  # it imports the model only when it is told to
            ends.watch(self._child, self._hang_up)
        except BaseException:  # OSError, NoThread, or what the model's preload() raised
            self._given_up = True
            self._begun.set()
            ours.close()
            if self._child is not None:
                self._child.kill()
                self._child.wait()
                self._child.stdout.close()
                self._child.close()
                if self._template and source is not None:
                    source.release()
            if self._group is not None:
                self._group.remove()
            raise
        finally:
            theirs.close()
        self.pid = self._child.pid
        _alive.add(self)
        self._wire = Wire(ours)
        self._begun.set()

    def _when_begun(self, target: Callable[[], None]) -> None:
        self._begun.wait()
        if not self._given_up:
            target()

    def _hang_up(self) -> None:
        """The child has ended: what it has sent is still read, and then the end (rule 4)."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a message now. If the child has ended, does nothing: the reader notices that. A child that runs and cannot
        be sent it, such as with too many descriptors under way, is killed: it would wait for it for ever."""
        try:
            self._wire.send(message, descriptors)
        except OSError as error:
            if error.errno not in ENDED:
                self.killed_for = self.killed_for or f"nothing could be sent to it: {error}"
                self.kill()

    def post(self, function: Callable[[], None]) -> None:
        """Lets the writer thread call `function`. Any thread."""
        self._work.put(function)

    def post_message(self, message: dict[str, Any]) -> None:
        """send() of a message without descriptors, on the writer thread."""
        self.post(lambda: self.send(message))

    def _write(self) -> None:
        while True:
            function = self._work.get()
            if function is None:
                return
            try:
                function()
            except Exception:
                self._log.exception("could not be sent")
            del function  # what it sends, which may be large, is not kept until there is more to send

    def _read(self) -> None:
        try:
            while (message := self._wire.receive()) is not None:
                try:
                    self._on_message(self, message)
                finally:
                    for descriptor in message.get("descriptors", ()):  # that nobody has taken out
                        os.close(descriptor)
        except Exception as error:
            # a correct process sends no such message; without its end, whoever waits for an answer waits for ever
            self._log.error("its process sent what cannot be used: %s", summary(error))
            self.killed_for = self.killed_for or f"it sent what cannot be used: {summary(error)}"
            self.kill()
        try:
            self._child.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.killed_for = self.killed_for or "it has closed its socket to the server"
            self.kill()
            self._child.wait()
        try:
            if self._group is not None:
                if self._group.exceeded and not self.killed_for:
                    self.killed_for = f"it used more than MEMORY_LIMIT_BYTES ({self._group.limit} bytes)"
                self._group.remove()
            self._threads[0].join(1)  # for its last output
            if self._template and self._origin is not None:
                self._origin.release()
        except Exception:  # whatever fails here, others wait for the end
            self._log.exception("its process has ended, and cannot be cleared away")
        self.ended.set()
        self._on_end(self)

    def _output(self) -> None:
        stream = self._child.stdout
        assert stream is not None
        for record, lines in records(stream.fileno(), self._child.pidfd):
            self._lines.extend(lines)
            self._log.info("%s", record)

    @property
    def end(self) -> str:
        """How the child ended."""
        status = self._child.returncode
        if self.killed_for:
            return f"its process was killed: {self.killed_for}"
        if status is None:
            return "its process runs"
        if status < 0:
            try:
                return f"its process was killed by signal {-status} ({signal.Signals(-status).name})"
            except ValueError:
                return f"its process was killed by signal {-status}"
        return f"its process exited with status {status}"

    @property
    def cause(self) -> str:
        """How the child ended, with its last output."""
        if not self._lines:
            return self.end
        return f"{self.end}; its last output was:\n" + "\n".join(self._lines)

    def awaited(self, answers: queue.SimpleQueue[Any], kind: str, limit: float, what: str) -> dict[str, Any]:
        """Waits for the child's answer of a kind. Raises Internal if it failed, ended, or took over `limit` seconds.
        Killed, if it was ended from outside. A number among the answers is how many seconds are left from there on."""
        end = time.monotonic() + limit
        while True:
            try:
                left = max(0.0, end - time.monotonic())
                answer = answers.get(timeout=None if left == math.inf else left)
            except queue.Empty:
                self.kill()
                raise Internal(
                    f"{what} of '{self.name}' did not return within {limit:g} s; its process was killed"
                ) from None
            if isinstance(answer, float):
                end = time.monotonic() + answer
                continue
            if answer is None:
                outside = self._child.returncode == -signal.SIGKILL and not self.killed_for
                kind_of_error = Killed if outside else Internal
                raise kind_of_error(f"{what} of '{self.name}' failed: {self.cause}")
            if answer["t"] == "failed":
                where = f"finalize of '{self.name}' failed: " if what == "finalize" else ""
                raise Internal(where + text_of(answer.get("text", "")), reason=Reason.BACKEND)
            if answer["t"] == kind:
                found: dict[str, Any] = answer
                return found

    def kill(self) -> None:
        """Kills the child with SIGKILL if it runs."""
        if self._child.poll() is None:
            self._child.kill()

    def close(self, wait: float = KILL_SECONDS) -> None:
        """Gives the child `wait` seconds to end, then kills it; releases everything."""
        if not self.ended.wait(wait):
            self.kill()
        if threading.current_thread() is not self._threads[2]:
            self._threads[2].join()
        self._work.put(None)
        if threading.current_thread() is not self._threads[1]:
            self._threads[1].join()
        ends.forget(self._child)
        self._wire.close()
        self._threads[0].join(OUTPUT_SECONDS)
        if not self._threads[0].is_alive():
            self._child.close()
            self._child.stdout.close()
