"""What a model's process can still write to is copied before code in the server's process gets it."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as utils
from neptrio.backends.python.bls import Call
from neptrio.execution.foreign_inputs import ForeignInputs
from neptrio.request import foreign_memory
from neptrio.request.infer_request import InferRequest
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from tests.support.rings import Pair

BIG = 100_000  # bytes: above what is copied anyway


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def model(*in_process: bool) -> Any:
    instances = [SimpleNamespace(backend=SimpleNamespace(in_process=one)) for one in in_process]
    return SimpleNamespace(pool=SimpleNamespace(instances=instances), decoupled=False)


def handed_over(model: Any, tensors: list[Any]) -> list[Any]:
    """The inputs with which a request for that model is submitted."""
    request = InferRequest()
    request.model_name, request.inputs = "other", tensors
    submitted: list[Any] = []
    admission: Any = SimpleNamespace(lookup=lambda name, version: model, submit=submitted.append)
    ForeignInputs().submit(admission, request, submitted.append)
    assert submitted == [request]
    return request.inputs


def scribble(pair: Pair) -> None:
    """The process writes over all its memory."""
    layout = pair.layout
    pair.shared.write(layout.outputs, b"\xff" * (layout.size - layout.outputs))


def output(pair: Pair) -> Any:
    answer = np.arange(BIG, dtype=np.uint8)
    (tensor,) = pair.outputs(
        lambda requests: [utils.InferenceResponse([utils.Tensor("OUT", answer)])], IN=np.zeros(1, np.float32)
    )
    return tensor


def test_a_model_in_the_servers_process_gets_a_copy(pair: Pair) -> None:
    tensor = output(pair).renamed("INDEX")
    assert foreign_memory.is_foreign(tensor)
    (copy,) = handed_over(model(False, True), [tensor])
    scribble(pair)
    assert to_numpy(tensor)[5] == 255
    assert (copy.name, copy.shape, to_numpy(copy)[5]) == ("INDEX", (BIG,), 5)
    assert not foreign_memory.is_foreign(copy)


def test_a_model_with_a_process_of_its_own_gets_what_there_is(pair: Pair) -> None:
    tensors = [output(pair)]
    assert handed_over(model(False), tensors) is tensors
    tensors.clear()


def test_a_returned_input_is_foreign_too(pair: Pair) -> None:
    def identity(requests: list[Any]) -> list[Any]:
        return [utils.InferenceResponse([utils.Tensor("OUT", requests[0].inputs()[0].as_numpy())])]

    (tensor,) = pair.outputs(identity, IN=np.zeros(BIG, np.uint8))
    assert foreign_memory.is_foreign(tensor)


def test_the_servers_own_memory_is_not_copied() -> None:
    tensors = [from_numpy("IN", np.zeros(BIG, np.uint8)).renamed("X")]
    assert handed_over(model(True), tensors) is tensors


def test_a_call_of_a_model_in_the_servers_process_hands_over_copies(pair: Pair) -> None:
    request = InferRequest()
    request.model_name, request.inputs = "other", [output(pair)]
    submitted: list[Any] = []

    def find(found: InferRequest, one_response: str | None) -> Any:
        found.model = pair.model
        return pair.model

    admission = SimpleNamespace(find=find, submit=submitted.append)
    services: Any = SimpleNamespace(admission=admission, foreign_inputs=ForeignInputs())
    Call(services, request, False, lambda response, final: None, None).submit()
    assert submitted == [request]
    assert not foreign_memory.is_foreign(request.inputs[0])
