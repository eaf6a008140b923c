"""The template: a process from which those of isolated models are forked.

The problem: starting an interpreter and importing numpy takes a tenth of a second of work and 25 MB, for
every instance. The choice: one process does it once and then does nothing but fork. It was started
afresh (not forked from the server), so it has no threads, no sockets but the one it is asked through, and
nothing of the server's memory. What it forks shares its pages.

A request is one packet: a JSON object and three descriptors (the model's socket, its output, and a socket for its
first word). The answer is {}, or {"error": TEXT}.

Rules:
 1. The template stays single-threaded: a fork copies one thread.
 2. The processes that it forks are children of the server (CLONE_PARENT), which reads their exit status. The kernel
    kills them when the server ends (PR_SET_PDEATHSIG). The template ends when its socket is closed, also with an
    answer that nobody waits for.
 3. A template of one model has imported the model's file and called its preload(), and the model's instances are forked
    from it. It is itself forked from the general template, and answers the same requests.
 4. The server does not believe a template. A process says that it is there itself, with a byte to which the kernel adds
    its number, and does nothing until it is told to go on; if nobody waits for it any more, it is killed instead.
 5. The interpreter of a model's own environment may be a template, too. It cannot where it runs threads before a model is there,
    where its numpy has libraries that count theirs then, or where it is no child of the server; it says so before anything is
    asked of it, and ends.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import platform
import signal
import socket
import sys
from array import array
from typing import Any

from . import limits
from .own_socket import own_socket
from .stop_signal import outlive

SYS_CLONE = {"x86_64": 56, "aarch64": 220}
CLONE_PARENT = 0x00008000
PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15
PACKET = 1 << 20
COUNT_EARLY = ("libmkl", "libiomp", "libomp", "libgomp")  # names of libraries: rule 5
_libc = ctypes.PyDLL(None, use_errno=True)


def clone() -> int:
    """fork(), but the child is the child of this process's parent. Raises OSError."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(SYS_CLONE[platform.machine()], CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    error = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(error, os.strerror(error))
    return pid


def entitle(name: str) -> None:
    """The name that `ps` and `top` show."""
    _libc.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def announce(birth: int) -> None:
    """Says that this process is there and waits for the word to go on, on a socket that is closed then (rule 4)."""
    try:
        os.write(birth, b"b")
        if not os.read(birth, 1):
            os._exit(1)
    except OSError:
        os._exit(1)
    os.close(birth)


def _become(asked: dict[str, Any], descriptors: list[int], template: socket.socket) -> None:
    """Runs in the forked process: sets up what a newly started process would have had from its start."""
    template.close()
    sock, output, birth = descriptors
    announce(birth)
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != asked["server"]:
        os._exit(1)  # the server has already ended
    # Ctrl-C in the terminal is for the server only. A session of its own would do that too, but Linux may give each session
    # an equal share of the processors (autogroup, sched(7)): then one model has as much as the whole server.
    os.setpgid(0, 0)
    entitle(asked["title"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(null)
    os.close(output)
    _exchange_environment(asked["environ"])
    limits.apply(asked["limits"])
    try:
        if asked.get("preload"):
            serve(own_socket(sock), asked["preload"])
        elif asked["rings"] == "plain":
            from .plain_ring import main as run_plain

            run_plain(sock)
        else:
            from .compiled_ring import main

            main(sock)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(1)


def _exchange_environment(wanted: dict[str, str]) -> None:
    """Gives this process these variables and no others. What it has already stays where it is, in memory that it shares."""
    for name in [name for name in os.environ if name not in wanted]:
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def serve(sock: socket.socket, preload: dict[str, Any] | None = None) -> None:
    """Forks a process for each request, until the socket is closed."""
    outlive()
    if preload is not None:
        from .compiled_ring import preload as run

        try:
            run(preload)
            answer: dict[str, Any] = {"ready": True}
        except BaseException as error:
            from .._execute import failure_text

            answer = {"error": failure_text(preload["name"], error)}
        _say(sock, answer)
        gc.collect()
    gc.freeze()  # memory is shared with forked processes until somebody writes to it: the collector must not
    while True:
        data, descriptors = _received(sock)
        if not data:
            os._exit(0)
        asked = json.loads(data)
        try:
            pid = clone()
        except OSError as error:
            answer = {"error": str(error)}
        else:
            if pid == 0:
                _become(asked, list(descriptors), sock)
            answer = {}
        for descriptor in descriptors:
            os.close(descriptor)
        _say(sock, answer)


def _say(sock: socket.socket, answer: dict[str, Any]) -> None:
    """Answers the server, whose end may have closed the socket meanwhile."""
    try:
        sock.send(json.dumps(answer).encode())
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)


def _received(sock: socket.socket) -> tuple[bytes, array[int]]:
    """A packet and its descriptors. socket.recv_fds() is younger than the oldest Python that an environment may have."""
    found = array("i")
    data, ancillary, _, _ = sock.recvmsg(
        PACKET, socket.CMSG_SPACE(4 * found.itemsize), socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, value in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(value[: len(value) - len(value) % found.itemsize])
    return data, found


def _obstacle(server: int) -> str | None:
    """Why nothing can be forked from this process for the process `server`, None where it can."""
    if os.getppid() != server:  # rule 2: its parent is that of what is forked from it
        return "what was started has started the interpreter as a process of its own"
    if len(os.listdir("/proc/self/task")) > 1:  # rule 1
        return "it runs threads before a model is there"
    counted = sorted(name for part in COUNT_EARLY for name in limits.mapped(part))
    if counted:
        return f"its numpy has {', '.join(counted)}, which counts its threads before a model's variables are there"
    if limits.mapped("openblas") and limits.blas_setter() is None:
        return "the threads of its numpy cannot be set"
    return None


def main_of_environment(descriptor: int, server: int) -> None:
    """Runs the template of an environment on the socket of that number. It says first whether it can be one."""
    sock = _begun(descriptor)
    from . import plain_ring

    del plain_ring
    why = _obstacle(server)
    _say(sock, {"error": why})
    if why is None:
        serve(sock)


def main(descriptor: int) -> None:
    """Runs the template on the socket of that number."""
    sock = _begun(descriptor)
    from . import compiled_ring

    limits.blas_setter()
    del compiled_ring
    serve(sock)


def _begun(descriptor: int) -> socket.socket:
    entitle("py:template")
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    sys.stdout.flush()
    return own_socket(descriptor)
