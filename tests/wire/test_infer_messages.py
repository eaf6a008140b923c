"""The codec of ModelInferRequest and ModelInferResponse against protobuf's own encoder and decoder, and against golden bytes."""

from __future__ import annotations

import mmap
import struct
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from neptrio.codec.proto_request import decode_request
from neptrio.codec.proto_response import encode_response
from neptrio.codec.protobuf import well_formed
from neptrio.datatypes import NAME, NUMBER
from neptrio.errors import Code, InvalidArgument, TritonError, Unsupported
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor


def golden_response() -> bytes:
    return bytes.fromhex(
        "0a06" + b"simple".hex()  # model_name = 1
        + "1201" + b"1".hex()  # model_version = 2
        + "1a03" + b"abc".hex()  # id = 3
        + "2a14" + "0a07" + b"OUTPUT0".hex() + "1205" + b"INT32".hex() + "1a0201" + "02"  # outputs = 5
        + "3208" + "01000000feffffff"  # raw_output_contents = 6
    )  # fmt: skip


def decode(data: bytes) -> InferRequest:
    request = InferRequest()
    decode_request(request, data)
    return request


def join(segments: list[Any]) -> bytes:
    whole = b"".join(bytes(memoryview(s)) for s in segments)
    flag, size = struct.unpack_from(">BI", whole)
    assert flag == 0 and size == len(whole) - 5
    return whole[5:]


def test_golden_response() -> None:
    tensor = Tensor("OUTPUT0", NUMBER["INT32"], (1, 2), struct.pack("<ii", 1, -2))
    response = InferResponse([tensor])
    response.model_name, response.model_version, response.id = "simple", "1", "abc"
    assert join(encode_response(response)) == golden_response()
    parsed = service_pb2.ModelInferResponse.FromString(golden_response())
    assert parsed.SerializeToString(deterministic=True) == golden_response()


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response_that_is_longer_than_a_message_may_be(streamed: bool) -> None:
    zeros = mmap.mmap(-1, 1 << 30)  # pages that nobody touches take no memory
    gigabytes = [Tensor(f"OUT{i}", NUMBER["UINT8"], (1 << 30,), zeros) for i in range(4)]
    response = InferResponse(gigabytes)
    response.model_name = "m"
    allowed = r"has 42949\d{5} bytes, a gRPC message may have 4294967295"
    with pytest.raises(TritonError, match=f"the response of model 'm' {allowed}") as info:
        encode_response(response, streamed)
    assert info.value.code is Code.RESOURCE_EXHAUSTED
    response.outputs = gigabytes[:3]
    (length,) = struct.unpack_from(">I", bytes(encode_response(response, streamed)[0]), 1)
    assert length > 3 << 30


def test_golden_request() -> None:
    golden = bytes.fromhex(
        "0a06" + b"simple".hex() + "120131" + "1a03" + b"abc".hex()
        + "2215" + "0a0b" + b"sequence_id".hex() + "1206" + "10ffffffff0f"
        + "2a13" + "0a06" + b"INPUT0".hex() + "1205" + b"INT32".hex() + "1a020102"
        + "3209" + "0a07" + b"OUTPUT0".hex()
        + "3a08" + "01000000feffffff"
    )  # fmt: skip
    request = decode(golden)
    assert (request.model_name, request.model_version, request.id) == ("simple", "1", "abc")
    assert request.sequence_id == 2**32 - 1
    (tensor,) = request.inputs
    assert (tensor.name, tensor.dtype, tensor.shape) == ("INPUT0", NUMBER["INT32"], (1, 2))
    assert np.frombuffer(tensor, np.int32).tolist() == [1, -2]
    assert [o.name for o in request.outputs] == ["OUTPUT0"]
    parsed = service_pb2.ModelInferRequest.FromString(golden)
    assert parsed.SerializeToString(deterministic=True) == golden


# ---------------------------------------------------------------- any message protobuf can make

