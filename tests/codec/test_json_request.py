"""The infer codec against a slow reference, and its printed numbers against Python's own."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neptrio import datatypes
from neptrio.codec.json_request import decode_request
from neptrio.codec.json_response import encode_response
from neptrio.codec.json_tensor import tensor_json, tensor_of
from neptrio.errors import TritonError
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Tensor
from tests.codec import json_reference

MODEL = ModelCore("m", "1")
FAST = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))


def decoded(body: bytes) -> Any:
    request = InferRequest()
    request.model_name = "m"
    request.model = MODEL
    decode_request(request, body)
    outputs = request.outputs
    return {
        "id": request.id,
        "inputs": [(t.name, datatypes.NAME[t.dtype], t.shape, t.tobytes()) for t in request.inputs],
        "outputs": None if outputs is None else [(o.name, o.binary, o.class_count) for o in outputs],
    }


numbers: st.SearchStrategy[Any] = st.one_of(
    st.integers(-10, 300),
    st.integers(-(1 << 66), 1 << 66),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
)
elements: dict[str, st.SearchStrategy[Any]] = {
    "BYTES": st.text(max_size=8),
    "BOOL": st.booleans(),
    "FP32": st.one_of(st.floats(), st.integers(-1000, 1000)),
    "FP64": st.one_of(st.floats(), st.integers(-(1 << 70), 1 << 70)),
    **{
        name: st.integers(
            int(np.iinfo(datatypes.NUMPY[datatypes.NUMBER[name]]).min),
            int(np.iinfo(datatypes.NUMPY[datatypes.NUMBER[name]]).max),
        )
        for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")
    },
}


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    datatype = draw(st.sampled_from(sorted(elements)))
    flat = draw(st.lists(elements[datatype], max_size=40))
    shape = draw(st.sampled_from([[len(flat)], [1, len(flat)], [len(flat), 1]]))
    data: list[Any] = [flat[i : i + 3] for i in range(0, len(flat), 3)] if draw(st.booleans()) else flat
    made = {"name": draw(st.text(max_size=4)), "shape": shape, "datatype": datatype, "data": data}
    if draw(st.integers(0, 5)) == 0:
        key = draw(st.sampled_from(["name", "shape", "datatype", "data", "parameters"]))
        made[key] = draw(
            st.one_of(numbers, st.lists(numbers, max_size=3), st.dictionaries(st.text(), numbers))
        )
    keys = draw(st.permutations(list(made)))
    return {key: made[key] for key in keys}


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    document: dict[str, Any] = {"inputs": draw(st.lists(inputs(), max_size=3))}
    if draw(st.booleans()):
        document["id"] = draw(st.one_of(st.text(), numbers)) if draw(st.booleans()) else "id"
    if draw(st.booleans()):
        names = st.fixed_dictionaries(
            {"name": st.text(max_size=3)},
            optional={
                "parameters": st.dictionaries(
                    st.sampled_from(["binary_data", "classification", "x"]),
                    st.one_of(st.booleans(), st.integers(-2, 9)),
                )
            },
        )
        document["outputs"] = draw(st.lists(names, max_size=3))
    keys = draw(st.permutations(list(document)))
    return {key: document[key] for key in keys}


def compare(body: bytes) -> None:
    try:
        expected = json_reference.decode(body)
    except json_reference.Refused:
        expected = None
    if expected is None:
        with pytest.raises(TritonError):
            decoded(body)
    else:
        assert decoded(body) == expected


@pytest.mark.slow
@FAST
@given(documents(), st.booleans(), st.sampled_from([None, 1]))
def test_documents(document: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(document, ensure_ascii=ascii_only, indent=indent)
    try:
        body = text.encode()
    except UnicodeEncodeError:
        return  # a lone surrogate has no UTF-8 form
    if "\\ud" in text:
        return  # as an escape it is refused, which Python's parser does not do
    compare(body)


@pytest.mark.slow
@FAST
@given(documents(), st.data())
def test_damaged_documents_are_refused_or_read_alike(document: Any, data: st.DataObject) -> None:
    body = bytearray(json.dumps(document).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        kind = data.draw(st.integers(0, 2))
        if kind == 0:
            del body[at]
        elif kind == 1:
            body[at] = data.draw(st.sampled_from(b'{}[]",:\\0123456789.eE+-tfnNI \xff'))
        else:
            body.insert(at, data.draw(st.sampled_from(b'{}[]",:\\0123456789.eE+-')))
        if not body:
            return
    try:
        decoded(bytes(body))
    except TritonError as error:
        assert str(error)


@FAST
@given(st.binary(max_size=200), st.integers(0, 200))
def test_arbitrary_bytes_with_any_header_length(body: bytes, header_length: int) -> None:
    request = InferRequest()
    request.model_name, request.model = "m", MODEL
    try:
        decode_request(request, body, min(header_length, len(body)))
    except TritonError as error:
        assert str(error)


def printed(datatype: str, values: list[Any]) -> bytes:
    number = datatypes.NUMBER[datatype]
    array = np.array(values, datatypes.NUMPY[number])
    text: bytes = tensor_json(Tensor("t", number, (len(values),), array.tobytes()))
    return text


def digits(text: str) -> str:
    return text.lower().lstrip("-").split("e")[0].replace(".", "").strip("0")


@settings(max_examples=100, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_doubles_are_printed_shortest(value: float) -> None:
    text = printed("FP64", [value])[1:-1].decode()
    assert float(text) == value and math.copysign(1, float(text)) == math.copysign(1, value)
    assert digits(text) == digits(repr(value))


@pytest.mark.slow
def test_many_random_doubles() -> None:
    rng = np.random.default_rng(5)
    bits = rng.integers(0, 1 << 64, 50_000, np.uint64)
    narrow = bits.view(np.float32)
    wide = bits.view(np.float64)
    array = np.concatenate(
        [wide[np.isfinite(wide)], narrow[np.isfinite(narrow)].astype(np.float64), rng.random(50_000)]
    )
    text = printed("FP64", array.tolist()).decode()
    parts = text[1:-1].split(",")
    assert np.array_equal(np.array([float(p) for p in parts]), array)
    for part, value in zip(parts, array.tolist(), strict=True):
        assert digits(part) == digits(repr(value))


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("signed", [True, False])
def test_integers_of_every_length_go_both_ways(bits: int, signed: bool) -> None:
    datatype = f"{'' if signed else 'U'}INT{bits}"
    limits = np.iinfo(datatypes.NUMPY[datatypes.NUMBER[datatype]])
    rng = np.random.default_rng(bits)
    values = [10**k + d for k in range(20) for d in (-1, 0, 1)] + [int(limits.max), int(limits.min)]
    values += [int(v) for k in range(1, 64) for v in rng.integers(0, 1 << k, 100)]
    values = [v for v in values + [-v for v in values] if limits.min <= v <= limits.max]
    text = json.dumps(values, separators=(",", ":")).encode()
    assert printed(datatype, values) == text
    number = datatypes.NUMBER[datatype]
    assert tensor_json(tensor_of("t", number, (len(values),), text)) == text


@settings(max_examples=150, deadline=None)
def shift(text: str) -> int:
    """A number's exponent less the digits of its fraction; rapidjson refuses zeros for it."""
    mantissa, _, exponent = text.lower().partition("e")
    return int(exponent or 0) - len(mantissa.partition(".")[2])


