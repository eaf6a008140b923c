"""ONNX models that are not all tensors with a known number of dimensions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as httpclient
from onnx import TensorProto, helper
from tritonclient.utils import InferenceServerException

from tests.support.repository import write_model
from tests.support.server import ServerProcess

FLOAT = TensorProto.FLOAT
DIMS = 'input { name: "X" dims: [ -1, 2 ] } output { name: "Y" dims: [ -1, 2 ] }'
FLOAT_TYPE = helper.make_tensor_type_proto(FLOAT, ["N"])
SCORES = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(FLOAT, []))


def info(name: str, shape: Any = ("N", 2), kind: int = FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


# name -> nodes, inputs, outputs, and why the model is refused
REFUSED: dict[str, tuple[Any, Any, Any, str]] = {
    "zipmap": (
        helper.make_node("ZipMap", ["X"], ["Z"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]),
        info("X"),
        helper.make_value_info("Z", helper.make_sequence_type_proto(SCORES)),
        "output 'Z' is a seq(map(int64,tensor(float))), which the protocol cannot carry; convert the model without ZipMap",
    ),
    "float8": (
        helper.make_node("Cast", ["X"], ["Y"], to=TensorProto.FLOAT8E4M3FN),
        info("X"),
        info("Y", kind=TensorProto.FLOAT8E4M3FN),
        "output 'Y' is a tensor(float8e4m3fn), which the protocol cannot carry; cast it to FP16 or FP32 in the model",
    ),
    "optional": (
        helper.make_node("OptionalGetElement", ["O"], ["Y"]),
        helper.make_value_info("O", helper.make_optional_type_proto(FLOAT_TYPE)),
        info("Y", ("N",)),
        "input 'O' is a optional(tensor(float)), which the protocol cannot carry; only tensors are carried",
    ),
}


def made(node: Any, given: Any, found: Any) -> bytes:
    graph = helper.make_graph([node], "test", [given], [found])
    sets = [helper.make_opsetid("", 19), helper.make_opsetid("ai.onnx.ml", 3)]
    return bytes(helper.make_model(graph, opset_imports=sets, ir_version=9).SerializeToString())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    backend = 'backend: "onnxruntime" '
    for name, (*parts, _) in REFUSED.items():
        for kind, text in (("", ""), ("_said", DIMS.replace("dims", "data_type: TYPE_FP32 dims"))):
            write_model(repository, name + kind, backend + text, {"1/model.onnx": made(*parts)})
    same = helper.make_node("Identity", ["X"], ["Y"])
    unranked = made(same, info("X", None), info("Y", None))
    write_model(repository, "unranked", backend, {"1/model.onnx": unranked})
    write_model(repository, "unranked_said", backend + DIMS, {"1/model.onnx": unranked})
    batched = backend + DIMS + "max_batch_size: 4 dynamic_batching { }"
    write_model(repository, "unranked_batched", batched, {"1/model.onnx": unranked})
    state = (
        'sequence_batching { state { input_name: "X" output_name: "Y" data_type: TYPE_FP32 dims: [ 1, -1, 2 ] '
        'initial_state { name: "empty" data_type: TYPE_FP32 dims: [ 1, 0, 2 ] zero_data: true } } }'
    )
    node = helper.make_node("Concat", ["X", "IN"], ["Y"], axis=1)
    both = [info("X", (1, "N", 2)), info("IN", (1, "M", 2))]
    outputs = [info("Y", (1, "K", 2)), info("OUT", (1, "K", 2))]
    graph = helper.make_graph([node, helper.make_node("Identity", ["Y"], ["OUT"])], "test", both, outputs)
    grows = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    text = (
        backend + state + ' input { name: "IN" dims: [ 1, -1, 2 ] } output { name: "OUT" dims: [ 1, -1, 2 ] }'
    )
    write_model(repository, "grows", text, {"1/model.onnx": bytes(grows.SerializeToString())})
    scattered = (
        ' max_batch_size: 4 input { name: "X" dims: [ -1 ] allow_ragged_batch: true } output { name: "Y" dims: [ -1 ] } '
        'batch_output { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }'
    )
    flat = made(same, info("X", ("N",)), info("Y", ("N",)))
    write_model(repository, "scattered", backend + scattered, {"1/model.onnx": flat})
    with ServerProcess(repository, "--model-control-mode=explicit") as process:
        yield process


def infer(
    server: ServerProcess, model: str, array: np.ndarray, name: str = "X", out: str = "Y", **more: Any
) -> Any:
    with httpclient.InferenceServerClient(server.http) as client:
        tensor = httpclient.InferInput(name, list(array.shape), "FP32")
        tensor.set_data_from_numpy(array)
        return client.infer(model, [tensor], **more).as_numpy(out)


def load(server: ServerProcess, model: str) -> None:
    with httpclient.InferenceServerClient(server.http) as client:
        client.load_model(model)


@pytest.mark.parametrize("said", ["", "_said"])
@pytest.mark.parametrize("model", REFUSED)
def test_what_cannot_be_carried_is_refused_with_its_type(
    server: ServerProcess, model: str, said: str
) -> None:
    reason = REFUSED[model][3]
    if said and model == "zipmap":
        reason = "unexpected inference output 'Y', allowed outputs are: 'Z'"
    with pytest.raises(InferenceServerException, match=re.escape(reason)):
        load(server, model + said)


def test_an_unknown_rank_is_any(server: ServerProcess) -> None:
    load(server, "unranked")
    for shape in ((), (3,), (1, 2), (2, 3, 4)):
        given = np.ones(shape, np.float32)
        found = infer(server, "unranked", given)
        assert found.shape == shape and (found == given).all()
    load(server, "unranked_said")
    assert infer(server, "unranked_said", np.ones((3, 2), np.float32)).shape == (3, 2)
    with pytest.raises(InferenceServerException, match=r"Expected \[-1,2\], got \[2\]"):
        infer(server, "unranked_said", np.ones(2, np.float32))
    load(server, "unranked_batched")
    assert infer(server, "unranked_batched", np.ones((2, 3, 2), np.float32)).shape == (2, 3, 2)


def test_an_initial_state_may_have_no_elements(server: ServerProcess) -> None:
    load(server, "grows")
    first = infer(
        server, "grows", np.ones((1, 1, 2), np.float32), "IN", "OUT", sequence_id=7, sequence_start=True
    )
    assert first.shape == (1, 1, 2)
    last = infer(
        server, "grows", np.ones((1, 2, 2), np.float32), "IN", "OUT", sequence_id=7, sequence_end=True
    )
    assert last.shape == (1, 3, 2)


def test_a_batch_outputs_shape_is_of_one_request(server: ServerProcess) -> None:
    load(server, "scattered")
    assert infer(server, "scattered", np.ones((1, 3), np.float32)).shape == (1, 3)
