"""The end of a model's process is noticed whatever holds its socket and whatever the server lacks; and nobody is believed
about which process it is."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.backends.python import process_session
from neptrio.backends.python.children import Birth, Started
from neptrio.loop.process_ends import ProcessEnds
from tests.backends.python.models import config, isolated, python_model
from tests.backends.python.test_isolated_process import ONE, alive, call, ready_again
from tests.support.embedded import EmbeddedServer
from tests.support.no_descriptors import no_descriptors
from tests.support.server import ServerProcess
from tests.support.waiting import until
from triton_python_backend_utils._process.template import announce
from triton_python_backend_utils._process.wire import Wire

# answers with its process's id; with IN = 1 it first starts another process, which keeps all that it was given
FORKS = """
import os, signal
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        left = 0
        if requests[0].inputs()[0].as_numpy()[0] == 1:
            left = os.fork()
            if left == 0:
                while True:
                    signal.pause()
        out = np.array([os.getpid(), left], np.float32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out)]) for _ in requests]
"""

# its template answers each request for a process with that of another model
LIAR = (
    """
import json, pathlib
from triton_python_backend_utils._process import template

def preload(args):
    victim = int((pathlib.Path(args["model_repository"]) / "victim").read_text())

    class Json:
        loads = staticmethod(json.loads)
        dumps = staticmethod(lambda told: json.dumps({**told, "pid": victim}))

    template.json = Json