@given(
    st.one_of(
        st.floats(allow_nan=False, allow_infinity=False).map(repr),
        st.from_regex(r"-?(0|[1-9][0-9]{0,25})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", fullmatch=True),
        st.integers(0, 1 << 53).map(lambda m: f"{(2 * m + 1) * 2.0**-53:.60f}"),
    )
)
@pytest.mark.parametrize("tail", ["", ",0" * 40])
def test_doubles_are_read_to_the_nearest(tail: str, text: str) -> None:
    count = 1 + tail.count(",")
    body = b'{"inputs":[{"name":"a","shape":[%d],"datatype":"FP64","data":[%s%s]}]}' % (
        count,
        text.encode(),
        tail.encode(),
    )
    if math.isinf(float(text)) or (float(text) == 0 and shift(text) > 308):
        with pytest.raises(TritonError, match="Number too big to be stored in double"):
            decoded(body)
    else:
        (_, _, _, raw) = decoded(body)["inputs"][0]
        assert struct.unpack("<d", raw[:8])[0] == float(text)


@pytest.mark.parametrize("datatype", [n for n in elements if n not in ("BYTES",)])
def test_large_tensors_round_trip(datatype: str) -> None:
    number = datatypes.NUMBER[datatype]
    dtype = datatypes.NUMPY[number]
    rng = np.random.default_rng(2)
    raw = rng.integers(0, 256, 5000 * dtype.itemsize, np.uint8)
    array = rng.integers(0, 2, 5000).astype(bool) if datatype == "BOOL" else raw.view(dtype)
    text = tensor_json(Tensor("t", number, (5000,), array.tobytes()))
    body = b'{"inputs":[{"name":"a","shape":[5000],"datatype":"%s","data":%s}]}' % (datatype.encode(), text)
    back = np.frombuffer(decoded(body)["inputs"][0][3], dtype)
    np.testing.assert_array_equal(back, array)


def test_a_shape_takes_no_memory_by_itself() -> None:
    body = b'{"inputs":[{"name":"a","shape":[1099511627776],"datatype":"FP64","data":[1]}]}'
    with pytest.raises(TritonError, match="Shape does not match true shape"):
        decoded(body)


def test_nothing_is_copied_of_binary_tensors() -> None:
    payload = np.arange(1000, dtype=np.int64).tobytes()
    head = (
        b'{"inputs":[{"name":"a","shape":[1000],"datatype":"INT64","parameters":{"binary_data_size":8000}}]}'
    )
    body = np.frombuffer(head + payload, np.uint8)
    request = InferRequest()
    request.model_name, request.model = "m", MODEL
    decode_request(request, body, len(head))
    assert request.inputs[0].address == body.ctypes.data + len(head)
    response = InferResponse([request.inputs[0].renamed("b")])
    response.model_name, response.model_version, response.id = "m", "1", ""
    _, blobs, size = encode_response(request, response, True)
    assert size == 8000 and blobs[0].address == request.inputs[0].address
