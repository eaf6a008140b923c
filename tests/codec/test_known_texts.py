"""Texts before binary tensors that came before, and the texts of responses with binary tensors: kept, and the same as if not."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest

from neptrio.codec.http_json import decode_request, encode_response
from neptrio.codec.json_request import known_texts
from neptrio.errors import TritonError
from neptrio.frontend.front_side import RemoteSharedMemory
from neptrio.request.infer_request import DataType, InferRequest, InferResponse, RequestedOutput, Tensor
from neptrio.request.numpy_tensor import to_numpy

_numbers = itertools.count()


def document(**more: Any) -> dict[str, Any]:
    """A text that no other test has: of one input of two INT32, and one of a string of three bytes."""
    number = next(_numbers)
    inputs = [
        {"name": f"a{number}", "datatype": "INT32", "shape": [1, 2], "parameters": {"binary_data_size": 8}},
        {"name": "é", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 7}},
    ]
    return {"inputs": inputs, **more}


def binary(first: int) -> bytes:
    return np.array([first, first + 1], np.int32).tobytes() + b"\3\0\0\0" + b"%03d" % first


def decode(text: bytes, tensors: bytes, apart: bool = False) -> tuple[InferRequest, bool]:
    request = InferRequest()
    request.model_name = "m"
    if apart:
        return request, decode_request(request, text, len(text), None, None, tensors)
    return request, decode_request(request, text + tensors, len(text))


def seen(request: InferRequest, default: bool) -> Any:
    """All that a decoder fills in."""
    outputs = request.outputs and [
        (o.name, o.binary, o.class_count, o.shm_region, o.shm_offset, o.shm_byte_size, o.keep_on_device)
        for o in request.outputs
    ]
    inputs = [(t.name, t.dtype, t.shape, t.nbytes, bytes(t)) for t in request.inputs]
    told = (
        request.sequence_id,
        request.sequence_start,
        request.sequence_end,
        request.priority,
        request.timeout_us,
    )
    return request.id, request.parameters, told, inputs, outputs, default


KEPT = {
    "plain": {},
    "id": {"id": "é7"},
    "output": {"outputs": [{"name": "out", "parameters": {"binary_data": True}}, {"name": "b"}]},
    "classes": {"outputs": [{"name": "out", "parameters": {"classification": 3}}]},
    "default": {"parameters": {"binary_data_output": True}},
}
READ_ANEW = {
    "sequence": {"parameters": {"sequence_id": 7, "sequence_start": True, "sequence_end": True}},
    "named sequence": {"parameters": {"sequence_id": "s"}},
    "priority": {"parameters": {"priority": 3}},
    "timeout": {"parameters": {"timeout": 9}},
    "custom": {"parameters": {"mine": 1}},
    "region": {"outputs": [{"name": "out", "parameters": {"shared_memory_region": "r"}}]},
    "long": {"id": "x" * 1000},
}


@pytest.mark.parametrize("apart", [False, True], ids=["together", "apart"])
@pytest.mark.parametrize("name", KEPT)
def test_a_text_that_comes_again_says_the_same(name: str, apart: bool) -> None:
    text = json.dumps(document(**KEPT[name])).encode()
    before = known_texts.found
    results = [seen(*decode(text, binary(5 + n), apart)) for n in range(4)]
    for n, result in enumerate(results):
        data = binary(5 + n)
        assert [row[-1] for row in result[3]] == [data[:8], data[8:]]
        assert result[:3] == results[0][:3]
        assert [row[:-1] for row in result[3]] == [row[:-1] for row in results[0][3]]
        assert result[4:] == results[0][4:]
    if not apart:  # strings of a buffer that others may write to are copied, which is not done by heart
        assert known_texts.found == before + 2


@pytest.mark.parametrize("name", READ_ANEW)
def test_what_may_change_is_read_anew(name: str) -> None:
    text = json.dumps(document(**READ_ANEW[name])).encode()
    before = known_texts.found
    request = InferRequest()
    memory: Any = RemoteSharedMemory()
    for _ in range(4):
        request = InferRequest()
        decode_request(request, text + binary(1), len(text), memory)
    assert known_texts.found == before
    assert json.loads(text)["inputs"][0]["name"] == request.inputs[0].name


def test_an_input_as_json_is_read_anew() -> None:
    made = document()
    made["inputs"][0] = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
    text = json.dumps(made).encode()
    before = known_texts.found
    for n in range(4):
        request, _ = decode(text, b"\3\0\0\0" + b"%03d" % n)
        assert to_numpy(request.inputs[1])[0] == b"%03d" % n
    assert known_texts.found == before


def test_the_same_text_with_other_bytes_behind_it() -> None:
    """A text that is known is wrong where its tensors do not fit, in the same words."""
    text = json.dumps(document()).encode()
    other = text + b" "  # says the same and is read anew
    for _ in range(3):
        decode(text, binary(1))
    for tensors in (binary(1) + b"x", binary(1)[:-1], b""):
        with pytest.raises(TritonError) as known:
            decode(text, tensors)
        with pytest.raises(TritonError) as fresh:
            decode(other, tensors)
        assert str(known.value) == str(fresh.value)


def test_ids_that_differ_displace_nothing() -> None:
    made = document()
    text = json.dumps(made).encode()
    for _ in range(2):
        decode(text, binary(1))
    for n in range(3000):
        decode(json.dumps({**made, "id": f"id {n}"}).encode(), binary(1))
    before = known_texts.found
    decode(text, binary(1))
    assert known_texts.found == before + 1


def test_texts_that_differ_in_one_byte() -> None:
    made = document()
    for name in ("b", "c"):
        made["inputs"][1]["name"] = name
        text = json.dumps(made).encode()
        for _ in range(3):
            request, _ = decode(text, binary(1))
            assert request.inputs[1].name == name


def test_a_request_changes_nothing_of_the_next() -> None:
    text = json.dumps(document(outputs=[{"name": "out", "parameters": {"classification": 3}}])).encode()
    for _ in range(4):
        request, _ = decode(text, binary(1))
        assert request.outputs is not None
        assert request.outputs[0].class_count == 3
        request.outputs[0].class_count = 0
        request.outputs.clear()
        request.inputs[0].shape = (2,)
        request.inputs.clear()


# ---------------------------------------------------------------------------- responses


def response(*outputs: Tensor, model: str = "m", version: str = "1", id: str = "") -> InferResponse:
    made = InferResponse(list(outputs))
    made.model_name, made.model_version, made.id = model, version, id
    return made


def tensor(
    name: str = "out", dtype: DataType = DataType.DT_INT32, shape: tuple[int, ...] = (2,), first: int = 1
) -> Tensor:
    return Tensor(name, int(dtype), shape, np.array([first, 2], np.int32).tobytes())


def wanted(name: str, binary: int, region: str | None = None) -> RequestedOutput:
    made = RequestedOutput(name)
    made.binary, made.shm_region = binary, region
    return made


def expected(made: InferResponse, sizes: bool = True) -> Any:
    outputs = []
    for each in made.outputs or []:
        row: dict[str, Any] = {"name": each.name, "datatype": DataType(each.dtype).name[3:]}
        outputs.append({**row, "shape": list(each.shape)})
        if sizes:
            outputs[-1]["parameters"] = {"binary_data_size": each.nbytes}
    told: dict[str, Any] = {"id": made.id} if made.id else {}
    return {**told, "model_name": made.model_name, "model_version": made.model_version, "outputs": outputs}


MODEL = "a model"
RESPONSES = [
    lambda: response(tensor(first=7), model=MODEL),
    lambda: response(tensor(first=8), model=MODEL),
    lambda: response(tensor(shape=(1, 2)), model=MODEL),
    lambda: response(tensor(dtype=DataType.DT_UINT32), model=MODEL),
    lambda: response(tensor(name="tuo"), model=MODEL),
    lambda: response(tensor(), model=MODEL, version="2"),
    lambda: response(tensor(), model=MODEL, id="x"),
    lambda: response(tensor(), tensor("b"), model=MODEL),
    lambda: response(tensor(), model="another"),
]


def test_every_response_has_its_own_text() -> None:
    """Responses of the same size share a place, and none gets another's text."""
    for made in (
        RESPONSES[i]() for i in (0, 0, 0, 1, *range(len(RESPONSES)), *reversed(range(len(RESPONSES))), 0)
    ):
        for _ in range(3):
            text, blobs, size = encode_response(InferRequest(), made, True)
            assert json.loads(text) == expected(made)
            assert [bytes(blob) for blob in blobs] == [bytes(each) for each in made.outputs or []]
            assert size == sum(each.nbytes for each in made.outputs or [])


def test_a_text_is_printed_once_for_all_that_are_alike() -> None:
    texts = [encode_response(InferRequest(), response(tensor("t", first=n)), True)[0] for n in range(4)]
    assert texts[0] == texts[3]
    assert texts[2] is texts[3]


def test_what_is_asked_for_decides_about_the_text() -> None:
    for _ in range(3):
        request = InferRequest()
        made = response(tensor("q"), model="asked")
        assert json.loads(encode_response(request, made, True)[0]) == expected(made)
        assert json.loads(encode_response(request, made, False)[0])["outputs"][0]["data"] == [1, 2]
        request.outputs = [wanted("q", 1)]
        assert json.loads(encode_response(request, made, False)[0]) == expected(made)
        request.outputs = [wanted("q", 0)]
        assert json.loads(encode_response(request, made, True)[0])["outputs"][0]["data"] == [1, 2]
        request.outputs = [wanted("q", 0, "region")]
        assert json.loads(encode_response(request, made, True)[0]) == expected(made, sizes=False)
        request.outputs = None
        made.parameters = {"mine": 1}
        assert json.loads(encode_response(request, made, True)[0])["parameters"] == {"mine": 1}
