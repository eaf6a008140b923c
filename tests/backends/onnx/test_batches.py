"""How the onnxruntime backend forms and splits what is executed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from neptrio import datatypes
from neptrio.backends.onnx import python_session as onnx_python
from neptrio.backends.onnx.instance import OnnxInstance
from neptrio.errors import Internal, InvalidArgument
from neptrio.request.infer_request import Tensor, alias
from neptrio.request.numpy_tensor import to_numpy
from tests.support import onnx_instances, onnx_models
from tests.support.onnx_instances import execute, request, run

Make = Callable[..., OnnxInstance]


@pytest.fixture(params=["c", "python"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes instances with either interface of ONNX Runtime; both behave alike."""
    made: list[OnnxInstance] = []

    def make(content: bytes, config: str = "max_batch_size: 8") -> OnnxInstance:
        made.append(onnx_instances.instance(tmp_path / str(len(made)), content, config, request.param))
        return made[-1]

    yield make
    for one in made:
        one.finalize()


def test_rows_go_back_to_their_requests(instance: Make) -> None:
    backend = instance(onnx_models.add_sub(("N", 2)))
    arrays = [np.arange(2 * n, dtype=np.int32).reshape(n, 2) + 100 * n for n in (1, 3, 2)]
    answers = execute(backend, *(request(A=a, B=a + 1) for a in arrays))
    for a, answer in zip(arrays, answers, strict=True):
        assert answer is not None
        np.testing.assert_array_equal(answer["SUM"], 2 * a + 1)
        np.testing.assert_array_equal(answer["DIFF"], np.full_like(a, -1))


def test_strings_are_split_by_rows(instance: Make) -> None:
    backend = instance(onnx_models.identity("BYTES", ("N", 2)))
    arrays = [np.array([[b"a", b"bb"]], object), np.array([[b"", "ü".encode()], [b"c\0", b"d"]], object)]
    answers = execute(backend, *(request(X=a) for a in arrays))
    for a, answer in zip(arrays, answers, strict=True):
        assert answer is not None
        np.testing.assert_array_equal(answer["Y"], a)


def test_only_wanted_outputs_are_computed(instance: Make) -> None:
    backend = instance(onnx_models.add_sub(("N", 2)))
    a = np.ones((1, 2), np.int32)
    (answer,) = execute(backend, request(["DIFF"], A=a, B=a))
    assert answer is not None and list(answer) == ["DIFF"]
    answers = execute(backend, request(["DIFF"], A=a, B=a), request(None, A=a, B=a))
    assert answers[1] is not None and list(answers[1]) == ["SUM", "DIFF"]


def test_requests_of_other_shapes_run_by_themselves(instance: Make) -> None:
    backend = instance(onnx_models.identity("FP32", ("N", None)))
    arrays = [np.ones((1, 2), np.float32), np.ones((2, 3), np.float32), np.zeros((1, 2), np.float32)]
    for a, answer in zip(arrays, execute(backend, *(request(X=a) for a in arrays)), strict=True):
        assert answer is not None
        np.testing.assert_array_equal(answer["Y"], a)


def test_a_group_that_fails_leaves_the_others_alone(instance: Make) -> None:
    backend = instance(onnx_models.identity("BYTES", ("N", None)))
    good, bad = np.array([[b"a"]], object), np.array([[b"\xff", b"b"]], object)
    answers = execute(backend, request(X=good), request(X=bad))
    assert answers[0] is not None and answers[1] is None


def test_models_without_batching_run_one_by_one(instance: Make) -> None:
    backend = instance(onnx_models.identity("FP32", (4,)), "")
    arrays = [np.full(4, i, np.float32) for i in range(3)]
    for a, answer in zip(arrays, execute(backend, *(request(X=a) for a in arrays)), strict=True):
        assert answer is not None
        np.testing.assert_array_equal(answer["Y"], a)


