"""Inference over every HTTP front: datatypes, binary and JSON forms, compression, classification."""

from __future__ import annotations

import gzip
import json
import math
import struct
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.http import Reply
from tests.transport.rest.conftest import ALL_TYPES, Connect

NUMPY = {
    "BOOL": np.bool_, "UINT8": np.uint8, "UINT16": np.uint16, "UINT32": np.uint32, "UINT64": np.uint64,
    "INT8": np.int8, "INT16": np.int16, "INT32": np.int32, "INT64": np.int64, "FP16": np.float16,
    "FP32": np.float32, "FP64": np.float64, "BF16": ml_dtypes.bfloat16,
}  # fmt: skip
HEADER = "Inference-Header-Content-Length"


def values(datatype: str) -> np.ndarray:
    dtype = NUMPY[datatype]
    if datatype == "BOOL":
        return np.array([True, False, True])
    if datatype in ("FP16", "BF16"):
        return np.array([0.5, -2.0, np.inf]).astype(dtype)
    if datatype.startswith("FP"):
        info = np.finfo(dtype)
        return np.array(
            [0.1, -0.0, info.max, info.min, info.tiny, 1e10, 1e-7, np.nan, np.inf, -np.inf], dtype
        )
    limits = np.iinfo(dtype)
    return np.array([limits.min, limits.max, 0, 1, 100], dtype)


def binary_input(name: str, datatype: str, shape: list[int], payload: bytes) -> dict[str, Any]:
    return {
        "name": name,
        "datatype": datatype,
        "shape": shape,
        "parameters": {"binary_data_size": len(payload)},
    }


def infer(connect: Connect, model: str, document: Any, blobs: bytes = b"", **headers: str) -> Reply:
    head = document if isinstance(document, bytes) else json.dumps(document).encode()
    given = {key.replace("_", "-"): value for key, value in headers.items()}
    if blobs:
        given[HEADER] = str(len(head))
    return connect().request("POST", f"/v2/models/{model}/infer", head + blobs, given)


def parts(reply: Reply) -> tuple[Any, bytes]:
    """(JSON document, binary rest)."""
    assert reply.status == 200, reply.body
    n = int(reply.headers.get(HEADER.lower(), len(reply.body)))
    return json.loads(reply.body[:n]), reply.body[n:]


@pytest.mark.parametrize("datatype", ALL_TYPES)
def test_binary_both_ways(connect: Connect, datatype: str) -> None:
    array = values(datatype)
    document = {
        "inputs": [binary_input("INPUT0", datatype, [1, len(array)], array.tobytes())],
        "parameters": {"binary_data_output": True},
    }
    reply = infer(connect, datatype.lower(), document, array.tobytes())
    answer, rest = parts(reply)
    assert reply.headers["content-type"] == "application/octet-stream"
    assert answer == {
        "model_name": datatype.lower(),
        "model_version": "1",
        "outputs": [
            {
                "name": "OUTPUT0",
                "datatype": datatype,
                "shape": [1, len(array)],
                "parameters": {"binary_data_size": array.nbytes},
            }
        ],
    }
    assert rest == array.tobytes()


@pytest.mark.parametrize("datatype", [t for t in ALL_TYPES if t not in ("FP16", "BF16")])
def test_json_both_ways(connect: Connect, datatype: str) -> None:
    array = values(datatype)
    text = json.dumps(array.tolist())
    body = (
        f'{{"inputs":[{{"data":{text},"shape":[1,{len(array)}],"datatype":"{datatype}","name":"INPUT0"}}]}}'
    )
    reply = infer(connect, datatype.lower(), body.encode())
    answer, _ = parts(reply)
    assert reply.headers["content-type"] == "application/json"
    back = np.array(answer["outputs"][0]["data"], NUMPY[datatype])
    np.testing.assert_array_equal(back, array)
    if datatype.startswith("FP"):
        assert b"NaN,Infinity,-Infinity]" in reply.body


