"""What the budget says that models hold is what the server's process has grown by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as httpclient
from onnx import TensorProto, helper, numpy_helper

from tests.support import onnx_models
from tests.support.memory import anonymous
from tests.support.metrics import scrape, value
from tests.support.repository import write_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.slow_models import parameter
from tests.support.waiting import until

MIB = 1 << 20
SIZES = (3, 5, 7, 8, 9, 11)  # MiB of weights
BUDGET = 64
CONFIG = 'backend: "onnxruntime" max_batch_size: 0 instance_group { kind: KIND_CPU count: 2 } ' + parameter(
    "share_session", "0"
)
pytestmark = pytest.mark.slow


def weighty(mib: int) -> bytes:
    """Y = X + numbers of so many MiB of weights."""
    weights = np.random.default_rng(mib).random((mib * 256, 1024), np.float32)
    nodes = [
        helper.make_node("Cast", ["X"], ["I"], to=TensorProto.INT64),
        helper.make_node("Gather", ["A", "I"], ["H"]),
        helper.make_node("ReduceMax", ["H"], ["M"], axes=[2], keepdims=0),
        helper.make_node("Add", ["X", "M"], ["Y"]),
    ]
    given = onnx_models.tensor("X", "FP32", (1, 4))
    return onnx_models.model(
        nodes, [given], [onnx_models.tensor("Y", "FP32", (1, 4))], [numpy_helper.from_array(weights, "A")]
    )


def roomy(mib: int) -> bytes:
    """Y = X + 0, by way of so many MiB that a run needs."""
    shape = helper.make_tensor("S", TensorProto.INT64, [2], [mib * MIB // 16, 4])
    nodes = [
        helper.make_node("Expand", ["X", "S"], ["H"]),
        helper.make_node("ReduceMean", ["H"], ["Y"], axes=[0], keepdims=1),
    ]
    given = onnx_models.tensor("X", "FP32", (1, 4))
    return onnx_models.model(nodes, [given], [onnx_models.tensor("Y", "FP32", (1, 4))], [shape])


def infer(client: httpclient.InferenceServerClient, name: str) -> None:
    given = httpclient.InferInput("X", [1, 4], "FP32")
    given.set_data_from_numpy(np.ones((1, 4), np.float32))
    assert client.infer(name, [given]).as_numpy("Y").shape == (1, 4)


def held(running: ServerProcess) -> int:
    return int(value(scrape(running), "neptrio_demand_held_bytes"))


@no_memory_figures
def test_models_that_come_and_go_leave_no_holes(tmp_path: Path) -> None:
    for mib in SIZES:
        extra = parameter("minimum_loaded_seconds", "0.001")
        write_model(tmp_path, f"m{mib}", CONFIG + extra, {"1/model.onnx": weighty(mib)})
    write_model(tmp_path, "roomy", CONFIG, {"1/model.onnx": roomy(20)})
    flags = ("--model-control-mode=on-demand", f"--model-memory-budget={BUDGET}MiB")
    with (
        ServerProcess(tmp_path, *flags) as running,
        httpclient.InferenceServerClient(running.http) as client,
    ):
        pid = running.process.pid
        infer(client, "m3")  # what ONNX Runtime needs once is no model's
        client.unload_model("m3")
        until(lambda: held(running) == 0)
        before = anonymous(pid)
        # what a run needs goes back after it, so that what a model holds is known when it is loaded
        infer(client, "roomy")
        until(lambda: anonymous(pid) - before < 8 * MIB)
        client.unload_model("roomy")
        for mib in np.random.default_rng(1).permutation(np.repeat(SIZES, 5)).tolist():
            infer(client, f"m{mib}")
            # what is put away is gone before there is room for the next
            assert anonymous(pid) - before < BUDGET * MIB * 1.05, (mib, held(running))
        until(lambda: anonymous(pid) - before < held(running) + 8 * MIB)
        assert held(running) < 2 * sum(SIZES) * MIB, "some were put away"


KEEPS = """
import sys
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        sys.kept = numpy.ones(64 << 20, numpy.uint8)  # also after the model is gone
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
            )
            for request in requests
        ]
"""
TENSORS = 'max_batch_size: 0 input [ { name: "X" data_type: TYPE_FP32 dims: [ 1, 4 ] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1, 4 ] } ] '


@no_memory_figures
def test_what_the_server_has_grown_by_counts_up_to_a_tenth(tmp_path: Path) -> None:
    at_once = parameter("minimum_loaded_seconds", "0.001")
    grows = 'backend: "python" ' + TENSORS + at_once + parameter("isolation", "none")
    write_model(tmp_path, "grows", grows, {"1/model.py": KEEPS})
    names = {f"m{number}": 18 for number in range(10)}
    for name, mib in {**names, "huge": 185}.items():  # files that take no room on the disk, nor in memory
        folder = write_model(tmp_path, name, 'backend: "identity" ' + TENSORS + at_once)
        with (folder / "1" / "weights.bin").open("wb") as file:
            file.truncate(mib * MIB)
    with (
        ServerProcess(tmp_path, "--model-control-mode=on-demand", "--model-memory-budget=200MiB") as running,
        httpclient.InferenceServerClient(running.http) as client,
    ):

        def grown() -> int:
            return int(value(scrape(running), "neptrio_demand_server_bytes"))

        for name in names:
            infer(client, name)
        assert held(running) == 180 * MIB and grown() == 0
        infer(client, "grows")
        until(lambda: grown() == 20 * MIB)
        until(lambda: held(running) <= 180 * MIB)
        rows = {row["name"]: row.get("reason") for row in client.get_model_repository_index()}
        assert rows["m0"] == "put away: models have grown beyond the budget"
        infer(client, "huge")  # which has all of it
        rows = {row["name"]: row["state"] for row in client.get_model_repository_index()}
        assert {name for name, state in rows.items() if state == "READY"} == {"huge"} and grown() == 20 * MIB
