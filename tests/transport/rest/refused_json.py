"""What is refused of the JSON of an infer request: syntax, members, tensors, parameters, outputs."""

from __future__ import annotations

import json

from neptrio.datatypes import NUMBER
from tests.transport.rest.refusals import (
    INVALID_TYPE,
    KIND,
    NOTE,
    ONE_SOURCE,
    PARSE,
    RESERVED,
    ROW,
    UNKNOWN,
    Cases,
    both,
    first,
    only,
    tensor,
)

case = CASES = Cases()
MISMATCH = "Unable to parse 'data': Shape does not match true shape of 'data' field of input 'INPUT0', whose shape takes "


def of_type(datatype: str) -> str:
    """What follows the text about an element that is none of the input's."""
    return f": input 'INPUT0' is {datatype}"


case("unknown-model-beats-bad-json", "nope", b"{", "Request for unknown model: 'nope' is not found", 404)
case(
    "near-model",
    "simpel",
    b"{",
    "Request for unknown model: 'simpel' is not found, did you mean 'simple'?",
    404,
)
case(
    "unknown-version",
    "simple/versions/7",
    b"{",
    "Request for unknown model: 'simple' version 7 is not found, it has 1",
    404,
)
case("percent", "si%6dple", b"{", "Request for unknown model: 'si%6dple' is not found", 404)
case(
    "huge-version",
    "simple/versions/99999999999999999999",
    b"{}",
    "failed to get model version from specified version string '99999999999999999999' (details: stol), version "
    "should be an integral value > 0",
)
case(
    "decoupled-beats-bad-json",
    "decoupled",
    b"{",
    "HTTP end point doesn't support models with decoupled transaction policy; infer_stream, generate_stream and gRPC's "
    "ModelStreamInfer do",
    501,
)
case("open-object", "simple", b"{", PARSE + "Missing a name for object member. at 1")
case(
    "single-quotes",
    "simple",
    b"{'inputs': []}",
    PARSE + 'Missing a name for object member. at 1 (names and texts stand in double quotes, "like this")',
)
case(
    "form",
    "simple",
    b'------7f\r\nContent-Disposition: form-data; name="file"\r\n\r\n{}\r\n------7f--',
    PARSE + "Invalid value. at 1 (it looks like a form, send the JSON itself as the body)",
)
case("not-json", "simple", b"not json", PARSE + "Invalid value. at 1")
case("spaces", "simple", b"  ", PARSE + "The document is empty. at 2")
case(
    "comma",
    "simple",
    b'{"id":"a" "b":1}',
    PARSE + "Missing a comma or '}' after an object member. at 10 (after \"id\")",
)
case(
    "trailing",
    "simple",
    both() + b" x",
    PARSE
    + f"The document root must not be followed by other values. at {len(both()) + 1} (tensors as bytes behind the JSON "
    f"need the header Inference-Header-Content-Length: {len(both()) + 1})",
)
case("comment", "simple", b"{/**/}", PARSE + "Missing a name for object member. at 1")
case("deep", "simple", b"[" * 100_000 + b"]" * 100_000, PARSE + "Nesting deeper than 100 levels. at 100")
case("deep-objects", "simple", b'{"a":' * 100_000, PARSE + "Nesting deeper than 100 levels. at 500")
case(
    "long-number",
    "simple",
    b'{"id":' + b"1" * 10_000 + b"}",
    PARSE + 'Number too big to be stored in double. at 6 (in "id")',
)
for text in (b"{}", b"[]", b"null", b"1"):
    case(
        f"no-inputs-{text.decode()}",
        "simple",
        text,
        "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'",
    )
case("inputs-kind", "simple", b'{"inputs":1}', f"Unable to parse 'inputs': {KIND.format('array')}")
case("outputs-kind", "simple", both(outputs=None), f"Unable to parse 'outputs': {KIND.format('array')}")
case("id-kind", "simple", both(id=5), f"Unable to parse 'id': {KIND.format('string')}")
case("name-kind", "simple", first(name=1), f"Unable to parse 'name': {KIND.format('string')}")
case(
    "name-missing",
    "simple",
    first(name=...),
    "Unable to parse 'name': attempt to access non-existing object member 'name'",
)
case("datatype-kind", "simple", first(datatype=1), f"Unable to parse 'datatype': {KIND.format('string')}")
for dim in (-1, 1.5, "1", None):
    case(
        f"shape-{dim}",
        "simple",
        first(shape=[1, dim]),
        f"Unable to parse 'shape': {KIND.format('unsigned-integer')}",
    )