def test_floats_are_printed_as_doubles(connect: Connect) -> None:
    text = b"[0.1,1,1e10,1e-7,-0.0,1e21,1e22,123456789]"
    body = b'{"inputs":[{"name":"INPUT0","shape":[1,8],"datatype":"FP32","data":%s}]}' % text
    expected = (
        b'"data":[0.10000000149011612,1.0,10000000000.0,1.0000000116860974e-7,-0.0,'
        b"1.0000000200408773e21,9.999999778196308e21,123456792.0]"
    )
    reply = infer(connect, "fp32", body)
    assert expected in reply.body


def test_key_order_and_id(connect: Connect) -> None:
    body = b'{"id":"a\\u0001\\"\\\\/\\n\xc3\xa9\xff","inputs":[{"name":"INPUT0","shape":[1,1],"datatype":"UINT8","data":[7]}]}'
    reply = infer(connect, "uint8", body)
    assert reply.body == (
        b'{"id":"a\\u0001\\"\\\\/\\n\xc3\xa9\xff","model_name":"uint8","model_version":"1","outputs":'
        b'[{"name":"OUTPUT0","datatype":"UINT8","shape":[1,1],"data":[7]}]}'
    )


def test_leniencies_of_the_parser(connect: Connect) -> None:
    body = (
        b'\xef\xbb\xbf { "extra" : [ {} , [ [ ] ] , null ] , "id" : "first" , "id" : "second" , "inputs" : '
        b'[ { "shape" : [ 1 , 4 ] , "data" : [ [ 1 , [ 2 ] ] , [ 3 , 4 ] ] , "data" : 5 , "name" : "INPUT0" , '
        b'"more" : 1.5e3 , "datatype" : "INT16" } ] , "outputs" : [ ] }  \n'
    )
    answer, _ = parts(infer(connect, "int16", body, Content_Type="text/plain"))
    assert answer["id"] == "first" and answer["outputs"][0]["data"] == [1, 2, 3, 4]


def test_zero_size(connect: Connect) -> None:
    document: dict[str, Any] = {
        "inputs": [{"name": "INPUT0", "shape": [1, 0], "datatype": "FP32", "data": []}]
    }
    answer, _ = parts(infer(connect, "fp32", document))
    assert answer["outputs"][0]["data"] == [] and answer["outputs"][0]["shape"] == [1, 0]
    document["parameters"] = {"binary_data_output": True}
    reply = infer(connect, "fp32", document)
    answer, rest = parts(reply)
    assert reply.headers["content-type"] == "application/json" and HEADER.lower() not in reply.headers
    assert answer["outputs"][0]["parameters"] == {"binary_data_size": 0} and rest == b""


def test_strings(connect: Connect) -> None:
    texts = ["", "a", "é", '"\\/\b\f\n\r\t\x00', "😀" * 50]
    document = {"inputs": [{"name": "INPUT0", "shape": [1, 5], "datatype": "BYTES", "data": texts}]}
    answer, _ = parts(infer(connect, "texts", document))
    assert answer["outputs"][0]["data"] == texts
    payload = b"".join(struct.pack("<I", len(t.encode())) + t.encode() for t in texts)
    document = {
        "inputs": [binary_input("INPUT0", "BYTES", [1, 5], payload)],
        "outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
    }
    _, rest = parts(infer(connect, "texts", document, payload))
    assert rest == payload


