"""Small ONNX models for tests, as file contents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

Shape = Sequence[int | str | None]
TYPES = {
    "BOOL": TensorProto.BOOL, "UINT8": TensorProto.UINT8, "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32, "UINT64": TensorProto.UINT64, "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16, "INT32": TensorProto.INT32, "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16, "FP32": TensorProto.FLOAT, "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING, "BF16": TensorProto.BFLOAT16,
}  # fmt: skip


def tensor(name: str, datatype: str, shape: Shape) -> Any:
    """The declaration of an input or output."""
    return helper.make_tensor_value_info(name, TYPES[datatype], list(shape))


def model(
    nodes: list[Any], inputs: list[Any], outputs: list[Any], initializers: list[Any] | None = None
) -> bytes:
    """A serialized model with those nodes."""
    graph = helper.make_graph(nodes, "test", inputs, outputs, initializers or [])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    return bytes(made.SerializeToString())


def identity(datatype: str = "FP32", shape: Shape = ("N", 4), names: tuple[str, str] = ("X", "Y")) -> bytes:
    """Y = X."""
    return model(
        [helper.make_node("Identity", [names[0]], [names[1]])],
        [tensor(names[0], datatype, shape)],
        [tensor(names[1], datatype, shape)],
    )


def add_sub(shape: Shape = ("N", 16)) -> bytes:
    """SUM = A + B and DIFF = A - B, INT32."""
    return model(
        [helper.make_node("Add", ["A", "B"], ["SUM"]), helper.make_node("Sub", ["A", "B"], ["DIFF"])],
        [tensor("A", "INT32", shape), tensor("B", "INT32", shape)],
        [tensor("SUM", "INT32", shape), tensor("DIFF", "INT32", shape)],
    )


def scale(shape: Shape = ("N", 4)) -> bytes:
    """Y = X * FACTOR, where FACTOR is an input with an initializer (10.0): it may be left out."""
    return model(
        [helper.make_node("Mul", ["X", "FACTOR"], ["Y"])],
        [tensor("X", "FP32", shape), tensor("FACTOR", "FP32", [1])],
        [tensor("Y", "FP32", shape)],
        [numpy_helper.from_array(np.array([10.0], np.float32), "FACTOR")],
    )
