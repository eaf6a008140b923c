"""Configurations that say something else than their ONNX model, and requests that must not meet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from onnx import helper

from neptrio.backends.onnx import model as onnx_model
from neptrio.backends.onnx.backend import OnnxBackend
from neptrio.errors import InvalidArgument
from tests.support import onnx_models
from tests.support.onnx_instances import context, instance, request, run

tensor = onnx_models.tensor


def detector(symbol: str | None) -> bytes:
    """The rows of X twice, in a dimension that is not the batch's."""
    return onnx_models.model(
        [helper.make_node("Concat", ["X", "X"], ["Y"], axis=0)],
        [tensor("X", "FP32", ["batch", 2])],
        [tensor("Y", "FP32", [symbol, 2])],
    )


@pytest.mark.parametrize("symbol", ["detections", None])
def test_other_symbols_than_the_batchs_are_not_batched(tmp_path: Path, symbol: str | None) -> None:
    made = context(tmp_path, detector(symbol), "")
    OnnxBackend.auto_complete(made)
    assert made.config.max_batch_size == 0 and made.config.WhichOneof("scheduling_choice") is None
    assert list(made.config.output[0].dims) == [-1, 2]
    read = context(tmp_path / "read", detector(symbol), "")
    OnnxBackend.complete_from_files(read)
    assert read.config == made.config
    same = context(tmp_path / "same", onnx_models.identity(), "")
    OnnxBackend.auto_complete(same)
    assert same.config.max_batch_size == 4 and same.config.HasField("dynamic_batching")


@pytest.mark.parametrize("api", ["c", "python"])
@pytest.mark.parametrize("lone", [True, False])
def test_rows_that_are_not_the_batchs_fail(
    tmp_path: Path, api: str, lone: bool, caplog: pytest.LogCaptureFixture
) -> None:
    backend = instance(tmp_path, detector("detections"), "max_batch_size: 8", api)
    assert (
        "the first dimensions of its inputs and outputs are not one symbol: 'X' batch, 'Y' detections"
        in caplog.text
    )
    rows = np.ones((1, 2), np.float32)
    batch = run(backend, *[request(X=rows) for _ in range(1 if lone else 2)])
    failure = batch.error or batch.responses[0].error
    assert f"expected the batch dimension {1 if lone else 2}" in str(failure)


@pytest.mark.parametrize("api", ["c", "python"])
def test_one_bad_string_fails_its_request_alone(tmp_path: Path, api: str) -> None:
    backend = instance(tmp_path, onnx_models.identity("BYTES"), "max_batch_size: 8", api)
    good = np.array([[b"a", b"b", b"c", b"d"]], object)
    bad = np.array([[b"a", b"\xff\xfe", b"c", b"d"]], object)
    batch = run(backend, request(X=good), request(X=bad), request(X=good))
    assert batch.error is None
    assert [response.error is None for response in batch.responses] == [True, False, True]
    assert "must hold UTF-8 strings" in str(batch.responses[1].error)
    assert [r.outputs[0].shape for r in (batch.responses[0], batch.responses[2])] == [(1, 4)] * 2
    with pytest.raises(InvalidArgument, match="must hold UTF-8 strings"):
        raise run(backend, request(X=bad)).error


def test_one_bad_string_among_ragged_requests(tmp_path: Path) -> None:
    config = (
        'max_batch_size: 8 input { name: "X" data_type: TYPE_STRING dims: [-1] allow_ragged_batch: true } '
        'output { name: "Y" data_type: TYPE_STRING dims: [1] } '
        'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "N" data_type: TYPE_INT32 source_input: "X" }'
    )
    content = onnx_models.model(
        [
            helper.make_node("Sub", ["N", "one"], ["at"]),
            helper.make_node("Gather", ["X", "at"], ["last"]),
            helper.make_node("Unsqueeze", ["last", "axis"], ["Y"]),
        ],
        [tensor("X", "BYTES", [None]), tensor("N", "INT32", ["rows"])],
        [tensor("Y", "BYTES", ["rows", 1])],
        [
            helper.make_tensor("one", onnx_models.TYPES["INT32"], [1], [1]),
            helper.make_tensor("axis", onnx_models.TYPES["INT64"], [1], [1]),
        ],
    )
    backend = instance(tmp_path, content, config)
    words = ([[b"a", b"b"]], [[b"\xff"]], [[b"c", b"d", b"e"]])
    batch = run(backend, *[request(X=np.array(w, object)) for w in words])
    assert batch.error is None
    assert [response.error is None for response in batch.responses] == [True, False, True]
    assert [bytes(batch.responses[i].outputs[0])[4:] for i in (0, 2)] == [b"b", b"e"]


CONTROL = 'sequence_batching { control_input { name: "S" control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1] } } } '
STATE = 'sequence_batching { state { input_name: "S" output_name: "Y" data_type: TYPE_INT64 dims: [1] } } '
EXTRA = 'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "S" data_type: TYPE_FP32 source_input: "X" } '


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CONTROL, "unexpected datatype TYPE_FP32 for control input 'S', expecting TYPE_INT32"),
        (STATE, "unexpected datatype TYPE_INT64 for state input 'S', expecting TYPE_INT32"),
        (EXTRA, "unexpected datatype TYPE_FP32 for batch input 'S', expecting TYPE_INT32"),
        (STATE.replace('"S"', '"Z"'), "unexpected inference input 'Z'"),
    ],
)
def test_types_of_what_the_server_makes_are_the_models(tmp_path: Path, config: str, said: str) -> None:
    content = onnx_models.model(
        [helper.make_node("Add", ["X", "S"], ["Y"])],
        [tensor("X", "INT32", ["N", 1]), tensor("S", "INT32", ["N", 1])],
        [tensor("Y", "INT32", ["N", 1])],
    )
    given = 'max_batch_size: 4 input { name: "X" data_type: TYPE_INT32 dims: [1] } ' + config
    made = context(tmp_path, content, given)
    OnnxBackend.auto_complete(made)
    from neptrio.backends.onnx import options as onnx_options

    found = list(onnx_model.differences(made.config, onnx_options.light_session(made)))
    assert any(said in text for text in found), found
