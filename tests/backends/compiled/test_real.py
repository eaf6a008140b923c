"""The Python backend of a Triton server, libtriton_python.so as its makers built it, here and in a real tritonserver: the same
answers to the same requests. Where no tritonserver is installed (benchmarks/tritonserver.py), nothing is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from benchmarks.tritonserver import environment, home, lay_out
from tests.backends.compiled import real_models
from tests.support.datatypes import TYPES
from tests.support.metrics import scrape
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers
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
        ("spare", DOUBLE, False),
        ("count", COUNT, True),
        ("caller", CALLER, False),
        ("waits", WAITS, True),
    ):
        model = HEAD.replace("DECOUPLED", str(decoupled)) + text
        write_model(folder, name, 'backend: "python"', {"1/model.py": model})
    real_models.write_models(folder)
    return folder


def loads(repository: Path) -> list[str]:
    """All models but one, which others load."""
    names = sorted(folder.name for folder in repository.iterdir() if folder.name != "spare")
    return ["--model-control-mode=explicit", *(f"--load-model={name}" for name in names)]


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
        *loads(repository),
        env=environment(site),
    )
    yield made
    made.stop()


@pytest.fixture(scope="module")
def theirs(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tritonserver]:
    made = Tritonserver(repository, tmp_path_factory.mktemp("tritonserver"), *loads(repository))
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
    values: list[Any] = []
    with grpc.InferenceServerClient(address) as client, Answers(client) as answers:
        client.async_stream_infer("count", numbers(grpc, count), enable_empty_final_response=True)
        while True:
            result = answers.result()
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


def done(address: str, how: str, model: str = "does", value: int = 1, **more: Any) -> Any:
    """What a model answers as text, or the error."""
    parameters = {"how": how, **more.pop("parameters", {})}
    with http.InferenceServerClient(address, network_timeout=120) as client:
        try:
            found = client.infer(model, numbers(http, value), parameters=parameters, **more)
        except InferenceServerException as error:
            return error.status(), error.message()
        return json.loads(found.as_numpy("TEXT")[0, 0])


CASES: list[tuple[str, dict[str, Any]]] = [
    ("says", {"request_id": "name", "timeout": 5_000_000, "parameters": {"n": 3, "t": True, "x": "grün"}}),
    ("says", {"sequence_id": 7, "sequence_start": True, "priority": 1}),
    ("says", {"sequence_id": "seven", "sequence_end": True, "outputs": [http.InferRequestedOutput("TEXT")]}),
    ("arguments", {}),
    ("calls", {}),
    ("streams", {}),
    ("threads", {}),
    ("large", {}),
    ("ready", {}),
    ("counts", {}),
    *(
        ("fail", {"parameters": {"code": code}})
        for code in ("INTERNAL", "NOT_FOUND", "CANCELLED", "UNAVAILABLE")
    ),
]


@pytest.mark.parametrize(("how", "more"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_what_a_model_says_and_does_is_the_same(
    server: ServerProcess, theirs: Tritonserver, how: str, more: dict[str, Any]
) -> None:
    ours, wanted = done(server.http, how, **dict(more)), done(theirs.http, how, **dict(more))
    assert ours == wanted
    assert how == "fail" or not isinstance(ours, tuple), ours


def test_calls_are_awaited_on_the_models_loop(server: ServerProcess, theirs: Tritonserver) -> None:
    for address in (server.http, theirs.http):
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(done, address, "", "async", value) for value in range(8)]
        assert [one.result() for one in asked] == [[[[2 * value]]] for value in range(8)]


def test_a_request_is_executed_again(server: ServerProcess, theirs: Tritonserver) -> None:
    for address in (server.http, theirs.http):
        assert done(address, "", "again", 3) == [0, 3]


def test_every_datatype_comes_back(server: ServerProcess, theirs: Tritonserver) -> None:
    inputs = []
    for kind in TYPES:
        made = http.InferInput(f"IN_{kind}", [1, 3], kind.replace("STRING", "BYTES"))
        array = (
            np.array([[0, 1, 1]]).astype(kind.lower().replace("fp", "float")) if kind != "STRING" else None
        )
        made.set_data_from_numpy(
            np.array([[b"", "schön".encode(), b"\0\xff"]], object) if array is None else array
        )
        inputs.append(made)
    found = []
    for address in (server.http, theirs.http):
        with http.InferenceServerClient(address) as client:
            answer = client.infer("every", inputs)
            found.append({kind: answer.as_numpy(f"OUT_{kind}").tolist() for kind in TYPES})
    assert found[0] == found[1]


def test_its_configuration_log_and_metrics_are_the_servers(server: ServerProcess) -> None:
    with http.InferenceServerClient(server.http) as client:
        config = client.get_model_config("count")
    assert config["max_batch_size"] == 8 and config["model_transaction_policy"] == {"decoupled": True}
    server.until_logged("hello from double")
    stream(server.grpc, 1)
    assert 'seen_total{model="count"}' in scrape(server)


def test_a_cancelled_request_is_told_so(server: ServerProcess) -> None:
    with grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("waits", numbers(grpc, 1))
        try:
            until(lambda: 'seen_total{model="waits"} 1' in scrape(server), server.log)
        finally:
            client.stop_stream(cancel_requests=True)
    until(lambda: "it was cancelled" in server.log(), server.log)
