"""What is refused of binary tensors, of the header that announces them, and of compressed bodies."""

from __future__ import annotations

import json

from tests.support.infer_messages import binary_head
from tests.transport.rest.refusals import KIND, UNKNOWN, Cases, both, first, tensor

case = CASES = Cases()

case(
    "header-negative",
    "simple",
    both(),
    f"inference header size should be in range (0, {len(both())}), got: -1",
    Inference_Header_Content_Length="-1",
)
case(
    "header-long",
    "simple",
    both(),
    f"inference header size should be in range (0, {len(both())}), got: {len(both()) + 1}",
    Inference_Header_Content_Length=str(len(both()) + 1),
)
case(
    "header-zero",
    "simple",
    both(),
    UNKNOWN
    + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple' model configuration",
    Inference_Header_Content_Length="abc",
)
BINARY = json.dumps(
    {"inputs": [tensor(n, data=..., parameters={"binary_data_size": 64}) for n in ("INPUT0", "INPUT1")]}
).encode()
case(
    "binary-without-header",
    "simple",
    BINARY,
    "unexpected size for input 'INPUT0', expecting 64 additional bytes for model 'simple'",
)
case(
    "binary-short",
    "simple",
    BINARY + b"\0" * 124,
    "unexpected size for input 'INPUT1', expecting 4 additional bytes for model 'simple'",
    Inference_Header_Content_Length=str(len(BINARY)),
)
case(
    "binary-long",
    "simple",
    BINARY + b"\0" * 129,
    "unexpected additional input data for model 'simple'",
    Inference_Header_Content_Length=str(len(BINARY)),
)
for value in (-1, "64"):
    case(
        f"binary-size-{value}",
        "simple",
        first(data=..., parameters={"binary_data_size": value}),
        f"Unable to parse 'binary_data_size': {KIND.format('unsigned-integer')}",
    )
case(
    "binary-size-lies",
    "simple",
    BINARY.replace(b"64", b"60") + b"\0" * 120,
    UNKNOWN + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 64, got 60",
    Inference_Header_Content_Length=str(len(BINARY)),
)
BATCH_0 = json.dumps(
    {
        "inputs": [
            tensor(n, [0, 16], data=..., parameters={"binary_data_size": 64}) for n in ("INPUT0", "INPUT1")
        ]
    }
).encode()
case(
    "batch-0",
    "simple",
    BATCH_0 + b"\0" * 128,
    UNKNOWN + "input byte size mismatch for input 'INPUT0' for model 'simple'. Expected 0, got 64",
    Inference_Header_Content_Length=str(len(BATCH_0)),
)


def strings(payload: bytes, count: int) -> tuple[bytes, dict[str, str]]:
    head = binary_head([1, count], "BYTES", len(payload))
    return head + payload, {"Inference_Header_Content_Length": str(len(head))}


for name, payload, count, error in (
    (
        "few",
        b"\1\0\0\0a",
        3,
        "expected 3 string elements for inference input 'INPUT0' for model 'texts', got 1",
    ),
    (
        "many",
        b"\1\0\0\0a" * 2,
        1,
        "unexpected number of string elements 2 for inference input 'INPUT0' for model 'texts', expecting 1",
    ),
    (
        "indicator",
        b"\1\0\0",
        1,
        "incomplete string length indicator for inference input 'INPUT0' for model 'texts', expecting 4 bytes but only 3 bytes available. Please make sure the string length indicator is in one buffer.",
    ),
    (
        "element",
        b"\12\0\0\0ab",
        1,
        "incomplete string data for inference input 'INPUT0', expecting string of length 10 but only 2 bytes available",
    ),
    (
        "element-and-many",
        b"\1\0\0\0a\12\0\0\0ab",
        1,
        "unexpected number of string elements 2 for inference input 'INPUT0' for model 'texts', expecting 1",
    ),
    (
        "element-and-few",
        b"\12\0\0\0ab",
        2,
        "expected 2 string elements for inference input 'INPUT0' for model 'texts', got 1",
    ),
):
    body, extra = strings(payload, count)
    prefix = "" if name == "element" else UNKNOWN
    case(f"bytes-{name}", "texts", body, prefix + error, **extra)

case("encoding", "simple", both(), "Unsupported compression type", 501, Content_Encoding="br")
case(
    "gzip-garbage",
    "simple",
    both(),
    "failed to decompress the gzip request body: Error -3 while decompressing data: incorrect header check",
    Content_Encoding="gzip",
)
case(
    "deflate-cut",
    "simple",
    b"\x78\x9c\x03",
    "failed to decompress the deflate request body: it ends before the compressed data does",
    Content_Encoding="deflate",
)
HALF = json.dumps(
    {
        "inputs": [
            {"name": "INPUT0", "shape": [1, 1], "datatype": "FP16", "parameters": {"binary_data_size": 2}}
        ]
    }
).encode()
case(
    "json-out-fp16",
    "fp16",
    HALF + b"\0\0",
    "sending FP16 data via JSON is not supported. Please use the binary data format for output",
    Inference_Header_Content_Length=str(len(HALF)),
)
