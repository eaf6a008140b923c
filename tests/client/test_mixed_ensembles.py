"""Ensembles of models with and without batches, and the end of decoupled ones, as on a Triton server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import ISOLATION, config, python_model
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.streams import Answers

# adds the number of the tensor's dimensions, so that the answer tells what the models have seen
RANK = """
class TritonPythonModel:
    def execute(self, requests):
        found = [r.inputs()[0].as_numpy() for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", 10 * a + a.ndim)]) for a in found]
"""
# answers as often as IN says, the last time with the final flag
REPEATS = """
class TritonPythonModel:
    def execute(self, requests):
        for r in requests:
            count = int(r.inputs()[0].as_numpy()[0])
            for i in range(count):
                last = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if i == count - 1 else 0
                answer = pb_utils.Tensor("OUT", r.inputs()[0].as_numpy() * 0 + i)
                r.get_response_sender().send(pb_utils.InferenceResponse([answer]), last)
"""
STEP = (
    '{{ model_name: "{}" model_version: -1 input_map {{ key: "IN" value: "{}" }} '
    'output_map {{ key: "OUT" value: "{}" }} }}'
)


def ensemble(repository: Path, name: str, steps: list[str], max_batch_size: int, dims: str = "2") -> None:
    tensors = ["IN", *(f"T{i}" for i in range(1, len(steps))), "OUT"]
    rows = ", ".join(STEP.format(step, *tensors[i : i + 2]) for i, step in enumerate(steps))
    text = config(f"IN:TYPE_FP32:{dims}", f"OUT:TYPE_FP32:{dims}", max_batch_size)
    text = text.replace('backend: "python"', 'platform: "ensemble"')
    write_model(repository, name, text + f"ensemble_scheduling {{ step [ {rows} ] }}")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name, dims, size in (("batches", "2", 4), ("plain", "2", 0), ("open", "-1,2", 0)):
        text = config(f"IN:TYPE_FP32:{dims}", f"OUT:TYPE_FP32:{dims}", size) + ISOLATION.format("none")
        python_model(repository, name, RANK, text)
    ensemble(repository, "batches_plain", ["batches", "plain"], 0)
    ensemble(repository, "plain_batches", ["plain", "batches"], 0)
    ensemble(repository, "four_batches_plain", ["batches", "plain"], 4)
    ensemble(repository, "four_open_batches", ["open", "batches"], 4)
    ensemble(repository, "batches_open", ["batches", "open"], 0, "-1,2")
    ensemble(repository, "too_many", ["batches"], 8)
    one = ("IN:TYPE_FP32:1", "OUT:TYPE_FP32:1")
    decoupled = " model_transaction_policy { decoupled: true }" + ISOLATION.format("none")
    python_model(repository, "repeats", REPEATS, config(*one) + decoupled)
    python_model(repository, "after", RANK, config(*one) + ISOLATION.format("none"))
    ensemble(repository, "repeats_after", ["repeats", "after"], 0, "1")
    loads = [f"--load-model={d.name}" for d in repository.iterdir() if d.name != "too_many"]
    with ServerProcess(repository, "--model-control-mode=explicit", *loads) as process:
        yield process


def infer(server: ServerProcess, model: str, *shape: int) -> Any:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput("IN", list(shape), "FP32")
        tensor.set_data_from_numpy(np.ones(shape, np.float32))
        return client.infer(model, [tensor]).as_numpy("OUT")


@pytest.mark.parametrize(
    ("model", "shape", "seen"),
    [
        ("batches_plain", (2,), 121),  # [1, 2], then [2]
        ("plain_batches", (2,), 112),
        ("four_batches_plain", (1, 2), 121),
        ("four_open_batches", (3, 2), 122),
        ("batches_open", (3, 2), 122),
    ],
)
def test_a_leading_one_is_added_and_dropped(
    server: ServerProcess, model: str, shape: tuple[int, ...], seen: int
) -> None:
    found = infer(server, model, *shape)
    assert found.shape == shape and (found == seen).all()


def test_a_batch_is_no_single_item(server: ServerProcess) -> None:
    with pytest.raises(InferenceServerException, match=r"for model 'plain'. Expected \[2\], got \[3,2\]"):
        infer(server, "four_batches_plain", 3, 2)


def test_an_ensemble_allows_no_more_than_its_steps(server: ServerProcess) -> None:
    text = "ensemble too_many allows maximum batch size 8, but it contains model batches which only allows maximum batch "
    with httpclient.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match=text + "size to be 4"):
            client.load_model("too_many")


@pytest.mark.parametrize("count", [1, 3])
def test_the_last_response_with_data_is_final(server: ServerProcess, count: int) -> None:
    tensor = grpcclient.InferInput("IN", [1], "FP32")
    tensor.set_data_from_numpy(np.full(1, count, np.float32))
    with grpcclient.InferenceServerClient(server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer("repeats_after", [tensor], enable_empty_final_response=True)
        seen = []
        while not seen or not seen[-1][1]:
            result = answers.result()
            final = result.get_response().parameters["triton_final_response"].bool_param
            seen.append((float(result.as_numpy("OUT")[0]), final))
    assert seen == [(10 * i + 1, i == count - 1) for i in range(count)]