def test_a_lost_batch_dimension_is_the_models_failure(instance: Make) -> None:
    content = onnx_models.model(
        [helper.make_node("Slice", ["X", "zero", "one"], ["Y"])],
        [onnx_models.tensor("X", "FP32", ["N", 2])],
        [onnx_models.tensor("Y", "FP32", ["M", 2])],
        [
            helper.make_tensor(name, onnx_models.TYPES["INT64"], [1], [i])
            for i, name in enumerate(("zero", "one"))
        ],
    )
    backend = instance(content)
    x = np.ones((1, 2), np.float32)
    with pytest.raises(
        Internal, match=r"output 'Y' of model 'm' has the shape \[1, 2\], expected the batch dimension 2"
    ):
        execute(backend, request(X=x), request(X=x))


def test_one_request_is_not_copied(tmp_path: Path, instance: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = instance(onnx_models.identity("FP32", ("N", 4)))
    r = request(X=np.ones((2, 4), np.float32))
    if backend.native:
        batch = run(backend, r)
        assert batch.runs() == [([0], [("X", r.inputs[0].address, False)], ["Y"])]
        return
    seen: list[Any] = []
    original = onnx_python._run

    def look(session: Any, names: list[str], feeds: dict[str, Any], options: Any) -> Any:
        results = original(session, names, feeds, options)
        seen.append((feeds["X"].data_ptr(), results[0].data_ptr()))
        return results

    monkeypatch.setattr(onnx_python, "_run", look)
    batch = run(backend, r)
    assert seen == [(r.inputs[0].address, batch.responses[0].outputs[0].address)]


def test_bf16_bits_are_kept(instance: Make) -> None:
    backend = instance(onnx_models.identity("BF16", ("N", 4)))
    array = np.array([[0.5, -1, 3e38, 1e-38]], datatypes.NUMPY[datatypes.BF16])
    answers = execute(backend, request(X=array), request(X=-array))
    assert answers[1] is not None
    np.testing.assert_array_equal(answers[1]["Y"].view(np.uint16), (-array).view(np.uint16))


def through() -> bytes:
    """X itself is an output, beside Y = -X."""
    return onnx_models.model(
        [helper.make_node("Neg", ["X"], ["Y"])],
        [onnx_models.tensor("X", "FP32", ["N", 4])],
        [onnx_models.tensor("X", "FP32", ["N", 4]), onnx_models.tensor("Y", "FP32", ["N", 4])],
    )


def test_an_input_handed_through_keeps_its_values(instance: Make) -> None:
    """Its memory is the request's, or the one that the next batch is gathered in."""
    backend = instance(through())
    first = np.arange(4, dtype=np.float32).reshape(1, 4)
    array = first.copy()
    single = run(backend, request(X=array))
    pair = run(backend, request(X=array + 1), request(X=array + 2))
    array[:] = 99
    run(backend, request(X=array), request(X=array), request(X=array))
    for k, response in enumerate((*single.responses, *pair.responses)):
        x, y = response.outputs
        np.testing.assert_array_equal(to_numpy(x), first + k)
        np.testing.assert_array_equal(to_numpy(y), -first - k)


def test_inputs_may_begin_at_any_byte(instance: Make) -> None:
    backend = instance(onnx_models.add_sub(("N", 4)))
    a = np.arange(4, dtype=np.int32).reshape(1, 4)
    for at in range(1, 9):
        r = request(A=a, B=a)
        for i, tensor in enumerate(r.inputs):
            body = memoryview(bytes(at) + tensor.tobytes())[at:]
            r.inputs[i] = Tensor(tensor.name, tensor.dtype, tensor.shape, body)
        (answer,) = execute(backend, r)
        assert answer is not None
        np.testing.assert_array_equal(answer["SUM"], 2 * a)


def test_answers_outlive_the_session(instance: Make) -> None:
    backend = instance(onnx_models.identity("FP32", ("N", 4)))
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    batch = run(backend, request(X=x), request(X=-x))
    backend.finalize()
    outputs = [to_numpy(r.outputs[0]) for r in batch.responses]
    del batch
    np.testing.assert_array_equal(outputs[0], x)
    np.testing.assert_array_equal(outputs[1], -x)


def fails() -> bytes:
    """Y = X as COUNT rows: fails for a COUNT that does not divide X."""
    return onnx_models.model(
        [helper.make_node("Reshape", ["X", "COUNT"], ["Y"])],
        [onnx_models.tensor("X", "FP32", [None]), onnx_models.tensor("COUNT", "INT64", [2])],
        [onnx_models.tensor("Y", "FP32", [None, None])],
    )


def test_a_failing_run(instance: Make) -> None:
    """Says what ONNX Runtime says and which model it was; the next run is fine."""
    backend = instance(fails(), "")
    x, good, bad = np.zeros(6, np.float32), np.array([2, 3]), np.array([4, 3])
    for _ in range(2):
        with pytest.raises(Internal) as caught:
            execute(backend, request(X=x, COUNT=bad))
        text = str(caught.value)
        assert text.startswith("onnx runtime error: Non-zero status code returned while running Reshape node")
        assert "Input shape:{6}, requested shape:{4,3}" in text and text.endswith("(model 'm')")
        (answer,) = execute(backend, request(X=x, COUNT=good))
        assert answer is not None and answer["Y"].shape == (2, 3)
    answers = execute(backend, request(X=x, COUNT=good), request(X=x, COUNT=bad), request(X=x, COUNT=good))
    assert [answer is None for answer in answers] == [False, True, False]


def test_an_input_that_is_not_given(instance: Make) -> None:
    backend = instance(onnx_models.add_sub(("N", 2)))
    with pytest.raises(Internal, match=r"onnx runtime error: .*Missing Input: B.* \(model 'm'\)"):
        execute(backend, request(A=np.ones((1, 2), np.int32)))


def test_inputs_in_any_order_and_unknown_ones(instance: Make) -> None:
    backend = instance(onnx_models.add_sub(("N", 2)))
    one = np.ones((1, 2), np.int32)
    answers = execute(backend, request(B=one, A=2 * one), request(A=3 * one, B=one))
    assert answers[0] is not None and answers[1] is not None
    np.testing.assert_array_equal(answers[0]["DIFF"], one)
    np.testing.assert_array_equal(answers[1]["DIFF"], 2 * one)


def test_scalars_and_empty_tensors(instance: Make) -> None:
    backend = instance(onnx_models.identity("FP32", ()), "")
    made = request(X=np.zeros(1, np.float32))
    made.inputs[0] = alias(made.inputs[0], "X", ())
    (answer,) = execute(backend, made)
    assert answer is not None and answer["Y"].shape == ()
    backend = instance(onnx_models.identity("INT64", (None, None)), "")
    (answer,) = execute(backend, request(X=np.empty((0, 3), np.int64)))
    assert answer is not None and answer["Y"].shape == (0, 3)


def test_times_are_in_order(instance: Make) -> None:
    backend = instance(onnx_models.add_sub(("N", 2)))
    one = np.ones((1, 2), np.int32)
    batch = run(backend, request(A=one, B=one), request(A=one, B=one))
    if backend.native:
        assert 0 < batch.compute_start <= batch.input_end <= batch.output_start <= batch.compute_end
    else:
        assert 0 < batch.input_end <= batch.output_start


LISTED = (
    'input { name: "X" data_type: TYPE_FP32 dims: [4] } output { name: "Y" data_type: TYPE_FP32 dims: [4] }'
)


def test_types_that_the_protocol_cannot_carry(instance: Make) -> None:
    content = onnx_models.model(
        [helper.make_node("SequenceConstruct", ["X", "X"], ["Y"])],
        [onnx_models.tensor("X", "FP32", ["N", 4])],
        [helper.make_tensor_sequence_value_info("Y", onnx_models.TYPES["FP32"], None)],
    )
    with pytest.raises(
        InvalidArgument, match=r"output 'Y' is a seq\(tensor\(float\)\), which the protocol cannot carry"
    ):
        instance(content, f"max_batch_size: 8 {LISTED}")


def test_a_library_of_operators_that_is_not_there(instance: Make) -> None:
    library = 'model_operations { op_library_filename: "none.so" }'
    with pytest.raises(
        InvalidArgument, match=r"model_operations of model 'm': cannot load '.*none.so': .*none.so"
    ):
        instance(onnx_models.identity(), f"max_batch_size: 8 {LISTED} {library}")