case("no-source", "simple", first(data=..., name=...), ONE_SOURCE + "But no field is set")
case(
    "two-sources",
    "simple",
    first(parameters={"binary_data_size": 64}),
    ONE_SOURCE + "But set 'data' 'binary_data_size'",
)
case(
    "three-sources",
    "simple",
    first(parameters={"binary_data_size": 64, "shared_memory_region": "r"}),
    ONE_SOURCE + "But set 'data' 'binary_data_size' 'shared_memory_region'",
)
case(
    "datatype",
    "simple",
    first(datatype="FOO"),
    f"invalid datatype for input INPUT0: 'FOO', expected one of {', '.join(NUMBER)}",
)
for given, meant in (
    ("int32", "INT32"),
    ("TYPE_INT32", "INT32"),
    ("float", "FP32"),
    ("TYPE_STRING", "BYTES"),
    ("string", "BYTES"),
):
    case(
        f"datatype-{given}",
        "simple",
        first(datatype=given),
        f"invalid datatype for input INPUT0: '{given}', did you mean '{meant}'?",
    )
case(
    "count",
    "simple",
    first(data=ROW[1:]),
    MISMATCH + "16 elements and not 15",
)
case(
    "count-more",
    "simple",
    first(data=[*ROW, 1]),
    MISMATCH + "16 elements and not more",
)
case(
    "count-beats-datatype",
    "simple",
    first(data=ROW[1:], datatype="FP32"),
    MISMATCH + "16 elements and not 15",
)
case(
    "count-overflow",
    "simple",
    first(shape=[4294967296, 4294967296, 16]),
    MISMATCH + "more elements than the text has characters",
)
for wrong in (1.0, "1", True, None, {}):
    case(
        f"int-{wrong}",
        "int32",
        only("INT32", [wrong]),
        f"Unable to parse 'data': {KIND.format('signed-integer')}{of_type('INT32')}",
    )
case(
    "uint-negative",
    "uint8",
    only("UINT8", [-1]),
    f"Unable to parse 'data': {KIND.format('unsigned-integer')}{of_type('UINT8')}",
)
case(
    "bool-int",
    "bool",
    only("BOOL", [1]),
    f"Unable to parse 'data': {KIND.format('boolean')}{of_type('BOOL')}",
)
case(
    "fp-text",
    "fp32",
    only("FP32", ["1"]),
    f"Unable to parse 'data': attempt to access JSON non-number as double{of_type('FP32')}",
)
case(
    "bytes-int",
    "text",
    only("BYTES", [1]),
    f"Unable to parse JSON bytes array: attempt to access JSON non-string as string{of_type('BYTES')}",
)
for datatype in ("FP16", "BF16"):
    case(
        f"json-{datatype}",
        datatype.lower(),
        only(datatype, [1.0]),
        f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input INPUT0",
    )
for datatype, value, low, high in (
    ("INT8", 128, -128, 127),
    ("INT8", -129, -128, 127),
    ("UINT8", 256, 0, 255),
    ("INT16", 1 << 15, -(1 << 15), (1 << 15) - 1),
    ("UINT16", 1 << 16, 0, (1 << 16) - 1),
    ("INT32", 3_000_000_000, -(1 << 31), (1 << 31) - 1),
    ("UINT32", 1 << 32, 0, (1 << 32) - 1),
    ("INT64", 1 << 63, -(1 << 63), (1 << 63) - 1),
    ("INT64", -(1 << 63) - 1, -(1 << 63), (1 << 63) - 1),
    ("UINT64", 1 << 64, 0, (1 << 64) - 1),
):
    case(
        f"range-{datatype}-{value}",
        datatype.lower(),
        only(datatype, [value]),
        f"Unable to parse 'data': {value} is out of range for {datatype} input 'INPUT0' [{low}, {high}]",
    )
for datatype, more in (("UINT8", 0), ("UINT8", 20), ("UINT64", 0), ("UINT64", 20)):
    case(  # whatever follows it
        f"negative-{datatype}-{more}",
        datatype.lower(),
        only(datatype, [-300, *[0] * more]),
        f"Unable to parse 'data': {KIND.format('unsigned-integer')}{of_type(datatype)}",
    )
