"""The repository of `make bench-many` and `make soak-many`: ONNX and Python models of mixed sizes."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from onnx import TensorProto, helper, numpy_helper

MIB = 1 << 20
PYTHON = """
import numpy
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.weights = numpy.ones({size}, numpy.uint8)

    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
            )
            for request in requests
        ]
"""
TENSORS = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 1, 4 ] } ] output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1, 4 ] } ]\n'
SMALL = {"a small Python model": "python-small", "an ONNX model of 4 MiB": "onnx-small"}
BODY = b'{"inputs":[{"name":"X","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'


def onnx_model(size: int) -> bytes:
    """Y = X, with so many bytes of weights that the session keeps."""
    wide = max(size // 16, 1)
    first = numpy_helper.from_array(np.random.default_rng(0).random((4, wide), np.float32), "A")
    second = helper.make_tensor("B", TensorProto.FLOAT, [1], [0.0])
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["X", "A"], ["H"]),
            helper.make_node("ReduceMean", ["H"], ["M"], axes=[1], keepdims=1),
            helper.make_node("Mul", ["M", "B"], ["Z"]),
            helper.make_node("Add", ["X", "Z"], ["Y"]),
        ],
        "many",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("Y", TensorProto.FLOAT, [1, 4])],
        [first, second],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def write(
    repository: Path, count: int, python: float, mib: float, chance: random.Random, instances: int = 0
) -> list[str]:
    """Writes the models, ONNX models with so many instances (0: as many as the backend takes); their names, the most popular
    first."""
    groups = f"instance_group [ {{ count: {instances} }} ]\n" if instances else ""
    drawn = []
    for number in range(count):
        size = int(chance.expovariate(1 / mib) * MIB) + (64 << 10)
        kind = "python" if chance.random() < python else "onnx"
        drawn.append((f"{kind}-{number:05}", size))
    names = [name for name, _ in drawn]
    for name, size in (*drawn, *zip(SMALL.values(), (64 << 10, 4 * MIB), strict=True)):
        kind = name.partition("-")[0]
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        backend = "python" if kind == "python" else "onnxruntime"
        more = groups if kind == "onnx" else ""
        (folder.parent / "config.pbtxt").write_text(
            f'backend: "{backend}" max_batch_size: 0\n{TENSORS}{more}'
        )
        if kind == "python":
            (folder / "model.py").write_text(PYTHON.format(size=size))
        else:
            (folder / "model.onnx").write_bytes(onnx_model(size))
    (repository / "warm" / "1").mkdir(parents=True)
    keep = 'parameters { key: "keep_loaded" value: { string_value: "true" } }'
    (repository / "warm" / "config.pbtxt").write_text(
        f'backend: "identity" max_batch_size: 0\n{TENSORS}{keep}'
    )
    chance.shuffle(names)
    return names
