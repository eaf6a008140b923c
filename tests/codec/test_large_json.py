"""Large JSON requests, as a worker's thread decodes them: the same tensors, the same refusals, and an end."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from neptrio.codec.json_reader import Stop
from neptrio.codec.json_request import decode_request
from neptrio.codec.json_response import encode_response
from neptrio.datatypes import NUMBER
from neptrio.errors import Cancelled, TritonError
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Tensor

MODEL = ModelCore("m", "1")
N = 40_000
DICE = random.Random(1)
DATA: dict[str, list[Any]] = {
    "FP32": [DICE.uniform(-1e9, 1e9) for _ in range(N)],
    "FP64": [DICE.random() * 10.0 ** DICE.randrange(-300, 300) for _ in range(N)],
    "INT8": [DICE.randrange(-128, 128) for _ in range(4 * N)],
    "INT32": [DICE.randrange(-(1 << 31), 1 << 31) for _ in range(N)],
    "UINT64": [DICE.randrange(1 << 64) for _ in range(N)],
    "BOOL": [DICE.random() < 0.5 for _ in range(N)],
    "BYTES": ['"\\\n\u20ac\U0001f600'[: DICE.randrange(6)] + str(DICE.random()) for _ in range(N)],
}


def document(datatype: str, data: Any, late_shape: bool, spaces: bool, count: int = 0) -> bytes:
    """`late_shape`: the elements come before what says how to read them."""
    known = {"name": "a", "shape": [count or len(data)], "datatype": datatype}
    tensor = {"data": data, **known} if late_shape else {**known, "data": data}
    separators = (" ,\n ", " : ") if spaces else (",", ":")
    return json.dumps({"inputs": [tensor], "id": "7"}, separators=separators).encode()


def decoded(body: bytes, stop: Stop | None) -> tuple[Any, ...]:
    request = InferRequest()
    request.model_name = "m"
    request.model = MODEL
    try:
        decode_request(request, body, None, None, stop)
    except TritonError as error:
        return (type(error), str(error))
    (tensor,) = request.inputs
    return (request.id, tensor.name, tensor.shape, tensor.dtype, tensor.tobytes())


@pytest.mark.parametrize("spaces", [False, True])
@pytest.mark.parametrize("late_shape", [False, True])
@pytest.mark.parametrize("datatype", DATA)
def test_a_thread_reads_what_the_loop_reads(datatype: str, late_shape: bool, spaces: bool) -> None:
    body = document(datatype, DATA[datatype], late_shape, spaces)
    assert len(body) > 100_000
    found = decoded(body, Stop())
    assert found == decoded(body, None)
    assert found[:3] == ("7", "a", (len(DATA[datatype]),))
    if datatype != "BYTES":
        kind = {"BOOL": np.bool_, "FP32": np.float32, "FP64": np.float64}.get(datatype, datatype.lower())
        assert np.array_equal(np.frombuffer(found[4], kind), np.array(DATA[datatype], kind))


def test_nested_arrays_and_numbers_of_many_digits() -> None:
    data = [[[x, x + 0.5], [x * 2, -x]] for x in (DICE.random() for _ in range(10_000))]
    body = document("FP64", data, False, False, count=40_000)
    assert np.array_equal(np.frombuffer(decoded(body, Stop())[4]), np.array(data).ravel())
    digits = "1234567890" * 4
    body = document("FP64", [0.5] * 30_000, False, False).replace(b"0.5", f"0.{digits}".encode())
    assert np.array_equal(np.frombuffer(decoded(body, Stop())[4]), np.full(30_000, float(f"0.{digits}")))


GOOD = document("INT32", DATA["INT32"], False, False)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(GOOD[:-2], id="cut"),
        pytest.param(GOOD[: len(GOOD) // 2], id="cut among the elements"),
        pytest.param(GOOD.replace(b"[", b"[" * 101, 1), id="deep"),
        pytest.param(GOOD.replace(b'"data":[', b'"data":' + b"[" * 120), id="deep data"),
        pytest.param(GOOD[:-20] + b",1.5" + GOOD[-20:], id="a fraction"),
        pytest.param(GOOD[:-20] + b",99999999999" + GOOD[-20:], id="out of range"),
        pytest.param(GOOD[:-20] + b",x" + GOOD[-20:], id="no number"),
        pytest.param(GOOD[:-20] + b",1" + GOOD[-20:], id="too many"),
        pytest.param(GOOD.replace(b"[40000]", b"[40001]"), id="too few"),
        pytest.param(GOOD + b"x", id="more follows"),
        pytest.param(GOOD.replace(b'"datatype":"INT32"', b'"datatype":"INT33"'), id="datatype"),
        pytest.param(document("BYTES", DATA["BYTES"], True, False)[:-30] + b"\\x", id="an escape"),
        pytest.param(document("BOOL", [True] * N, False, False)[:-20] + b"u", id="a word"),
        pytest.param(document("BYTES", ["a"] * N, False, False).replace(b'"a"]', b'"a",1]'), id="no string"),
        pytest.param(document("FP32", [1.5] * N, False, False).replace(b"1.5]", b'"1"]'), id="a string"),
        pytest.param(document("FP64", [1.5] * N, True, False).replace(b"1.5]", b"1e999]"), id="too big"),
        pytest.param(b"x" * 300_000, id="no JSON"),
    ],
)
def test_a_thread_refuses_as_the_loop_does(body: bytes) -> None:
    found = decoded(body, Stop())
    assert found == decoded(body, None)
    assert issubclass(found[0], TritonError) and len(found) == 2


@pytest.mark.parametrize("late_shape", [False, True])
@pytest.mark.parametrize("datatype", ["FP32", "INT32", "BYTES", "BOOL"])
def test_it_ends_when_it_is_asked_to(datatype: str, late_shape: bool) -> None:
    stop = Stop()
    stop.ask()
    assert decoded(document(datatype, DATA[datatype], late_shape, False), stop)[0] is Cancelled


def test_many_small_inputs_end_too() -> None:
    tensors = [{"name": str(i), "shape": [1], "datatype": "INT8", "data": [1]} for i in range(5000)]
    body = json.dumps({"inputs": tensors}).encode()
    request = InferRequest()
    request.model = MODEL
    assert decode_request(request, body, None, None, Stop()) is False and len(request.inputs) == 5000
    stop = Stop()
    stop.ask()
    assert decoded(body, stop)[0] is Cancelled


def printed(tensor: Tensor, stop: Stop | None, later: bool = False) -> Any:
    request, response = InferRequest(), InferResponse([tensor])
    response.model_name, response.model_version = "m", "1"
    try:
        return encode_response(request, response, False, later, stop)
    except TritonError as error:
        return (type(error), str(error))


ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "FP32": np.array(DATA["FP32"], np.float32),
    "INT64": np.arange(-N, N, dtype=np.int64) << 40,
    "BOOL": np.arange(N) % 3 == 0,
}


@pytest.mark.parametrize("datatype", ARRAYS)
def test_a_thread_prints_what_the_loop_prints(datatype: str) -> None:
    array = ARRAYS[datatype]
    tensor = Tensor("a", NUMBER[datatype], array.shape, array)
    found = printed(tensor, Stop())
    assert found == printed(tensor, None)
    assert printed(tensor, None, later=True) is None
    assert np.array_equal(np.array(json.loads(found[0])["outputs"][0]["data"], array.dtype), array)
    small = Tensor("a", NUMBER[datatype], (1,), array[:1])
    assert printed(small, None, later=True) == printed(small, None)


def test_strings_are_printed_or_refused_alike() -> None:
    texts = [text.encode() for text in DATA["BYTES"]]
    packed = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    tensor = Tensor("a", NUMBER["BYTES"], (N,), packed)
    found = printed(tensor, Stop())
    assert found == printed(tensor, None)
    assert json.loads(found[0])["outputs"][0]["data"] == DATA["BYTES"]
    cut = Tensor("a", NUMBER["BYTES"], (N,), packed[:-1])
    assert printed(cut, Stop()) == printed(cut, None)
    assert "incomplete string data for output 'a'" in printed(cut, Stop())[1]


def test_printing_ends_when_it_is_asked_to() -> None:
    stop = Stop()
    stop.ask()
    for datatype, array in ARRAYS.items():
        assert printed(Tensor("a", NUMBER[datatype], array.shape, array), stop)[0] is Cancelled
    packed = b"\1\0\0\0x" * N
    assert printed(Tensor("a", NUMBER["BYTES"], (N,), packed), stop)[0] is Cancelled