case(
    "raw-two-inputs",
    "simple",
    b"",
    UNKNOWN
    + "Raw request must only have 1 input (found 1) to be deduced but got 2 inputs in 'simple' model configuration",
)
case(
    "raw-bytes-shape",
    "texts",
    b"abc",
    UNKNOWN + "For BYTE datatype raw input 'INPUT0', the model must have input shape [1]",
    Inference_Header_Content_Length="0",
)
case(
    "raw-two-variable",
    "matrix",
    b"abcd",
    UNKNOWN
    + "The shape of the raw input 'INPUT0' can not be deduced because there are more than one variable-sized dimension",
    Inference_Header_Content_Length="0",
)
case(
    "raw-bytes-left-over",
    "fp32",
    b"abcdef",
    UNKNOWN + "input byte size mismatch for input 'INPUT0' for model 'fp32'. Expected 4, got 6",
    Inference_Header_Content_Length="0",
)
case(
    "missing-input",
    "simple",
    json.dumps({"inputs": [tensor()]}).encode(),
    UNKNOWN
    + "expected 2 inputs but got 1 inputs for model 'simple'. Got input(s) ['INPUT0'], but missing required "
    "input(s) ['INPUT1']. Please provide all required input(s).",
)
case(
    "no-input",
    "simple",
    b'{"inputs":[],"id":"r7"}',
    "[request id: r7] expected 2 inputs but got 0 inputs for model 'simple'. Got input(s) [], but missing required "
    "input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
)
case(
    "optional-none",
    "optional",
    b'{"inputs":[]}',
    UNKNOWN
    + "expected number of inputs between 1 and 2 but got 0 inputs for model 'optional'. Got input(s) [], but "
    "missing required input(s) ['A']. Please provide all required input(s).",
)
case(
    "one-input-too-many",
    "simple",
    both(inputs=[tensor(), tensor("INPUT1"), tensor("INPUT2")]),
    UNKNOWN
    + "expected 2 inputs but got 3 inputs for model 'simple'. Got input(s) ['INPUT0','INPUT1','INPUT2'], the "
    "model takes ['INPUT0','INPUT1'].",
)
case(
    "near-name",
    "simple",
    first(name="INPUT9"),
    "unexpected inference input 'INPUT9' for model 'simple', did you mean 'INPUT1'?",
)
case(
    "name-in-other-letters",
    "simple",
    first(name="input0"),
    "unexpected inference input 'input0' for model 'simple', did you mean 'INPUT0'?",
)
case(
    "wrong-name",
    "simple",
    first(name="FOO"),
    "unexpected inference input 'FOO' for model 'simple', the model takes ['INPUT0','INPUT1']",
)
case("duplicate-input", "simple", first(name="INPUT1"), UNKNOWN + "input 'INPUT1' already exists in request")
MANY = [tensor(f"T{i}") for i in range(40)]
case(
    "duplicate-among-many-inputs",
    "simple",
    both(inputs=[*MANY, tensor("T20")]),
    UNKNOWN + "input 'T20' already exists in request",
)
case(
    "too-many-inputs",
    "simple",
    both(inputs=MANY),
    UNKNOWN
    + "expected 2 inputs but got 40 inputs for model 'simple'. Got input(s) ["
    + ",".join(f"'T{i}'" for i in range(40))
    + "], but missing required input(s) ['INPUT0','INPUT1']. Please provide all required input(s).",
)
case(
    "duplicate-output",
    "simple",
    both(outputs=[{"name": "OUTPUT1"}, {"name": "OUTPUT0"}, {"name": "OUTPUT1"}]),
    "Duplicate output name 'OUTPUT1' is not allowed in a request",
)
case(
    "unknown-output",
    "simple",
    both(outputs=[{"name": "NOPE"}]),
    "unexpected inference output 'NOPE' for model 'simple', the model gives ['OUTPUT0','OUTPUT1']",
)
case(
    "unknown-output-beats-missing-input",
    "simple",
    json.dumps({"inputs": [tensor()], "outputs": [{"name": "NOPE"}]}).encode(),
    "unexpected inference output 'NOPE' for model 'simple', the model gives ['OUTPUT0','OUTPUT1']",
)
case(
    "datatype-mismatch-beats-shape",
    "simple",
    first(datatype="FP32", shape=[1, 15], data=ROW[1:]),
    UNKNOWN + "inference input 'INPUT0' data-type is 'FP32', but model 'simple' expects 'INT32'",
)
case(
    "shape",
    "simple",
    first(shape=[1, 15], data=ROW[1:]),
    UNKNOWN + f"unexpected shape for input 'INPUT0' for model 'simple'. Expected [-1,16], got [1,15]. {NOTE}",
)
case(
    "shape-without-batching",
    "nobatch",
    only("INT32", ROW, [1, 16]),
    UNKNOWN + "unexpected shape for input 'INPUT0' for model 'nobatch'. Expected [16], got [1,16]. ",
)
case(
    "batch-mismatch-beats-shape",
    "simple",
    first(shape=[2, 8]),
    UNKNOWN
    + "input 'INPUT1' batch size does not match other inputs for 'simple': it has 1 rows, input 'INPUT0' 2",
)
case(
    "rank-1",
    "simple",
    json.dumps({"inputs": [tensor(shape=[16]), tensor("INPUT1")]}).encode(),
    UNKNOWN
    + "input 'INPUT1' batch size does not match other inputs for 'simple': it has 1 rows, input 'INPUT0' 16",
)
case(
    "no-shape",
    "simple",
    first(shape=[], data=[1]),
    UNKNOWN + "input 'INPUT0' has no shape but model requires batch dimension for 'simple'",
)
case(
    "batch-too-large",
    "simple",
    json.dumps({"inputs": [tensor(n, [9, 15], data=[1] * 135) for n in ("INPUT0", "INPUT1")]}).encode(),
    UNKNOWN + "inference request batch-size must be <= 8 for 'simple', got 9",
)
case(
    "without-the-batch",
    "simple",
    json.dumps({"inputs": [tensor(n, [16]) for n in ("INPUT0", "INPUT1")]}).encode(),
    UNKNOWN
    + "inference request batch-size must be <= 8 for 'simple', got 16: input 'INPUT0' has the shape [16], expected "
    "[-1,16], whose first dimension is the batch's size",
)
RANGE = ", expected 0 to 18446744073709551615, got: "
for key, value, kind, more in (
    ("priority", "x", "unsigned-integer", ""),
    ("timeout", -1, "unsigned-integer", RANGE + "-1"),
    ("sequence_id", -1, "string", RANGE + "-1"),
    ("sequence_id", 1 << 64, "string", RANGE + "18446744073709551616"),
    ("sequence_id", 1.5, "string", ""),
    ("sequence_start", 1, "boolean", ""),
    ("binary_data_output", 1, "boolean", ""),
):
    case(
        f"parameter-{key}-{value}",
        "simple",
        both(parameters={key: value}),
        f"Unable to parse '{key}': {KIND.format(kind)}{more}",
    )
