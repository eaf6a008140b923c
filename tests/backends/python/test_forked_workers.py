"""A model that forks workers, and one that stops its event loop: neither takes the model, or anybody's answer, with it."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.http as httpclient

from tests.backends.python.models import config, isolated, python_model
from tests.support.server import ServerProcess
from tests.support.waiting import until
from triton_python_backend_utils._host import FORKED

# IN is what the worker does: 0 adds numbers, others ask the server for something
FORKS = """
import multiprocessing
import numpy as np

REQUESTS, SENDERS, EXECUTED = [], [], []

def work(wish):
    try:
        if wish == 1:
            given = [pb_utils.Tensor("IN", np.ones(1, np.float32))]
            call = pb_utils.InferenceRequest(model_name="double", inputs=given, requested_output_names=["OUT"])
            return call.exec().has_error()
        if wish == 2:
            pb_utils.MetricFamily("of_a_worker", "", pb_utils.MetricFamily.COUNTER)
        if wish == 3:
            pb_utils.load_model("double")
        if wish == 4:
            SENDERS[0].send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([b"a worker's"], np.object_))]))
        if wish == 5:
            pb_utils.Logger.log_info("said by a worker")
            REQUESTS[0].is_cancelled()
            pb_utils.empty((1 << 16,), np.float32)[:] = 1
            REQUESTS.clear()  # which frees what lies in shared memory
        return f"worked: {wish} after {len(EXECUTED)}"
    except pb_utils.TritonModelException as error:
        return str(error)

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for r in requests:
            REQUESTS[:] = [r]
            EXECUTED.append(1)
            SENDERS[:] = [r.get_response_sender()] if r.inputs()[0].as_numpy()[0] == 4 else []
            with multiprocessing.get_context("fork").Pool(1) as pool:
                said = pool.apply(work, (int(r.inputs()[0].as_numpy()[0]),))
            answer = pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([said.encode()], np.object_))])
            if SENDERS:
                SENDERS[0].send(answer, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            answers.append(None if SENDERS else answer)
        REQUESTS.clear()
        return answers
"""
DOUBLE = """
class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 2 * r.inputs()[0].as_numpy())]) for r in requests]
"""
# stops its loop when IN is 1; the request is answered all the same
STOPS = """
import asyncio

class TritonPythonModel:
    async def execute(self, requests):
        for r in requests:
            if r.inputs()[0].as_numpy()[0] == 1:
                asyncio.get_running_loop().stop()
                await asyncio.sleep(0)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", r.inputs()[0].as_numpy())]) for r in requests]
"""
WAYS = {"process": "process", "environment": sys.prefix}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("repository")
    python_model(repository, "double", DOUBLE)
    for name, way in WAYS.items():
        isolated(repository, f"forks_{name}", FORKS, config(outputs="OUT:TYPE_STRING:-1"), way=way)
    for name, way in {**WAYS, "none": "none"}.items():
        isolated(repository, f"stops_{name}", STOPS, way=way)
    with ServerProcess(repository) as process:
        yield process


def infer(server: ServerProcess, model: str, value: float) -> np.ndarray:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        tensor = httpclient.InferInput("IN", [1], "FP32")
        tensor.set_data_from_numpy(np.full(1, value, np.float32))
        found: np.ndarray = client.infer(model, [tensor]).as_numpy("OUT")
        return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_forked_worker_is_refused_and_the_model_goes_on(server: ServerProcess, way: str) -> None:
    said = {wish: infer(server, f"forks_{way}", wish)[0].decode() for wish in (1, 2, 3, 4, 5, 0)}
    assert said == {
        1: f"InferenceRequest.exec is refused: {FORKED}",
        2: f"MetricFamily is refused: {FORKED}",
        3: f"load_model is refused: {FORKED}",
        4: FORKED,
        5: "worked: 5 after 5",
        0: "worked: 0 after 6",  # in the same process
    }
    server.until_logged("said by a worker")


@pytest.mark.parametrize("way", [*WAYS, "none"])
def test_a_model_that_stops_its_event_loop_is_not_ready(server: ServerProcess, way: str) -> None:
    name = f"stops_{way}"
    with httpclient.InferenceServerClient(server.http) as client:
        assert client.is_model_ready(name)
        assert infer(server, name, 1).tolist() == [1], "nobody waits for ever"
        until(lambda: not client.is_model_ready(name), server.log)
        assert infer(server, name, 3).tolist() == [3]
        assert not client.is_model_ready(name)
    server.until_logged("the model has stopped its event loop")
