"""What a model's batch looks like: batch_input kinds and batch_output."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from neptrio.errors import Internal, InvalidArgument
from neptrio.execution.batch import Batch
from neptrio.execution.layout import Layout
from neptrio.request.infer_request import InferResponse, ModelCore
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from tests.support.requests import config_of, request_of

RAGGED = """backend: "onnxruntime" max_batch_size: 8
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1, -1 ] allow_ragged_batch: true } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1, -1 ] } ] """


def batch_of(*arrays: np.ndarray) -> Batch:
    return Batch(ModelCore("model", "1"), [request_of(X=array) for array in arrays])


A = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
B = np.arange(8, dtype=np.float32).reshape(2, 4, 1)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("BATCH_ELEMENT_COUNT", [6, 8]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT", [6, 14]),
        ("BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO", [0, 6, 14]),
        ("BATCH_ITEM_SHAPE", [[2, 3], [4, 1], [4, 1]]),
        ("BATCH_ITEM_SHAPE_FLATTEN", [2, 3, 4, 1, 4, 1]),
        ("BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", [0] * 8),
    ],
)
@pytest.mark.parametrize(("type", "dtype"), [("TYPE_INT32", np.int32), ("TYPE_FP32", np.float32)])
def test_batch_inputs(kind: str, values: list[Any], type: str, dtype: Any) -> None:
    config = config_of(
        RAGGED + f'batch_input [ {{ kind: {kind} target_name: "E" data_type: {type} source_input: "X" }} ]'
    )
    x, extra = Layout(config).inputs(batch_of(A, B))
    assert x.shape == (14,)
    got = to_numpy(extra)
    assert extra.name == "E" and got.dtype == dtype
    np.testing.assert_array_equal(got, np.array(values, dtype))


def test_outputs_go_back_in_parts() -> None:
    batch = batch_of(A, B)
    out = np.arange(9, dtype=np.int32).reshape(3, 3)
    Layout(config_of(RAGGED)).respond(batch, [from_numpy("Y", out)])
    assert [r.outputs[0].shape for r in batch.responses] == [(1, 3), (2, 3)]
    np.testing.assert_array_equal(to_numpy(batch.responses[1].outputs[0]), out[1:])


@pytest.mark.parametrize("count", [1, 2])
def test_scattered_outputs_take_the_shape_of_their_input(count: int) -> None:
    config = config_of(
        RAGGED
        + 'batch_output [ { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" } ]'
    )
    arrays = [A, B][:count]
    batch = batch_of(*arrays)
    flat = np.concatenate([array.ravel() for array in arrays]) * 2
    Layout(config).respond(batch, [from_numpy("Y", flat)])
    for response, array in zip(batch.responses, arrays, strict=True):
        np.testing.assert_array_equal(to_numpy(response.outputs[0]), array * 2)


def test_an_output_without_the_batch_dimension_is_refused() -> None:
    with pytest.raises(
        Internal, match=r"shape \[4\] for a batch of 3: the first dimension must be the batch"
    ):
        Layout(config_of(RAGGED)).respond(batch_of(A, B), [from_numpy("Y", np.zeros(4, np.int32))])


def test_one_request_gets_the_outputs_as_they_are() -> None:
    batch = batch_of(A)
    out = [from_numpy("Y", np.zeros(4, np.int32))]
    Layout(config_of(RAGGED)).respond(batch, out)
    assert isinstance(batch.responses[0], InferResponse) and batch.responses[0].outputs is out


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        (
            'batch_input [ { target_name: "E" data_type: TYPE_INT32 source_input: "Z" } ]',
            "'Z', which is no input",
        ),
        (
            'batch_input [ { target_name: "E" data_type: TYPE_INT64 source_input: "X" } ]',
            "TYPE_INT32 or TYPE_FP32",
        ),
        ('batch_input [ { target_name: "E" data_type: TYPE_INT32 } ]', "needs one source_input"),
        ('batch_output [ { target_name: "Y" } ]', "needs one source_input"),
    ],
)
def test_configurations_that_cannot_be_followed(extra: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        Layout(config_of(RAGGED + extra))
