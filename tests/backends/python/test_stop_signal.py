"""A service manager sends SIGTERM to every process of the service: only the server acts on it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, isolated
from tests.support.latch import Latch
from tests.support.refusing import refuses
from tests.support.server import ServerProcess
from tests.support.waiting import until

WAITS = """
import pathlib
class TritonPythonModel:
    @staticmethod
    def preload(args):
        pass
    def execute(self, requests):
        print("executing", flush=True)
        pathlib.Path(LATCH).read_text()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
                for r in requests]
    def finalize(self):
        print("finalized", flush=True)
"""


ECHO = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pb_utils.get_input_tensor_by_name(r, "IN").as_numpy())])
                for r in requests]
"""


def given() -> httpclient.InferInput:
    tensor = httpclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.array([7], np.float32))
    return tensor


def descendants(pid: int) -> set[int]:
    """All processes below one."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found |= {child} | descendants(child)
    return found


def prepared(server: int) -> set[int]:
    """The processes below the server's; none while one of them, just started, would end at SIGTERM."""
    try:
        below = descendants(server)
        ready = all(handles(pid, signal.SIGTERM) for pid in below)
    except FileNotFoundError:  # one has ended meanwhile
        return set()
    return below if ready else set()


def handles(pid: int, number: int) -> bool:
    """Whether a process has another way with a signal than the system's own."""
    rows = dict(row.split(":", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(rows[key], 16) >> (number - 1) & 1 for key in ("SigIgn", "SigCgt"))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--frontends=2",)], ids=["alone", "front ends"])
@pytest.mark.parametrize("preloads", [True, False])
def test_a_request_under_way_is_answered(tmp_path: Path, preloads: bool, flags: tuple[str, ...]) -> None:
    code = WAITS if preloads else WAITS.replace("def preload", "def something_else")
    latch = Latch(tmp_path / "latch")
    code = code.replace("LATCH", repr(str(latch.path)))
    models = tmp_path / "models"
    isolated(models, "waits", code, config())
    isolated(models, "idle", ECHO, config())
    answers: list[Any] = []

    def ask(address: str) -> None:
        with httpclient.InferenceServerClient(address, network_timeout=60) as client:
            answers.append(client.infer("waits", [given()]).as_numpy("OUT").tolist())

    with latch, ServerProcess(models, *flags) as server:
        asked = threading.Thread(target=ask, args=(server.http,))
        asked.start()
        server.until_logged("executing")
        below = until(lambda: prepared(server.process.pid), "all processes take no notice of SIGTERM")
        for pid in below:
            with contextlib.suppress(ProcessLookupError):  # a template that nobody needs ends by itself
                os.kill(pid, signal.SIGTERM)
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.infer("idle", [given()]).as_numpy("OUT").tolist() == [7.0]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses(server.http), "the server is stopping")
        latch.open()
        asked.join()
        assert answers == [[7.0]]
        assert server.ended() == 0
    assert "finalized" in server.log() and "killed" not in server.log()


FORKS = """
import os, signal, subprocess, sys, warnings
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        ends = {self.forked() for _ in range(300)}
        started = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        started.terminate()
        ends = [*ends, started.wait()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(ends, np.int32))]) for _ in requests]
    def forked(self):
        # The signal may come before the new process has run a line of Python.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            forked = os.fork()
        if forked == 0:
            signal.pause()
        os.kill(forked, signal.SIGTERM)
        return os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
"""


@pytest.mark.slow
def test_what_a_model_starts_ends_as_usual(tmp_path: Path) -> None:
    isolated(tmp_path, "forks", FORKS, config(outputs="OUT:TYPE_INT32:2"))
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        assert client.infer("forks", [given()]).as_numpy("OUT").tolist() == [-signal.SIGTERM] * 2
