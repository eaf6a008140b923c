"""What waits for room in one ring of a model's process never holds up the other, and whoever reads gets his responses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from neptrio.request.infer_request import InferResponse
from tests.backends.python.models import config, python_model
from tests.support.cancelled import UNTIL_CANCELLED
from tests.support.rings import Pair
from tests.support.server import ServerProcess
from triton_python_backend_utils._process import kinds
from triton_python_backend_utils._process.ring_child import RingChild

# calls IN times with an input that the server looks at where it lies: each is memory to be returned
CALLER = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        data = np.zeros(5000, np.float32)
        for request in requests:
            for i in range(int(request.inputs()[0].as_numpy()[0])):
                call = pb_utils.InferenceRequest(
                    model_name="callee", inputs=[pb_utils.Tensor("IN", data)], requested_output_names=["OUT"])
                response = call.exec()
                assert not response.has_error(), response.error().message()
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i + 1], np.float32))])]
"""
CALLEE = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.zeros(1, np.float32))]) for _ in requests]
"""
COUNTS = """
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for i in range(int(request.inputs()[0].as_numpy()[0])):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([i], np.float32))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# makes the call in execute() and reads its responses in another thread, which execute() waits for or does not
READS_ELSEWHERE = """
import json, threading
import numpy as np

class TritonPythonModel:
    def execute(self, requests):
        (request,) = requests
        call = pb_utils.InferenceRequest(
            model_name="counts", inputs=request.inputs(), requested_output_names=["OUT"])
        responses = call.exec(decoupled=True)
        sender = request.get_response_sender()
        def read():
            found = sum(float(t.as_numpy()[0]) for r in responses for t in r.output_tensors())
            sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([found], np.float32))]),
                        flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        thread = threading.Thread(target=read)
        thread.start()
        if json.loads(request.parameters())["waits"]:
            thread.join()
        return None
"""

# makes more calls than Python functions may call one another, and is cancelled during the next
FOLLOWS = CALLER.replace(
    "        return [",
    """
        pb_utils.Logger.log_info("it waits")
        until_cancelled(*requests)
        pb_utils.Logger.log_info("it was cancelled")
        return [""",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("lines")
    for name, code in (("caller", CALLER), ("callee", CALLEE), ("elsewhere", READS_ELSEWHERE)):
        python_model(folder, name, code, config())
    python_model(folder, "follows", UNTIL_CANCELLED + FOLLOWS)
    python_model(folder, "counts", COUNTS, config(extra="model_transaction_policy { decoupled: true }"))
    with ServerProcess(folder) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as made:
        yield made


def infer(client: httpclient.InferenceServerClient, model: str, n: int, **parameters: Any) -> float:
    given = httpclient.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([n], np.float32))
    return float(client.infer(model, [given], parameters=parameters).as_numpy("OUT")[0])


def test_more_calls_than_a_ring_has_entries(client: httpclient.InferenceServerClient) -> None:
    """The memory of each is returned on the other ring, to a thread that sleeps."""
    assert infer(client, "caller", 1200) == 1200


@pytest.mark.slow
def test_a_model_that_made_many_calls_can_be_cancelled(server: ServerProcess) -> None:
    given = grpcclient.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.array([1100], np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        call = client.async_infer("follows", [given], lambda result, error: None)
        server.until_logged("it waits")
        call.cancel()
        server.until_logged("it was cancelled")
    assert "RecursionError" not in server.log()


@pytest.mark.parametrize("waits", [True, False])
def test_responses_of_a_decoupled_call_in_another_thread(
    client: httpclient.InferenceServerClient, waits: bool
) -> None:
    assert infer(client, "elsewhere", 5, waits=waits) == 10


@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
def test_ends_of_sequences_do_not_hold_up_an_acknowledgement(plain: bool) -> None:
    """A model that sends and waits for room takes nothing from its ring of batches meanwhile."""
    pair = Pair(plain=plain)
    try:
        for i in range(300):
            pair.server.sequence_ended(i + 1, "idle")
        pair.server.acknowledge(1 << 20, 7)
        assert pair.child.take_control() == (kinds.ACKNOWLEDGE, 1 << 20, None, 7)
        assert pair.server.waiting == 300 - 256
    finally:
        pair.close()


class Hearing(RingChild):
    """A process's half, without its socket and model: only what hears."""

    def __init__(self, pair: Pair) -> None:
        self.end = pair.child
        self.calls = {}
        self.decoupled_calls = set()
        self.hearing = threading.RLock()


@pytest.mark.parametrize("plain", [False, True], ids=["compiled", "plain"])
def test_two_threads_that_hear_keep_the_order(plain: bool) -> None:
    pair = Pair(plain=plain)
    child = Hearing(pair)
    order: list[int] = []
    other = threading.Thread(target=child.hear)

    def first(response: Any, final: bool) -> None:
        other.start()
        other.join(0.2)  # it is not to overtake: it ends only after this function has
        order.append(1)

    child.calls = {1: first, 2: lambda response, final: order.append(2)}
    try:
        for key in (1, 2):
            pair.server.respond(key, InferResponse([], None, {}), True, False, {})
        child.hear()
        other.join()
        assert order == [1, 2]
    finally:
        del child
        pair.close()
