"""Requests of models to other models, from every kind of thread; and async execute."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, python_model
from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.server import ServerProcess

DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            array = r.inputs()[0].as_numpy()
            array *= 2
            answers.append(pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUT", array)], parameters={"id": r.request_id(), "timeout": r.timeout()}))
        return answers
"""

NAMES = """parameters { key: "version_labels" value: { string_value: "stable=1" } }
parameters { key: "aliases" value: { string_value: "twice" } }"""
CALLER = """
import json, threading, asyncio
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [self.one(r) for r in requests]

    def one(self, request):
        array = request.inputs()[0].as_numpy()
        parameters = json.loads(request.parameters())
        how, target = parameters["how"], parameters.get("target", "double")
        inner = pb_utils.InferenceRequest(
            model_name=target, inputs=[pb_utils.Tensor("IN", array)], requested_output_names=["OUT", "OUT"],
            request_id="inner", timeout=1234567, model_version=parameters.get("version", -1),
            parameters={"how": "exec", "target": parameters.get("next", "double")})
        if how == "exec":
            response = inner.exec()
        elif how == "thread":
            box = []
            thread = threading.Thread(target=lambda: box.append(inner.exec()))
            thread.start()
            thread.join()
            response = box[0]
        elif how == "asyncio":
            async def both():
                return await asyncio.gather(inner.async_exec(), inner.async_exec())
            response, other = asyncio.run(both())
            assert not other.has_error()
        if response.has_error():
            return pb_utils.InferenceResponse(error=response.error())
        out = pb_utils.get_output_tensor_by_name(response, "OUT").as_numpy()
        check = np.concatenate([array, out])
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUT", check)], parameters=json.loads(response.parameters()))
"""

ASYNC = """
import asyncio
import numpy as np

class TritonPythonModel:
    async def initialize(self, args):
        self.arrived = 0
        self.all = asyncio.Event()

    async def execute(self, requests):
        self.arrived += len(requests)
        if self.arrived == 8:
            self.all.set()
        await self.all.wait()  # ends only if eight executions overlap
        inner = [pb_utils.InferenceRequest(model_name="double", inputs=[pb_utils.Tensor("IN", r.inputs()[0].as_numpy())],
                 requested_output_names=["OUT"]).async_exec() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", (await one).output_tensors()[0].as_numpy())])
                for one in inner]

    async def finalize(self):
        await asyncio.sleep(0)
        pb_utils.Logger.log_info("the loop ends")
"""

ASYNC_FAILS = """
class TritonPythonModel:
    async def execute(self, requests):
        raise KeyError("async trouble")
"""

CONTROL = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        seen = [pb_utils.is_model_ready("spare")]
        pb_utils.load_model("spare")
        seen.append(pb_utils.is_model_ready("spare"))
        pb_utils.unload_model("spare")
        seen.append(pb_utils.is_model_ready("spare"))
        try:
            pb_utils.load_model("nothing")
        except pb_utils.TritonModelException as error:
            seen.append("failed to load 'nothing'" in str(error))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(seen, np.float32))])]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    python_model(repository, "double", DOUBLE, config(extra=NAMES))
    python_model(repository, "caller", CALLER)
    python_model(repository, "middle", CALLER)
    python_model(repository, "wide", CALLER, config(extra="instance_group { count: 2 kind: KIND_CPU }"))
    python_model(repository, "overlap", ASYNC)
    python_model(repository, "async_fails", ASYNC_FAILS)
    python_model(repository, "spare", DOUBLE)
    python_model(repository, "control", CONTROL)
    loads = [f"--load-model={d.name}" for d in repository.iterdir() if d.name != "spare"]
    with ServerProcess(repository, "--model-control-mode=explicit", *loads) as process:
        yield process


def infer(server: ServerProcess, model: str, **parameters: Any) -> Any:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        tensor = httpclient.InferInput("IN", [2], "FP32")
        tensor.set_data_from_numpy(np.array([1, 2], np.float32))
        return client.infer(model, [tensor], parameters=parameters)


@pytest.mark.parametrize("how", ["exec", "thread", "asyncio"])
def test_call_another_model(server: ServerProcess, how: str) -> None:
    result = infer(server, "caller", how=how)
    # the callee wrote to its input; the caller's array is untouched
    assert result.as_numpy("OUT").tolist() == [1, 2, 2, 4]
    assert result.get_response()["parameters"] == {"id": "inner", "timeout": 1234567}