for value in (None, [], {}):
    case(f"parameter-{value}", "simple", both(parameters={"a": value}), INVALID_TYPE)
case("parameter-reserved", "simple", both(parameters={"triton_x": 1}), RESERVED)
case(
    "parameters-kind",
    "simple",
    both(parameters=[]),
    "failed to get request params.: attempt to get members for non-object",
)
case(
    "sequence-id-long",
    "simple",
    both(parameters={"sequence_id": "x" * 129}),
    "string correlation ID cannot be longer than 128 characters",
    501,
)
for value in (-1, "x", 1.5):
    case(
        f"classification-{value}",
        "simple",
        both(outputs=[{"name": "OUTPUT0", "parameters": {"classification": value}}]),
        f"Unable to set 'classification': {KIND.format('unsigned-integer')}",
    )
case(
    "classification-bool",
    "bool",
    json.dumps(
        {
            "inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "BOOL", "data": [True]}],
            "outputs": [{"name": "OUTPUT0", "parameters": {"classification": 1}}],
        }
    ).encode(),
    "class result not available for output due to unsupported type 'BOOL'",
)
case(
    "output-binary-kind",
    "simple",
    both(outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": 1}}]),
    f"Unable to parse 'binary_data': {KIND.format('boolean')}",
)
case(
    "shm-and-binary",
    "simple",
    both(outputs=[{"name": "OUTPUT0", "parameters": {"binary_data": True, "shared_memory_region": "r"}}]),
    "Output can't set both 'shared_memory_region' and 'binary_data'",
)
# the order of keys decides nothing: the same two errors, in both orders
case(
    "order-of-keys-1",
    "simple",
    b'{"parameters":{"priority":"x"},"id":5,"inputs":[]}',
    f"Unable to parse 'id': {KIND.format('string')}",
)
case("order-of-keys-2", "simple", b'{"inputs":[1],"id":5}', f"Unable to parse 'id': {KIND.format('string')}")
case(
    "syntax-beats-all",
    "simple",
    b'{"id":5,"inputs":[1],}',
    PARSE
    + 'Missing a name for object member. at 21 (after "inputs": no comma may stand before a closing bracket)',
)