def test_output_selection_and_binary_flags(connect: Connect) -> None:
    row = np.arange(16, dtype=np.int32)
    inputs = [
        binary_input("INPUT0", "INT32", [1, 16], row.tobytes()),
        {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": (row + 1).tolist()},
    ]

    def outputs(*wanted: Any, **parameters: Any) -> list[tuple[str, bool]]:
        document: dict[str, Any] = {"inputs": inputs, "parameters": parameters}
        if wanted:
            document["outputs"] = list(wanted)
        answer, _ = parts(infer(connect, "simple", document, row.tobytes()))
        return [(o["name"], "data" not in o) for o in answer["outputs"]]

    binary = {"parameters": {"binary_data": True}}
    plain = {"parameters": {"binary_data": False}}
    assert outputs() == [("OUTPUT0", False), ("OUTPUT1", False)]
    assert outputs(binary_data_output=True) == [("OUTPUT0", True), ("OUTPUT1", True)]
    assert outputs({"name": "OUTPUT1"}) == [("OUTPUT1", False)]
    assert outputs({"name": "OUTPUT1"}, {"name": "OUTPUT0", **binary}) == [
        ("OUTPUT0", True),
        ("OUTPUT1", False),
    ]
    # once outputs are listed, the request's default does not count
    assert outputs({"name": "OUTPUT0", **plain}, {"name": "OUTPUT1"}, binary_data_output=True) == [
        ("OUTPUT0", False),
        ("OUTPUT1", False),
    ]


def test_mixed_answer_keeps_blobs_in_output_order(connect: Connect) -> None:
    row = np.arange(16, dtype=np.int32).tobytes()
    document = {
        "inputs": [binary_input(f"INPUT{i}", "INT32", [1, 16], row) for i in range(2)],
        "parameters": {"binary_data_output": True},
    }
    other = np.arange(100, 116, dtype=np.int32).tobytes()
    _, rest = parts(infer(connect, "simple", document, row + other))
    assert rest == row + other


@pytest.mark.parametrize("header", [" 210 ", "210x"])
def test_lenient_header_length(connect: Connect, header: str) -> None:
    document = {"inputs": [binary_input(f"INPUT{i}", "INT32", [1, 16], b"\0" * 64) for i in range(2)]}
    head = json.dumps(document).encode()
    header = header.replace("210", str(len(head)))
    reply = connect().request("POST", "/v2/models/simple/infer", head + b"\0" * 128, {HEADER: header})
    assert reply.status == 200


def test_raw_binary_requests(connect: Connect) -> None:
    connection = connect()
    payload = np.array([1.5, 2.5], np.float32).tobytes()
    for headers, model, shape in (
        ({HEADER: "0"}, "two", [1, 2]),
        ({HEADER: "0"}, "fp32", [1, 2]),
        ({HEADER: "0"}, "two/versions/2", [1, 2]),
    ):
        reply = connection.request("POST", f"/v2/models/{model}/infer", payload, headers)
        answer, rest = parts(reply)
        assert answer["outputs"][0]["shape"] == shape and rest == payload
    reply = connection.request("POST", "/v2/models/text/infer", b"hello", {HEADER: "0"})
    answer, rest = parts(reply)
    assert answer["outputs"][0]["shape"] == [1, 1] and rest == b"\5\0\0\0hello"
    reply = connection.request("POST", "/v2/models/text/infer")
    assert parts(reply)[1] == b"\0\0\0\0"


def test_versions(connect: Connect) -> None:
    document = {"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
    for path, version in (("two", "2"), ("two/versions/2", "2")):
        assert parts(infer(connect, path, document))[0]["model_version"] == version


@pytest.mark.parametrize(
    ("accept", "encoding"),
    [
        ("gzip", "gzip"),
        ("deflate", "deflate"),
        ("deflate, gzip", "deflate"),
        ("gzip, deflate", "gzip"),
        ("identity, gzip", None),
        ("br;q=1.0, gzip;q=0.8", "gzip"),
        ("gzip;q=0.2, deflate;q=0.7", "deflate"),
        ("*", None),
        ("br", None),
        ("GZIP", None),
        ("gzip;q=0", None),
    ],
)
@pytest.mark.parametrize("binary", [False, True])
def test_response_compression(connect: Connect, accept: str, encoding: str | None, binary: bool) -> None:
    document = {
        "inputs": [{"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}],
        "parameters": {"binary_data_output": binary},
    }
    plain = infer(connect, "fp32", document)
    reply = infer(connect, "fp32", document, Accept_Encoding=accept)
    assert reply.headers.get("content-encoding") == encoding
    assert reply.headers.get(HEADER.lower()) == plain.headers.get(HEADER.lower())
    body = {"gzip": gzip.decompress, "deflate": zlib.decompress, None: bytes}[encoding](reply.body)
    assert body == plain.body
    refused = infer(connect, "fp32", b"{", Accept_Encoding=accept)
    assert refused.status == 400 and "content-encoding" not in refused.headers


@pytest.mark.parametrize("size", [4, 100_000])
def test_compressed_requests(connect: Connect, size: int) -> None:
    rng = np.random.default_rng(0)
    payload = rng.integers(0, 1 << 32, size, np.uint32).tobytes()  # does not shrink: large stays large
    head = json.dumps(
        {
            "inputs": [binary_input("INPUT0", "UINT32", [1, size], payload)],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    connection = connect()
    for encoding, packed in (
        ("gzip", gzip.compress(head + payload)),
        ("deflate", zlib.compress(head + payload)),
        ("identity", head + payload),
    ):
        headers = {HEADER: str(len(head)), "Content-Encoding": encoding, "Accept-Encoding": encoding}
        reply = connection.request("POST", "/v2/models/uint32/infer", packed, headers)
        assert reply.status == 200
        unpack: Any = {"gzip": gzip.decompress, "deflate": zlib.decompress, "identity": bytes}[encoding]
        assert unpack(reply.body).endswith(payload)


@pytest.mark.parametrize("encoding", ["br", "foo", "GZIP", "gzip, deflate"])
def test_who_sends_an_unknown_encoding_is_told_the_known_ones(connect: Connect, encoding: str) -> None:
    reply = connect().request("POST", "/v2/models/simple/infer", b"x", {"Content-Encoding": encoding})
    assert (reply.status, json.loads(reply.body)) == (501, {"error": "Unsupported compression type"})
    assert reply.headers["accept-encoding"] == "gzip, deflate"


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """70 MiB in 300 KiB."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    zeros = b"\0" * (1 << 20)
    return b"".join(packer.compress(zeros) for _ in range(70)) + packer.flush()


@pytest.mark.slow
def test_a_gzip_bomb_is_refused(connect: Connect, bomb: bytes) -> None:
    reply = connect().request("POST", "/v2/models/simple/infer", bomb, {"Content-Encoding": "gzip"})
    assert reply.status == 413
    assert json.loads(reply.body)["error"].startswith("request body exceeds the limit of 67108864 bytes")


def classes(connect: Connect, model: str, data: list[Any], shape: list[int], k: int, datatype: str) -> Any:
    document = {
        "inputs": [{"name": "I", "shape": shape, "datatype": datatype, "data": data}],
        "outputs": [{"name": "O", "parameters": {"classification": k}}],
    }
    answer, _ = parts(infer(connect, model, document))
    output = answer["outputs"][0]
    assert output["datatype"] == "BYTES" or k == 0
    return output["shape"], output["data"]


def test_classification_prints_the_longest_numbers_beside_infinities(connect: Connect) -> None:
    largest = float(np.finfo(np.float32).max)
    given = [math.inf, -math.inf, -largest, *[largest] * 9997]
    document = {
        "inputs": [{"name": "INPUT0", "shape": [1, len(given)], "datatype": "FP32", "data": given}],
        "outputs": [{"name": "OUTPUT0", "parameters": {"classification": len(given)}}],
    }
    answer, _ = parts(infer(connect, "fp32", document))
    data = answer["outputs"][0]["data"]
    assert len(data) == len(given)
    longest = f"{largest:.6f}"
    assert data[:2] == ["inf:0", f"{longest}:3"]
    assert data[-3:] == [f"{longest}:9999", f"-{longest}:2", "-inf:1"]


def test_classification(connect: Connect) -> None:
    assert classes(connect, "classes", [0.1, 0.9, 0.5, 1e10], [1, 4], 2, "FP32") == (
        [1, 2],
        ["10000000000.000000:3", "0.900000:1:one"],
    )
    assert classes(connect, "classes", [1, 1, 1, 0, 0, 2, 2, 0], [2, 4], 2, "FP32") == (
        [2, 2],
        ["1.000000:0:zero", "1.000000:1:one", "2.000000:1:one", "2.000000:2:two"],
    )
    shape, data = classes(connect, "ints", [5, 16, -3, 16], [4], 99, "INT32")
    assert (shape, data) == ([4], ["16:1", "16:3", "5:0", "-3:2"])
    shape, data = classes(connect, "ints", [5, 16, -3, 16], [4], 0, "INT32")
    assert (shape, data) == ([4], [5, 16, -3, 16])