def test_calls_by_label_and_alias(server: ServerProcess) -> None:
    for target in ("double", "twice"):
        result = infer(server, "caller", how="exec", target=target, version="stable")
        assert result.as_numpy("OUT").tolist() == [1, 2, 2, 4]
    with pytest.raises(
        InferenceServerException, match=r"version string 'none' .* has the labels stable \(1\)"
    ):
        infer(server, "caller", how="exec", version="none")


def test_nested_calls(server: ServerProcess) -> None:
    result = infer(server, "caller", how="exec", target="middle")
    assert result.as_numpy("OUT").tolist() == [1, 2, 1, 2, 2, 4]


@pytest.mark.parametrize(
    ("target", "status", "message"),
    [
        ("nope", "404", "Request for unknown model: 'nope' is not found"),
        ("async_fails", "500", "KeyError: 'async trouble'"),
        ("overlap_missing", "404", "is not found"),
    ],
)
def test_failures_come_back_as_error_responses(
    server: ServerProcess, target: str, status: str, message: str
) -> None:
    with pytest.raises(InferenceServerException, match=message) as info:
        infer(server, "caller", how="exec", target=target)
    assert info.value.status() == status


def test_a_model_that_calls_itself(server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match="would wait for itself"):
        infer(server, "caller", how="exec", target="caller")
    with pytest.raises(InferenceServerException, match="would wait for itself"):
        infer(server, "caller", how="exec", target="middle", next="caller")
    # a second instance is free to answer
    assert infer(server, "wide", how="exec", target="wide").as_numpy("OUT").tolist() == [1, 2, 1, 2, 2, 4]
    assert infer(server, "caller", how="exec").as_numpy("OUT").tolist() == [1, 2, 2, 4]


def test_async_executions_overlap(server: ServerProcess) -> None:
    results: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(server.grpc) as client:
        for i in range(8):
            tensor = grpcclient.InferInput("IN", [1], "FP32")
            tensor.set_data_from_numpy(np.array([i], np.float32))
            client.async_infer(
                "overlap", [tensor], lambda result, error: results.put((result, error)), request_id=str(i)
            )
        for _ in range(8):
            result, error = results.get(timeout=60)
            assert error is None, (error.message(), server.log())
            assert result.as_numpy("OUT").tolist() == [2.0 * int(result.get_response().id)]


def test_async_failure(server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match="KeyError: 'async trouble'"):
        infer(server, "async_fails")


def test_load_and_unload_from_a_model(server: ServerProcess) -> None:
    assert infer(server, "control").as_numpy("OUT").tolist() == [0, 1, 0, 1]


@pytest.mark.slow
def test_a_cancelled_request_cancels_its_calls(tmp_path: Path) -> None:
    outer = """
class TritonPythonModel:
    def execute(self, requests):
        response = pb_utils.InferenceRequest(model_name="slow", inputs=requests[0].inputs(),
            requested_output_names=["OUT"]).exec()
        pb_utils.Logger.log_info(f"inner says {response.error().message()} {requests[0].is_cancelled()}")
        return [response]
"""
    slow = """
class TritonPythonModel:
    def execute(self, requests):
        pb_utils.Logger.log_info("inner runs")
        until_cancelled(requests[0])
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("stopped", pb_utils.TritonError.CANCELLED))]
"""
    python_model(tmp_path, "outer", outer)
    python_model(tmp_path, "slow", UNTIL_CANCELLED + slow)
    with ServerProcess(tmp_path) as server, grpcclient.InferenceServerClient(server.grpc) as client:
        tensor = grpcclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.zeros(1, np.float32))
        done: queue.Queue[Any] = queue.Queue()
        call = client.async_infer("outer", [tensor], lambda result, error: done.put(error))
        server.until_logged("inner runs")
        call.cancel()
        assert done.get(timeout=60) is not None
        server.until_logged("inner says")
        assert "True" in next(line for line in server.log().splitlines() if "inner says" in line)


FRAMES = """
import sys
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="double", inputs=request.inputs(), requested_output_names=["OUT"])
            inner.exec()  # the first one imports
            frames = []
            sys.setprofile(lambda frame, event, arg: event == "call" and frames.append(frame.f_code.co_name))
            inner.exec()
            sys.setprofile(None)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([len(frames)], np.float32))]))
        return answers
"""


@pytest.mark.slow
def test_a_call_costs_the_calling_process_few_frames(tmp_path: Path) -> None:
    """It took 28 with a condition, a table's entry and a handle of its own."""
    python_model(tmp_path, "double", DOUBLE)
    python_model(tmp_path, "frames", FRAMES)
    with ServerProcess(tmp_path) as server, httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.ones(1, np.float32))
        assert 1 <= client.infer("frames", [tensor]).as_numpy("OUT")[0] <= 14