"""
    + FORKS
)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["process", sys.prefix])
def test_a_process_that_left_another_behind_is_noticed_when_it_is_killed(tmp_path: Path, way: str) -> None:
    isolated(tmp_path, "forks", FORKS, way=way)
    with ServerProcess(tmp_path) as server:
        pid, left = (int(number) for number in call(server, "forks", ONE + 1))
        try:
            os.kill(pid, signal.SIGKILL)
            server.until_logged("forks_0 runs again")
            assert alive(left)  # it is the model's own affair
            ready_again(server, "forks")
            assert int(call(server, "forks", ONE)[0]) not in (pid, left)
        finally:
            os.kill(left, signal.SIGKILL)


@pytest.mark.slow
def test_who_has_answered_nothing_is_started_again_after_a_pause_that_grows(tmp_path: Path) -> None:
    """And who has answered, at once: test_crashes.py of the compiled backends has a thousand of those."""
    isolated(
        tmp_path,
        "leaves",
        "import os\n\nclass TritonPythonModel:\n    def execute(self, requests):\n        os._exit(1)\n",
    )
    with ServerProcess(tmp_path) as server:
        took = []
        for _ in range(4):
            began = time.monotonic()  # the pause has begun before the answer is here
            with pytest.raises(InferenceServerException, match="exited with status 1"):
                call(server, "leaves", ONE)
            ready_again(server, "leaves")
            took.append(time.monotonic() - began)
    assert all(seconds > least for seconds, least in zip(took, (0, 0.15, 0.35, 0.75), strict=True)), took


@pytest.mark.slow
def test_an_end_is_noticed_without_descriptors(tmp_path: Path) -> None:
    isolated(tmp_path, "forks", FORKS)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        assert client.is_model_ready("forks")
        pid = int(call(server, "forks", ONE)[0])
        with no_descriptors(server.process.pid):
            os.kill(pid, signal.SIGKILL)
            until(lambda: not client.is_model_ready("forks"), "it is noticed")
            server.until_logged("restart of forks_0 failed")
        ready_again(server, "forks")
        assert int(call(server, "forks", ONE)[0]) != pid


@pytest.mark.slow
def test_who_cannot_be_sent_anything_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the descriptor of a large message, while the user has too many under way: the process waits for it."""
    failures = [OSError(errno.ETOOMANYREFS, "Too many references")]
    send = Wire.send

    def failing(self: Wire, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        if message["t"] == "message_segment" and failures:
            raise failures.pop()
        send(self, message, descriptors)

    monkeypatch.setattr(Wire, "send", failing)
    for bytes_of in ("AREA_BYTES", "BODIES_BYTES"):
        monkeypatch.setattr(process_session, bytes_of, 1 << 20)
    isolated(tmp_path, "forks", FORKS, config("IN:TYPE_FP32:-1", "OUT:TYPE_FP32:2"))
    with EmbeddedServer(tmp_path) as server:
        first = call(server, "forks", ONE)
        assert call(server, "forks", np.zeros(1 << 20, np.float32))[0] != first[0]  # of the next process
        assert not failures


@pytest.mark.slow
def test_a_template_cannot_name_the_process_of_another_model(tmp_path: Path) -> None:
    isolated(tmp_path, "victim", FORKS)
    python_model(tmp_path, "liar", LIAR)
    flags = ("--model-control-mode=explicit", "--load-model=victim")
    with ServerProcess(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as client:
        victim = int(call(server, "victim", ONE)[0])
        (tmp_path / "liar/victim").write_text(f"{victim}")
        client.load_model("liar")
        liar = int(call(server, "liar", ONE)[0])
        client.unload_model("liar")
        until(lambda: ("liar", "unloaded") in states(client), "the liar has ended")
        assert not alive(liar)
        assert int(call(server, "victim", ONE)[0]) == victim


def states(client: httpclient.InferenceServerClient) -> list[tuple[str, str]]:
    return [(row["name"], row.get("reason", "")) for row in client.get_model_repository_index()]


def started(birth: Birth, script: str) -> subprocess.Popen[bytes]:
    """A shell whose output is its first word."""
    process = subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE, stdout=birth.theirs)
    birth.sent()
    return process


def test_a_process_that_is_no_child_of_the_server_is_refused() -> None:
    birth = Birth(60)
    with (
        started(birth, "sh -c 'printf b; true'; true"),
        pytest.raises(ConnectionResetError, match="is no child of the server"),
    ):
        birth.child()
    birth.close()


def test_a_process_that_ends_before_it_says_so_is_refused() -> None:
    birth = Birth(60)
    with started(birth, "true"), pytest.raises(ConnectionResetError, match="has ended at once"):
        birth.child()
    birth.close()


def gone(process: subprocess.Popen[bytes]) -> bool:
    """Whether its status was read."""
    try:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return False


def test_a_process_nobody_waits_for_is_killed_and_reaped() -> None:
    """Otherwise it would take messages that are sent to the next."""
    birth = Birth(60)
    with started(birth, "printf b; exec sleep 1000") as process:
        until(lambda: Path(f"/proc/{process.pid}/comm").read_text() == "sleep\n", "it has said so")
        birth.give_up()
        until(lambda: gone(process), "it is killed, and its status read")
    birth.close()


def test_a_process_that_comes_after_nobody_waits_is_killed_and_reaped() -> None:
    birth = Birth(60)
    with started(birth, "read line; printf b; exec sleep 1000") as process:
        birth.give_up()
        birth.close()
        assert not gone(process)
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        until(lambda: gone(process), "it is killed, and its status read")


def test_a_process_waits_for_the_word_to_go_on() -> None:
    birth = Birth(60)
    ours = os.fork()
    if ours == 0:
        announce(birth.theirs.fileno())
        os._exit(7)
    birth.sent()
    assert birth.child() == ours
    assert os.waitstatus_to_exitcode(os.waitpid(ours, 0)[1]) == 7
    birth.close()
    birth = Birth(60)
    ours = os.fork()
    if ours == 0:
        birth._ours.close()
        announce(birth.theirs.fileno())
        os._exit(7)
    birth.sent()
    birth.close()
    assert os.waitstatus_to_exitcode(os.waitpid(ours, 0)[1]) == 1


def test_who_cannot_be_watched_is_reaped_before_the_next_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = ProcessEnds()
    process = Started(["cat"], stdin=subprocess.PIPE)
    process.begin()

    def refused(child: Any, on_end: Any) -> None:
        raise OSError(errno.ENOSPC, "no")

    with monkeypatch.context() as patched:
        patched.setattr(ends, "watch", refused)
        ends.reap(process)
    assert process.pidfd >= 0
    process.kill()
    process.wait()
    ends.prepare()
    assert process.pidfd < 0
    assert process.stdin is not None
    process.stdin.close()


def test_who_is_reaped_later_is_closed_then() -> None:
    """As front ends are that do not end within the time that is given to them."""
    ends = ProcessEnds()
    process = Started(["cat"], stdin=subprocess.PIPE)
    process.begin()
    ends.reap(process)
    assert process.pidfd >= 0 and process.returncode is None
    assert process.stdin is not None
    process.stdin.close()
    until(lambda: process.pidfd < 0, "it has ended")
    assert process.returncode == 0 and gone(process)


@pytest.mark.slow
def test_nothing_is_left_of_a_process_that_ends_while_its_model_is_unloaded(tmp_path: Path) -> None:
    """finalize() comes while the end is handled: it finds no process, and nobody starts the next."""
    isolated(tmp_path, "m", FORKS)
    ended, unloaded = threading.Event(), threading.Event()

    def hold(record: logging.LogRecord) -> bool:
        if "the model instance 'm_0' failed" in record.getMessage():
            ended.set()
            assert unloaded.wait(60)
        return True

    def threads() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("m_0-")}

    logger = logging.getLogger("neptrio.python")
    with (
        EmbeddedServer(tmp_path, model_control_mode="explicit") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        client.load_model("m")
        assert threads() == {"m_0-output", "m_0-writer", "m_0-reader"}
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        pid = int(client.infer("m", [tensor]).as_numpy("OUT")[0])
        logger.addFilter(hold)
        try:
            os.kill(pid, signal.SIGKILL)
            assert ended.wait(60)
            client.unload_model("m")
            until(lambda: states(client) == [("m", "unloaded")], "it is unloaded")
        finally:
            unloaded.set()
            logger.removeFilter(hold)
        until(lambda: not threads(), threads)
