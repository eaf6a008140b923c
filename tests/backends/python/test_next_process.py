"""What waits behind a batch whose process ends: the next process executes it."""

from __future__ import annotations

import os
import queue
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import neptrio
from neptrio.backends.python import process_session
from tests.backends.python.models import config, isolated
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

BEHIND = 4
MODEL = """
import json, os, threading
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        if os.path.exists(args["model_repository"] + "/once"):
            raise RuntimeError("not twice")

    {execute} execute(self, requests):
        answers = []
        for request in requests:
            if json.loads(request.parameters())["how"] == "hang":
                pb_utils.Logger.log_info("hanging")
                {hang}
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", request.inputs()[0].as_numpy() * 2)]))
        return answers
"""
PLAIN = MODEL.format(execute="def", hang="threading.Event().wait()")
ASYNC = MODEL.format(execute="async def", hang="await asyncio.Event().wait()").replace(
    "json, os", "asyncio, json, os"
)


class Calls:
    """Requests of one client: one that hangs, and others behind it that the server has accepted."""

    def __init__(self, server: ServerProcess, **more: Any) -> None:
        self.server = server
        self.client = grpcclient.InferenceServerClient(server.grpc)
        self.answers: dict[str, queue.Queue[Any]] = {}
        self.call("hang")
        server.until_logged("hanging")
        for number in range(BEHIND):
            self.call("double", number, **more)
        # or it has been ended already, where that is what is tried
        until(lambda: self.accepted() == 1 + BEHIND or not self.answers["hang0"].empty(), server.log)

    def call(self, how: str, number: int = 0, **more: Any) -> None:
        tensor = grpcclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.full(1, number, np.float32))
        answer = self.answers[f"{how}{number}"] = queue.Queue()
        self.client.async_infer(
            "m", [tensor], lambda result, error: answer.put((result, error)), parameters={"how": how}, **more
        )

    def accepted(self) -> int:
        return int(stats(self.server, "m")["live"]["accepted"])

    def kill(self) -> None:
        os.kill(stats(self.server, "m")["processes"][0]["pid"], signal.SIGKILL)

    def error(self, name: str) -> InferenceServerException:
        result, error = self.answers[name].get(timeout=60)
        assert result is None
        return error

    def doubled(self) -> list[float]:
        """The answers to what waited."""
        found = []
        for number in range(BEHIND):
            result, error = self.answers[f"double{number}"].get(timeout=60)
            assert error is None, error
            found.append(float(result.as_numpy("OUT")[0]))
        return found

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()


@pytest.mark.slow
def test_a_process_that_is_killed(tmp_path: Path) -> None:
    isolated(tmp_path, "m", PLAIN)
    with ServerProcess(tmp_path) as server, Calls(server) as calls:
        calls.kill()
        assert "SIGKILL" in calls.error("hang0").message()
        assert calls.doubled() == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_process_that_hangs(tmp_path: Path) -> None:
    limit = ' parameters { key: "EXECUTE_TIMEOUT_SECONDS" value: { string_value: "5" } }'
    isolated(tmp_path, "m", PLAIN, config() + limit)
    with ServerProcess(tmp_path) as server, Calls(server) as calls:
        assert calls.error("hang0").status() == "StatusCode.DEADLINE_EXCEEDED"
        assert calls.doubled() == [0, 2, 4, 6]


@pytest.mark.slow
def test_a_process_that_does_not_start_again(tmp_path: Path) -> None:
    folder = isolated(tmp_path, "m", PLAIN)
    with ServerProcess(tmp_path, failures="not twice") as server, Calls(server) as calls:
        (folder / "once").touch()
        calls.kill()
        assert "SIGKILL" in calls.error("hang0").message()
        for number in range(BEHIND):
            told = calls.error(f"double{number}").message()
            assert "could not be restarted" in told and "not twice" in told


@pytest.mark.slow
def test_requests_of_a_sequence_have_lost_their_state(tmp_path: Path) -> None:
    isolated(tmp_path, "m", PLAIN)
    with ServerProcess(tmp_path) as server, Calls(server, sequence_id=7) as calls:
        ahead = 1  # of the instance; the others have not left the scheduler
        calls.kill()
        assert "SIGKILL" in calls.error("hang0").message()
        for number in range(ahead):
            assert "SIGKILL" in calls.error(f"double{number}").message()


@pytest.mark.slow
def test_an_async_model_has_begun_all_that_it_took(tmp_path: Path) -> None:
    isolated(tmp_path, "m", ASYNC)
    with ServerProcess(tmp_path) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        answers: queue.Queue[Any] = queue.Queue()
        tensor = grpcclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        for _ in range(3):
            client.async_infer(
                "m", [tensor], lambda result, error: answers.put(error), parameters={"how": "hang"}
            )
        server.until_logged("hanging", 3)
        os.kill(stats(server, "m")["processes"][0]["pid"], signal.SIGKILL)
        for _ in range(3):
            assert "SIGKILL" in answers.get(timeout=60).message()


# no descriptor can be given to it, and a large request comes in memory of its own
FULL = """
import os, resource
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.devices = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        try:
            while True:
                self.devices.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy()[:1])]) for r in requests]
"""


@pytest.mark.slow
def test_a_request_with_which_no_process_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails, or the model would serve nobody any more."""
    monkeypatch.setattr(process_session, "AREA_BYTES", 1 << 20)
    isolated(tmp_path, "m", FULL, config("IN:TYPE_FP32:-1", "OUT:TYPE_FP32:1"))
    with neptrio.Server(tmp_path).running() as server:
        model = server.model("m")
        with pytest.raises(neptrio.TritonError, match="exited with status 1"):
            model.infer({"IN": np.ones(1 << 19, np.float32)}, timeout=60)
        until(model.ready, "it serves again")
        assert model.infer({"IN": np.ones(1, np.float32)}, timeout=60)["OUT"][0] == 1