WIRE_TEXT = st.text(max_size=12)
CUSTOM_KEYS = st.text(max_size=8).filter(
    lambda k: (
        not k.startswith("triton_")
        and k
        not in ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "binary_data_output")
    )
)
INT64 = st.integers(-(2**63), 2**63 - 1)
FLOAT = st.floats(allow_nan=False)
CUSTOM_VALUES = st.one_of(
    st.tuples(st.just("bool_param"), st.booleans()),
    st.tuples(st.just("int64_param"), INT64),
    st.tuples(st.just("string_param"), WIRE_TEXT),
    st.tuples(st.just("double_param"), FLOAT),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    name=WIRE_TEXT,
    version=WIRE_TEXT,
    request_id=WIRE_TEXT,
    parameters=st.dictionaries(CUSTOM_KEYS, CUSTOM_VALUES, max_size=4),
    inputs=st.lists(
        st.tuples(
            WIRE_TEXT, st.sampled_from(sorted(NUMBER)), st.lists(INT64, max_size=4), st.binary(max_size=40)
        ),
        max_size=10,
    ),
    outputs=st.lists(WIRE_TEXT, max_size=3),
)
def test_decoding_agrees_with_protobuf(
    name: str, version: str, request_id: str, parameters: Any, inputs: Any, outputs: Any
) -> None:
    made = service_pb2.ModelInferRequest(model_name=name, model_version=version, id=request_id)
    for key, (kind, value) in parameters.items():
        setattr(made.parameters[key], kind, value)
    for tensor, datatype, shape, raw in inputs:
        made.inputs.add(name=tensor, datatype=datatype, shape=shape)
        made.raw_input_contents.append(raw)
    for output in outputs:
        made.outputs.add(name=output)
    request = decode(made.SerializeToString())
    assert (request.model_name, request.model_version, request.id) == (name, version, request_id)
    assert (request.parameters or {}) == {k: v for k, (_, v) in parameters.items()}
    assert [(t.name, NAME[t.dtype], list(t.shape), bytes(memoryview(t))) for t in request.inputs] == [
        (n, d, list(s), r) for n, d, s, r in inputs
    ]
    assert [o.name for o in request.outputs or []] == outputs


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    name=WIRE_TEXT,
    request_id=WIRE_TEXT,
    parameters=st.dictionaries(WIRE_TEXT, st.one_of(st.booleans(), INT64, WIRE_TEXT, FLOAT), max_size=4),
    outputs=st.lists(
        st.tuples(
            WIRE_TEXT,
            st.sampled_from(sorted(NUMBER)),
            st.lists(st.integers(0, 2**40), max_size=4),
            st.one_of(st.binary(max_size=40), st.integers(32760, 32780).map(bytes)),
        ),
        max_size=5,
    ),
    error=st.one_of(st.none(), WIRE_TEXT),
    final=st.booleans(),
)
def test_encoding_agrees_with_protobuf(
    name: str, request_id: str, parameters: Any, outputs: Any, error: Any, final: bool
) -> None:
    def made() -> InferResponse:
        tensors = [Tensor(n, NUMBER[d], tuple(s), raw) for n, d, s, raw in outputs]
        response = InferResponse(tensors, None, dict(parameters))
        response.model_name, response.model_version, response.id = name, "3", request_id
        return response

    parsed = service_pb2.ModelInferResponse.FromString(join(encode_response(made())))
    assert (parsed.model_name, parsed.model_version, parsed.id) == (name, "3", request_id)
    assert {
        k: getattr(v, v.WhichOneof("parameter_choice")) for k, v in parsed.parameters.items()
    } == parameters
    assert [(o.name, o.datatype, list(o.shape)) for o in parsed.outputs] == [
        (n, d, s) for n, d, s, _ in outputs
    ]
    assert list(parsed.raw_output_contents) == [raw for *_, raw in outputs]
    response = made()
    if error is not None:
        response.error, response.outputs = TritonError(error), None
    streamed = service_pb2.ModelStreamInferResponse.FromString(join(encode_response(response, True, final)))
    assert streamed.error_message == (error or "")
    assert streamed.infer_response.id == request_id
    if name:
        assert streamed.infer_response.parameters["triton_final_response"].bool_param is final
    if error is None:
        assert list(streamed.infer_response.raw_output_contents) == [raw for *_, raw in outputs]


# ---------------------------------------------------------------- typed contents

TYPED = [
    ("BOOL", "bool_contents", [True, False], np.bool_),
    ("INT8", "int_contents", [-128, 127], np.int8),
    ("INT16", "int_contents", [-32768, 32767], np.int16),
    ("INT32", "int_contents", [-(2**31), 2**31 - 1], np.int32),
    ("INT64", "int64_contents", [-(2**63), 2**63 - 1], np.int64),
    ("UINT8", "uint_contents", [0, 255], np.uint8),
    ("UINT16", "uint_contents", [0, 65535], np.uint16),
    ("UINT32", "uint_contents", [0, 2**32 - 1], np.uint32),
    ("UINT64", "uint64_contents", [0, 2**64 - 1], np.uint64),
    ("FP32", "fp32_contents", [1.5, -0.0], np.float32),
    ("FP64", "fp64_contents", [1e300, -0.1], np.float64),
]


def typed(datatype: str, field: str, values: Any, model: str = "m") -> bytes:
    made = service_pb2.ModelInferRequest(model_name=model)
    tensor = made.inputs.add(name="IN", datatype=datatype, shape=[len(values)])
    getattr(tensor.contents, field).extend(values)
    tensor.contents.SetInParent()
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(("datatype", "field", "values", "dtype"), TYPED, ids=[t[0] for t in TYPED])
def test_typed_contents(datatype: str, field: str, values: Any, dtype: Any) -> None:
    (tensor,) = decode(typed(datatype, field, values)).inputs
    assert np.frombuffer(tensor, dtype).tolist() == values
    (empty,) = decode(typed(datatype, field, [])).inputs
    assert empty.nbytes == 0


