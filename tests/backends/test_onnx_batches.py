"""How the onnxruntime backend forms and splits what is executed together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neptrio._cext.batch import Batch
from neptrio._cext.native import run_inline
from neptrio._cext.request import InferRequest, ModelCore, RequestedOutput

from neptrio import datatypes
from neptrio.backends import onnx_python
from neptrio.backends.base import LoadContext
from neptrio.backends.onnx import OnnxBackend, OnnxInstance
from neptrio.codec.numpy_tensor import from_numpy, to_numpy
from neptrio.errors import Internal, TritonError
from neptrio.model import config as model_config
from neptrio.settings import Settings
from tests.support import onnx_models

Make = Callable[..., OnnxInstance]


@pytest.fixture(params=["c", "python"])
def instance(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes instances with either interface of ONNX Runtime; both behave alike."""
    made: list[OnnxInstance] = []

    def make(content: bytes, config: str = "max_batch_size: 8") -> OnnxInstance:
        folder = tmp_path / str(len(made))
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").write_bytes(content)
        parsed = model_config.parse_text(config, "config.pbtxt")
        parsed.parameters["session_api"].string_value = request.param
        context = LoadContext("m", 1, folder, folder / "1", parsed, Settings(), None)
        OnnxBackend.auto_complete(context)
        instance = OnnxBackend(context).create_instance("m_0_0", "CPU", 0)
        assert isinstance(instance, OnnxInstance)
        instance.initialize()
        made.append(instance)
        return instance

    yield make
    for one in made:
        one.finalize()


def request(outputs: list[str] | None = None, **arrays: np.ndarray) -> InferRequest:
    made = InferRequest()
    made.inputs = [from_numpy(name, array) for name, array in arrays.items()]
    made.outputs = None if outputs is None else [RequestedOutput(name) for name in outputs]
    made.batch_size = next(iter(arrays.values())).shape[0]
    return made


def run(backend: OnnxInstance, *requests: InferRequest) -> Any:
    """The batch as it is before it is delivered."""
    batch: Any = backend.prepare(Batch(ModelCore("m", "1"), list(requests)))
    if backend.native:
        run_inline(batch)
        batch.conclude()
    else:
        try:
            backend.execute(batch)
        except TritonError as error:
            batch.error = error
    return batch


def execute(backend: OnnxInstance, *requests: InferRequest) -> list[dict[str, np.ndarray] | None]:
    batch = run(backend, *requests)
    if batch.error is not None:
        raise batch.error
    return [None if r.error else {t.name: to_numpy(t) for t in r.outputs} for r in batch.responses]


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
    from onnx import helper

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

    def look(session: Any, names: list[str], feeds: dict[str, Any]) -> Any:
        results = original(session, names, feeds)
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
