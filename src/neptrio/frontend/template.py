"""The template of front ends: a process that has imported what a front end needs, and forks.

Rules:
 1. It is started afresh, stays single-threaded and has one socket, on which it is asked. A request is one packet: a JSON
    object and descriptors, those of the new front end and a socket for its first word (backends.python.children.Birth);
    the answer is {} or {"error": TEXT}.
 2. Front ends are children of the engine (CLONE_PARENT), which reads their exit status. The kernel kills them, and
    the template, when the engine ends.
 3. One that has ended, or does not answer within ANSWER_SECONDS, is started again for the next front end.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from typing import Any

import trio

from neptrio.backends.python.children import Birth, Forked
from neptrio.settings import Settings
from triton_python_backend_utils._process.template import PR_SET_PDEATHSIG, announce, clone, entitle

BOOTSTRAP = "import sys; from neptrio.frontend.template import main; main(int(sys.argv[1]), int(sys.argv[2]))"
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")  # rule 1
PACKET = 1 << 18
DESCRIPTORS = 9
ANSWER_SECONDS = 30.0


class Template:
    """The engine's side. Trio thread only."""

    def __init__(self, settings: Settings) -> None:
        """Starts it; what it imports is imported while models are loaded. Raises OSError."""
        self._settings = settings
        self._asking = trio.Lock()
        self._sock: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._sock = ours
        with theirs:
            self._process = subprocess.Popen(  # the caller closes what is left after an error
                [
                    sys.executable,
                    *(f"-W{option}" for option in sys.warnoptions),
                    "-P",
                    "-c",
                    BOOTSTRAP,
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **dict.fromkeys(ONE_THREAD, "1")},
                process_group=0,
            )
        ours.send(pickle.dumps(self._settings))
        ours.setblocking(False)

    async def fork(self, number: int, descriptors: list[int]) -> Forked:
        """Forks a front end that is given `descriptors`. Raises OSError."""
        async with self._asking:
            birth = Birth(ANSWER_SECONDS)
            try:
                with trio.fail_after(ANSWER_SECONDS):
                    await self._forked(number, descriptors, birth)
                return Forked(birth.child())
            except BaseException as error:
                birth.give_up()
                if not isinstance(error, _Refused):
                    self.close()  # the next front end needs another
                if isinstance(error, trio.TooSlowError):
                    text = f"the template of the front ends did not answer within {ANSWER_SECONDS:g} s"
                    raise TimeoutError(text) from None
                raise
            finally:
                birth.close()

    async def _forked(self, number: int, descriptors: list[int], birth: Birth) -> None:
        if self._sock is None:
            self._start()
            assert self._sock is not None
        asked = {"number": number, "engine": os.getpid()}
        socket.send_fds(self._sock, [json.dumps(asked).encode()], [*descriptors, birth.theirs.fileno()])
        birth.sent()
        await trio.lowlevel.wait_readable(self._sock)
        answer = self._sock.recv(PACKET)
        if not answer:
            raise ConnectionResetError("the template of the front ends has ended")
        told = json.loads(answer)
        if "error" in told:
            raise _Refused(told["error"])
        await trio.lowlevel.wait_readable(birth)

    def close(self) -> None:
        """Ends it, if it runs."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


class _Refused(OSError):
    """The template could not fork."""


def main(descriptor: int, engine: int) -> None:
    """Runs the template on the socket of that number."""
    entitle("neptrio:fronts")
    die_with(engine)
    # a service manager sends it to every process; the engine says when to end
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=descriptor)
    settings = pickle.loads(sock.recv(PACKET))  # of the engine, which started this process
    from neptrio.frontend import front
    from neptrio.transport.rest.app_call import Hypercorn

    Hypercorn()  # imports what the first call of the app needs

    gc.collect()
    gc.freeze()  # memory is shared with forked processes until somebody writes to it: the collector must not
    while True:
        data, passed, _, _ = socket.recv_fds(sock, PACKET, DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        descriptors = list(passed)
        if not data:
            os._exit(0)
        asked = json.loads(data)
        answer: dict[str, Any]
        try:
            pid = clone()
        except OSError as error:
            answer = {"error": str(error)}
        else:
            if pid == 0:
                sock.close()
                announce(descriptors.pop())
                die_with(asked["engine"])
                # Ctrl-C in the terminal is for the engine only; in its session, so that both are one group for Linux's
                # scheduler (autogroup, sched(7)). A terminal may stop who writes to it from another process group.
                os.setpgid(0, 0)
                signal.signal(signal.SIGTTOU, signal.SIG_IGN)
                entitle(f"neptrio:front{asked['number']}")
                front.main(settings, asked["number"], descriptors)
            answer = {}
        for each in descriptors:
            os.close(each)
        sock.send(json.dumps(answer).encode())


def die_with(engine: int) -> None:
    """Has the kernel kill this process when its parent, the engine, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != engine:
        os._exit(1)  # it has ended already