@pytest.mark.parametrize(("datatype", "field", "values", "dtype"), TYPED, ids=[t[0] for t in TYPED])
def test_contents_that_come_in_parts_are_put_together(
    datatype: str, field: str, values: Any, dtype: Any
) -> None:
    whole = service_pb2.ModelInferRequest(model_name="m")
    tensor = whole.inputs.add(name="IN", datatype=datatype, shape=[len(values)])
    parts = [bytes(tensor.SerializeToString())]
    for value in values:
        part = service_pb2.ModelInferRequest.InferInputTensor()
        getattr(part.contents, field).append(value)
        parts.append(bytes(part.SerializeToString()))
    message = b"".join(parts)
    data = b"\x0a\x01m" + b"\x2a" + bytes([len(message)]) + message
    (read,) = decode(data).inputs
    assert np.frombuffer(read, dtype).tolist() == values
    with pytest.raises(
        TritonError, match="malformed"
    ):  # its first part is cut off, in a field that nobody knows
        decode(
            b"\x0a\x01m"
            + b"\x2a"
            + bytes([len(message) + 4])
            + parts[0]
            + b"\x2a\x02\x49N"
            + b"".join(parts[1:])
        )


def test_bytes_contents() -> None:
    (tensor,) = decode(typed("BYTES", "bytes_contents", [b"ab", b"", b"\xff"])).inputs
    assert tensor.tobytes() == b"\2\0\0\0ab" + bytes(4) + b"\1\0\0\0\xff"


def test_unpacked_contents() -> None:
    """Repeated scalars one by one, as old encoders write them."""
    contents = b"\x10\x05\x10\xfb\xff\xff\xff\xff\xff\xff\xff\xff\x01"
    tensor = b"\x0a\x02IN\x12\x05INT32\x1a\x01\x02\x2a" + bytes([len(contents)]) + contents
    (made,) = decode(b"\x0a\x01m\x2a" + bytes([len(tensor)]) + tensor).inputs
    assert np.frombuffer(made, np.int32).tolist() == [5, -5]


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [("INT8", "int_contents", [128]), ("INT16", "int_contents", [-32769]), ("UINT8", "uint_contents", [256])],
)
def test_values_out_of_range(datatype: str, field: str, values: list[int]) -> None:
    with pytest.raises(InvalidArgument, match=f"value {values[0]} of input tensor 'IN' is out of range for"):
        decode(typed(datatype, field, values))


@pytest.mark.parametrize("datatype", ["FP16", "BF16", "INT8", "INT64", "FP64", "BYTES", "NOPE"])
def test_the_wrong_contents_field(datatype: str) -> None:
    expected = datatype if datatype != "NOPE" else "<invalid>"
    with pytest.raises(InvalidArgument) as info:
        decode(typed(datatype, "fp32_contents", [1.0]))
    assert str(info.value) == (
        "unexpected explicit tensor data for input tensor 'IN' for model 'm' of type 'FP32', expected datatype "
        f"'{expected}'"
    )


def test_raw_and_typed_do_not_mix() -> None:
    made = service_pb2.ModelInferRequest.FromString(typed("INT32", "int_contents", [1]))
    made.raw_input_contents.append(b"\0\0\0\0")
    with pytest.raises(InvalidArgument) as info:
        decode(made.SerializeToString())
    assert str(info.value) == (
        "contents field must not be specified when using raw_input_contents for 'IN' for model 'm'"
    )


@pytest.mark.parametrize("raw", [[], [b"1234"]])
def test_data_that_is_missing(raw: list[bytes]) -> None:
    made = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=raw)
    for i in range(len(raw) + 1):
        made.inputs.add(name=f"IN{i}", datatype="INT32", shape=[1])
    with pytest.raises(InvalidArgument) as info:
        decode(made.SerializeToString())
    assert str(info.value) == f"unable to find data for input tensor 'IN{len(raw)}' for model 'm' in request."


def test_more_raw_contents_than_inputs() -> None:
    made = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"1234", b"more"])
    made.inputs.add(name="IN", datatype="INT32", shape=[1])
    assert decode(made.SerializeToString()).inputs[0].tobytes() == b"1234"


# ---------------------------------------------------------------- parameters (docs/protocol/observed.md 5)

KINDS = {
    "bool_param": True,
    "int64_param": 5,
    "string_param": "x",
    "double_param": 1.5,
    "uint64_param": 5,
    None: None,
}


