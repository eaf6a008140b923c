"""A model in the server's process gives its arrays away: without a copy where it keeps nothing, else with one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as utils
from neptrio.backends.python.model_runner import ModelRunner
from neptrio.request.numpy_tensor import to_numpy

KEPT = {
    "nothing": lambda response, array: None,
    "response": lambda response, array: response,
    "tensors": lambda response, array: response.output_tensors(),
    "tensor": lambda response, array: response.output_tensors()[0],
    "array": lambda response, array: array,
    "view": lambda response, array: array[1:],
    "base": lambda response, array: array.base,
    "answers": lambda response, array: None,
}


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


@pytest.mark.parametrize("form", [list, tuple])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kept", KEPT)
def test_an_answer_that_the_model_can_still_change_is_copied(kept: str, count: int, form: Any) -> None:
    held: list[Any] = []
    where: list[int] = []

    def execute() -> Any:
        made = []
        for _ in range(count):
            array = np.zeros((2, 1000), np.float32)[1:]
            where.append(address(array))
            response = utils.InferenceResponse([utils.Tensor("OUT", array)])
            held.append(KEPT[kept](response, array))
            made.append(response)
        answers = form(made)
        held.append(answers if kept == "answers" else None)
        return answers

    runner: Any = ModelRunner.__new__(ModelRunner)
    runner.name, runner.decoupled = "m", False
    channel = SimpleNamespace(taken=False, sent=False, close=lambda: None)
    request = SimpleNamespace(outputs=None, model=SimpleNamespace(known_outputs={"OUT"}))
    batch: Any = SimpleNamespace(requests=[request] * count, mark_output_start=lambda: None)
    runner.answer(batch, [SimpleNamespace(_release_flags=1, _channel=channel)] * count, execute())
    taken = [address(to_numpy(response.outputs[0])) for response in batch.responses]
    assert [a == b for a, b in zip(taken, where, strict=True)] == [kept == "nothing"] * count
    held.clear()
