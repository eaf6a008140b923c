"""Messages whose fields before raw contents came before say the same as if they were read anew."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from neptrio.codec.proto_request import decode_request, known_heads
from neptrio.errors import TritonError
from neptrio.request.infer_request import InferRequest

_numbers = itertools.count()
UNKNOWN_FIELD = b"\x42\x00"  # whatever ends with it is read anew
RAW = 0x3A


def message(**more: Any) -> service_pb2.ModelInferRequest:
    """One that no other test has: an input of two INT32 and one of strings, both raw."""
    made = service_pb2.ModelInferRequest(model_name=f"model {next(_numbers)}", **more)
    made.inputs.add(name="a", datatype="INT32", shape=[1, 2])
    made.inputs.add(name="é", datatype="BYTES", shape=[1])
    return made


def with_contents(head: bytes, *contents: bytes) -> bytes:
    return head + service_pb2.ModelInferRequest(raw_input_contents=contents).SerializeToString()


def seen(request: InferRequest) -> Any:
    """All that the decoder fills in."""
    outputs = request.outputs and [
        (o.name, o.binary, o.class_count, o.shm_region, o.shm_offset, o.shm_byte_size, o.keep_on_device)
        for o in request.outputs
    ]
    inputs = [(t.name, t.dtype, t.shape, t.nbytes, bytes(t)) for t in request.inputs]
    told = (request.sequence_id, request.sequence_start, request.sequence_end, request.priority)
    more = (request.timeout_us, request.want_empty_final, request.parameters)
    return request.model_name, request.model_version, request.id, told, more, inputs, outputs


def outcome(data: bytes) -> Any:
    """What the decoder made of it, or the error."""
    request = InferRequest()
    try:
        decode_request(request, data)
    except TritonError as error:
        return type(error), str(error), request.id, request.model_name
    return seen(request)


def parameter(**value: Any) -> Any:
    return service_pb2.InferParameter(**value)


def output(name: str, **parameters: Any) -> Any:
    made = service_pb2.ModelInferRequest.InferRequestedOutputTensor(name=name)
    for key, value in parameters.items():
        made.parameters[key].CopyFrom(value)
    return made


KEPT = {
    "plain": {},
    "id": {"id": "é7"},
    "version": {"model_version": "3"},
    "output": {"outputs": [output("out"), output("b")]},
    "classes": {"outputs": [output("out", classification=parameter(int64_param=3))]},
}
READ_ANEW = {
    "sequence": {"parameters": {"sequence_id": parameter(int64_param=7)}},
    "named sequence": {"parameters": {"sequence_id": parameter(string_param="s")}},
    "start": {"parameters": {"sequence_start": parameter(bool_param=True)}},
    "end": {"parameters": {"sequence_end": parameter(bool_param=True)}},
    "priority": {"parameters": {"priority": parameter(uint64_param=3)}},
    "timeout": {"parameters": {"timeout": parameter(int64_param=9)}},
    "empty final": {"parameters": {"triton_enable_empty_final_response": parameter(bool_param=True)}},
    "custom": {"parameters": {"mine": parameter(int64_param=1)}},
    "long": {"id": "x" * 1024},
}


@pytest.mark.parametrize("name", KEPT)
def test_a_head_that_comes_again_says_the_same(name: str) -> None:
    head = message(**KEPT[name]).SerializeToString()
    before = known_heads.found
    for n in range(4):
        contents = (bytes([n] * 8), bytes([n + 1, 0, 0, 0]) + b"x" * (n + 1))
        data = with_contents(head, *contents)
        found = outcome(data)
        assert found == outcome(data + UNKNOWN_FIELD)
        assert [row[-1] for row in found[5]] == list(contents), "of whatever size"
    assert known_heads.found == before + 2


@pytest.mark.parametrize("name", READ_ANEW)
def test_what_may_change_is_read_anew(name: str) -> None:
    data = with_contents(message(**READ_ANEW[name]).SerializeToString(), b"12345678", b"\0\0\0\0")
    before = known_heads.found
    for _ in range(4):
        assert outcome(data) == outcome(data + UNKNOWN_FIELD)
    assert known_heads.found == before


def test_typed_contents_are_read_anew() -> None:
    made = service_pb2.ModelInferRequest(model_name=f"model {next(_numbers)}")
    made.inputs.add(name="a", datatype="INT32", shape=[2]).contents.int_contents.extend([1, 2])
    before = known_heads.found
    for _ in range(4):
        assert outcome(made.SerializeToString())[5][0][-1] == bytes([1, 0, 0, 0, 2, 0, 0, 0])
    assert known_heads.found == before


@pytest.mark.parametrize("count", [0, 1, 3, 9])
def test_a_head_that_is_known_with_another_number_of_contents(count: int) -> None:
    head = message().SerializeToString()
    for _ in range(3):
        outcome(with_contents(head, b"12345678", b"\0\0\0\0"))
    data = with_contents(head, *[b"1234"] * count)
    for _ in range(3):
        assert outcome(data) == outcome(data + UNKNOWN_FIELD)


def test_a_known_head_behind_which_nothing_is_whole() -> None:
    head = message().SerializeToString()
    for _ in range(3):
        outcome(with_contents(head, b"12345678", b"\0\0\0\0"))
    data = with_contents(head, b"12345678", b"\0\0\0\0")
    for n in range(len(head), len(data)):
        fresh = message().SerializeToString()
        expected = outcome(fresh + data[len(head) : n])
        assert [str(part).replace(expected[-1], "M") for part in expected] == [
            str(part).replace(head[2 : 2 + head[1]].decode(), "M") for part in outcome(data[:n])
        ]


def test_requests_share_nothing_that_they_may_change() -> None:
    data = with_contents(message(**KEPT["output"]).SerializeToString(), b"12345678", b"\0\0\0\0")
    requests = []
    for _ in range(4):
        requests.append(InferRequest())
        decode_request(requests[-1], data)
    changed = requests[2]
    changed.inputs[0].name = "changed"
    changed.inputs[0].shape = (7,)
    assert changed.outputs is not None
    changed.outputs[0].name = "changed"
    changed.inputs.pop()
    changed.outputs.pop()
    assert outcome(data) == seen(requests[0]) == seen(requests[3])


WIRE = [
    b"\x0a\x01m",
    b"\x12\x011",
    b"\x1a\x01i",
    b"\x1a\x01j",
    b"\x1a\x81\x00i",  # a length of more bytes than it needs
    b"\x2a\x0b\x0a\x01a\x12\x04INT8\x18\x02",
    b"\x2a\x0b\x0a\x01b\x12\x04INT8\x18\x03",
    b"\x32\x03\x0a\x01o",
    b"\x22\x04\x0a\x00\x12\x00",
    b"\x3a\x02ab",
    b"\x3a\x00",
    b"\xba\x00\x02ab",  # field 7 again, with a tag of more bytes than it needs
    b"\x3a\xff\xff\xff\xff\x0f",
    b"\x3a",
    b"\x38\x01",
    b"\x42\x00",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(WIRE), max_size=12))
def test_whatever_comes_is_read_as_if_for_the_first_time(parts: list[bytes]) -> None:
    first = outcome(b"".join(parts))
    for _ in range(3):
        assert outcome(b"".join(parts)) == first
    if first[0] == "m" and RAW in b"".join(parts):
        assert outcome(b"".join(parts) + UNKNOWN_FIELD) == first