def with_parameter(key: str, kind: str | None, value: Any) -> bytes:
    made = service_pb2.ModelInferRequest(model_name="m", id="i")
    if kind is None:
        made.parameters[key].SetInParent()
    else:
        setattr(made.parameters[key], kind, value)
    return bytes(made.SerializeToString())


@pytest.mark.parametrize(
    ("key", "allowed", "text"),
    [
        (
            "sequence_id",
            ("int64_param", "uint64_param", "string_param"),
            "int64_param, uint64_param or string_param.",
        ),
        ("sequence_start", ("bool_param",), "bool_param."),
        ("sequence_end", ("bool_param",), "bool_param."),
        ("priority", ("int64_param", "uint64_param"), "int64_param or uint64_param."),
        ("timeout", ("int64_param",), "int64_param."),
        ("triton_enable_empty_final_response", ("bool_param",), "bool_param."),
        (
            "u",
            ("bool_param", "int64_param", "string_param", "double_param"),
            "int64_param, bool_param, or string_param.",
        ),
    ],
)
def test_parameter_types(key: str, allowed: tuple[str, ...], text: str) -> None:
    for kind, value in KINDS.items():
        data = with_parameter(key, kind, value)
        if kind in allowed:
            decode(data)
            continue
        with pytest.raises(InvalidArgument) as info:
            decode(data)
        assert str(info.value) == f"invalid value type for '{key}' parameter, expected {text}"


def test_parameter_values() -> None:
    assert decode(with_parameter("sequence_id", "int64_param", -1)).sequence_id == 2**64 - 1
    assert decode(with_parameter("sequence_id", "string_param", "s" * 128)).sequence_id == "s" * 128
    assert decode(with_parameter("sequence_id", "string_param", "")).sequence_id == 0
    assert decode(with_parameter("priority", "uint64_param", 2**63)).priority == 2**63
    assert decode(with_parameter("timeout", "int64_param", 7)).timeout_us == 7
    assert decode(with_parameter("triton_enable_empty_final_response", "bool_param", True)).want_empty_final
    with pytest.raises(InvalidArgument, match=r"^invalid value for 'priority', expected value >= 0\.$"):
        decode(with_parameter("priority", "int64_param", -1))
    with pytest.raises(Unsupported, match=r"^string correlation ID cannot be longer than 128 characters$"):
        decode(with_parameter("sequence_id", "string_param", "s" * 129))
    with pytest.raises(InvalidArgument) as info:
        decode(with_parameter("triton_x", "bool_param", True))
    assert str(info.value) == (
        "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
        "with 'triton_' are allowed: triton_enable_empty_final_response"
    )


# ---------------------------------------------------------------- bytes that are no message


def decode_or_refuse(data: bytes) -> None:
    """What is decoded is what protobuf's own parser reads; what it refuses is refused.

    It takes a field of another wire type, or a group, for one that it does not know.
    """
    try:
        theirs = service_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        with pytest.raises(TritonError):
            decode(data)
        return
    try:
        ours = decode(data)
    except TritonError as error:
        assert not str(error).startswith("malformed message") or "wire type" in str(error), data
    else:
        assert (ours.model_name, ours.model_version, ours.id) == (
            theirs.model_name,
            theirs.model_version,
            theirs.id,
        )


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    decode_or_refuse(data)
    try:
        well_formed(data)
    except TritonError as error:
        assert str(error).startswith("malformed message")


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_damaged_messages_decode_or_are_refused(data: st.DataObject) -> None:
    """A real message with a few bytes changed, cut or doubled: never anything but a TritonError."""
    made = service_pb2.ModelInferRequest(model_name="m", id="x")
    made.parameters["a"].int64_param = 5
    made.parameters["b"].string_param = "y"
    tensor = made.inputs.add(name="IN", datatype="INT32", shape=[2, 3])
    tensor.contents.int_contents.extend([1, -1, 300])
    tensor.parameters["shared_memory_offset"].int64_param = 3
    made.outputs.add(name="OUT").parameters["classification"].int64_param = 2
    damaged = bytearray(made.SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        match data.draw(st.integers(0, 2)):
            case 0:
                damaged[at] = data.draw(st.integers(0, 255))
            case 1:
                del damaged[at:]
            case 2:
                damaged[at:at] = damaged[: data.draw(st.integers(0, 20))]
        if not damaged:
            break
    decode_or_refuse(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"\x0a",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
        b"\x0a\x05ab",
        b"\xff" * 11,
        b"\x0b",
        b"\x00\x00",
        b"\x0a\x02\xff\xfe",
        b"\x08\x01",
        b"\x80\x80\x80\x80\x80\x01\x01",
        b"\x2a\x02\x0a\x05",
        b"\x22\x04\x12\x02\x21\x00",
        b"\xba\x80\x80\x80\x80\x00\x03abc",  # a tag has at most five bytes
    ],
)
def test_malformed_messages(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match=r"^malformed message: "):
        decode(data)
