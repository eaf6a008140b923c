"""The Python backend of a Triton server, libtriton_python.so as its makers built it, here and in a real tritonserver: the same
answers to the same requests. Where no tritonserver is installed (benchmarks/tritonserver.py), nothing is run."""

from __future__ import annotations

import queue
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from benchmarks.tritonserver import environment, home, lay_out
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.tritonserver import Tritonserver
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(home() is None, reason="there is no tritonserver")]

HEAD = """
import numpy as np
import triton_python_backend_utils as pb

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.set_max_batch_size(8)
        config.add_input({"name": "IN", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "OUT", "data_type": "TYPE_INT32", "dims": [-1]})
        config.set_model_transaction_policy({"decoupled": DECOUPLED})
        return config

    def initialize(self, args):
        self.family = pb.MetricFamily(name="seen_total", description="requests", kind=pb.MetricFamily.COUNTER)
        self.metric = self.family.Metric(labels={"model": args["model_name"]})
        pb.Logger.log_info(f"hello from {args['model_name']}")

    def given(self, request):
        self.metric.increment(1)
        return pb.get_input_tensor_by_name(request, "IN")
"""
DOUBLE = """
    def execute(self, requests):
        found = []
        for request in requests:
            given = self.given(request).as_numpy()
            if (given < 0).any():
                error = pb.TritonError("negative", pb.TritonError.INVALID_ARG)
                found.append(pb.InferenceResponse(error=error))
            elif (given == 99).any():
                raise ValueError("the model does not like 99")
            else:
                found.append(pb.InferenceResponse([pb.Tensor("OUT", given * 2)]))
        return found
"""
COUNT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(self.given(request).as_numpy()[0, 0])):
                sender.send(pb.InferenceResponse([pb.Tensor("OUT", np.array([[i]], np.int32))]))
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CALLER = """
    def execute(self, requests):
        found = []
        for request in requests:
            given = self.given(request)
            one = pb.InferenceRequest(model_name="double", requested_output_names=["OUT"], inputs=[given]).exec()
            if one.has_error():
                found.append(pb.InferenceResponse(error=one.error()))
                continue
            many = pb.InferenceRequest(model_name="count", requested_output_names=["OUT"], inputs=[given])
            total = pb.get_output_tensor_by_name(one, "OUT").as_numpy()
            for each in many.exec(decoupled=True):
                if len(each.output_tensors()):
                    total = total + pb.get_output_tensor_by_name(each, "OUT").as_numpy()
            found.append(pb.InferenceResponse([pb.Tensor("OUT", total.astype(np.int32))]))
        return found
"""
WAITS = """
    def execute(self, requests):
        import time
        for request in requests:
            self.given(request)
            sender = request.get_response_sender()
            while not request.is_cancelled():
                time.sleep(0)
            pb.Logger.log_info("it was cancelled")
            sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, text, decoupled in (
        ("double", DOUBLE, False),
        ("count", COUNT, True),
        ("caller", CALLER, False),
        ("waits", WAITS, True),
    ):
        model = HEAD.replace("DECOUPLED", str(decoupled)) + text
        write_model(folder, name, 'backend: "python"', {"1/model.py": model})
    return folder


@pytest.fixture(scope="module")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    site = home()
    assert site is not None
    backends = tmp_path_factory.mktemp("backends")
    lay_out(site, backends)
    prefix = f"compiled-{backends.name}-{backends.stat().st_ino}"
    made = ServerProcess(
        repository,
        f"--backend-directory={backends}",
        "--backend-config=python,compiled=true",
        f"--backend-config=python,shm-region-prefix-name={prefix}",
        env=environment(site),
    )
    yield made
    made.stop()


@pytest.fixture(scope="module")
def theirs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tritonserver]:
    made = Tritonserver(repository, tmp_path_factory.mktemp("tritonserver"))
    yield made
    made.stop()


def numbers(module: Any, *values: int) -> list[Any]:
    made = module.InferInput("IN", [1, len(values)], "INT32")
    made.set_data_from_numpy(np.array([values], np.int32))
    return [made]


def answer(address: str, model: str, *values: int) -> Any:
    with http.InferenceServerClient(address) as client:
        try:
            return client.infer(model, numbers(http, *values)).as_numpy("OUT").tolist()
        except InferenceServerException as error:
            return error.status(), error.message()


def stream(address: str, count: int) -> list[Any]:
    found: queue.Queue[Any] = queue.Queue()
    values: list[Any] = []
    with grpc.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer("count", numbers(grpc, count), enable_empty_final_response=True)
        while True:
            result, error = found.get(timeout=60)
            assert error is None, error
            array = result.as_numpy("OUT")
            values.append(None if array is None else array.tolist())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return values


def test_the_answers_are_those_of_tritonserver(server: ServerProcess, theirs: Tritonserver) -> None:
    for model, values in (("double", (1, 2, 3)), ("double", (-1,)), ("caller", (4,)), ("caller", (-4,))):
        ours = answer(server.http, model, *values)
        assert ours == answer(theirs.http, model, *values), (model, values)
    assert answer(server.http, "double", 1, 2, 3) == [[2, 4, 6]]
    assert answer(server.http, "caller", 4) == [[8 + 0 + 1 + 2 + 3]]
    status, text = answer(server.http, "double", 99)
    assert status == "500" and "ValueError: the model does not like 99" in text
    assert "ValueError: the model does not like 99" in answer(theirs.http, "double", 99)[1]
    assert stream(server.grpc, 3) == stream(theirs.grpc, 3) == [[[0]], [[1]], [[2]], None]


def test_its_configuration_log_and_metrics_are_the_servers(server: ServerProcess) -> None:
    with http.InferenceServerClient(server.http) as client:
        config = client.get_model_config("count")
    assert config["max_batch_size"] == 8 and config["model_transaction_policy"] == {"decoupled": True}
    assert "hello from double" in server.log()
    stream(server.grpc, 1)
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        assert 'seen_total{model="count"}' in page.read().decode()


def test_a_cancelled_request_is_told_so(server: ServerProcess) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("waits", numbers(grpc, 1))
        try:
            until(lambda: _executing(server), server.log)
        finally:
            client.stop_stream(cancel_requests=True)
    until(lambda: "it was cancelled" in server.log(), server.log)


def _executing(server: ServerProcess) -> bool:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        return 'seen_total{model="waits"} 1' in page.read().decode()
