"""The JSON (and JSON + binary) form of inference over HTTP.

Source: spec/observed.md 3 and 4, spec/features.md B2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import orjson

from neptrio import datatypes
from neptrio._cext.request import InferRequest, InferResponse, RequestedOutput, Tensor
from neptrio.codec.numpy_tensor import join_bytes, split_bytes, to_numpy
from neptrio.errors import InvalidArgument, Unsupported

HEADER_LENGTH = b"inference-header-content-length"


def load_json(data: Any) -> Any:
    """Parses a JSON document. Raises InvalidArgument with the parser's reason."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise InvalidArgument(
            f"failed to parse the request JSON buffer: {error.msg} at {error.pos}"
        ) from None


def dump_json(value: Any) -> bytes:
    """Compact JSON."""
    return orjson.dumps(value)


def kind_error(what: str, got: str, wanted: str) -> InvalidArgument:
    """`Unable to parse 'x': attempt to access JSON non-a as b`."""
    return InvalidArgument(f"Unable to parse '{what}': attempt to access JSON non-{got} as {wanted}")


def _text(obj: dict[str, Any], key: str) -> str:
    if key not in obj:
        raise InvalidArgument(
            f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"
        )
    value = obj[key]
    if not isinstance(value, str):
        raise kind_error(key, "string", "string")
    return value


def _uint(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise kind_error(key, "unsigned-integer", "unsigned-integer")
    return value


def _list(obj: dict[str, Any], key: str) -> list[Any]:
    if key not in obj:
        raise InvalidArgument(
            f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"
        )
    value = obj[key]
    if not isinstance(value, list):
        raise kind_error(key, "array", "array")
    return value


def request_parameters(r: InferRequest, parameters: Any) -> bool:
    """Applies a request's parameters; returns binary_data_output."""
    binary = False
    if not isinstance(parameters, dict):
        raise InvalidArgument("failed to get request params.: attempt to get members for non-object")
    for key, value in parameters.items():
        if key == "sequence_id":
            if isinstance(value, str):
                if len(value) > 128:
                    raise Unsupported("string correlation ID cannot be longer than 128 characters")
                r.sequence_id = value or 0
            elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64:
                r.sequence_id = value
            else:
                raise kind_error(key, "string", "string")
        elif key in ("sequence_start", "sequence_end", "binary_data_output"):
            if not isinstance(value, bool):
                raise kind_error(key, "boolean", "boolean")
            if key == "sequence_start":
                r.sequence_start = value
            elif key == "sequence_end":
                r.sequence_end = value
            else:
                binary = value
        elif key == "priority":
            r.priority = _uint(key, value)
        elif key == "timeout":
            r.timeout_us = _uint(key, value)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        elif isinstance(value, (bool, int, float, str)):
            if r.parameters is None:
                r.parameters = {}
            r.parameters[key] = value
        else:
            raise InvalidArgument(
                f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
            )
    return binary


def _flatten(data: Any) -> list[Any]:
    if data and isinstance(data[0], list):
        flat: list[Any] = []
        stack = [iter(data)]
        while stack:
            for item in stack[-1]:
                if isinstance(item, list):
                    stack.append(iter(item))
                    break
                flat.append(item)
            else:
                stack.pop()
        return flat
    return list(data)


def _json_tensor(name: str, dtype: int, shape: tuple[int, ...], data: Any) -> Tensor:
    if not isinstance(data, list):
        raise kind_error("data", "array", "array")
    flat = _flatten(data)
    if len(flat) != math.prod(shape):
        raise InvalidArgument("Unable to parse 'data': Shape does not match true shape of 'data' field")
    if dtype == datatypes.BYTES:
        for item in flat:
            if not isinstance(item, str):
                raise InvalidArgument(
                    "Unable to parse JSON bytes array: attempt to access JSON non-string as string"
                )
        return Tensor(name, dtype, shape, join_bytes(flat))
    if dtype in (datatypes.FP16, datatypes.BF16):
        raise InvalidArgument(
            f"receiving {datatypes.NAME[dtype]} data via JSON is not supported. Please use the binary data "
            f"format for input {name}"
        )
    np_dtype = datatypes.NUMPY[dtype]
    if np_dtype.kind == "b":
        for item in flat:
            if not isinstance(item, bool):
                raise kind_error("data", "boolean", "boolean")
    elif np_dtype.kind in "iu":
        info = np.iinfo(np_dtype)
        for item in flat:
            if isinstance(item, bool) or not isinstance(item, int):
                sort = "signed-integer" if np_dtype.kind == "i" else "unsigned-integer"
                raise kind_error("data", sort, sort)
            if not info.min <= item <= info.max:
                raise InvalidArgument(
                    f"Unable to parse 'data': {item} is out of range for {datatypes.NAME[dtype]} input '{name}' "
                    f"[{info.min}, {info.max}]"
                )
    else:
        for item in flat:
            if isinstance(item, bool) or not isinstance(item, (int, float)):
                raise kind_error("data", "number", "double")
    array = np.array(flat, dtype=np_dtype)
    return Tensor(name, dtype, shape, array.view(np.uint8))


def decode_request(r: InferRequest, body: Any, header_length: int | None, shared_memory: Any = None) -> bool:
    """Fills `r` from an infer body; returns the default for binary outputs.

    `header_length` is the value of Inference-Header-Content-Length, None when absent.
    Raises InvalidArgument.
    """
    view = memoryview(body)
    size = len(view) if header_length is None else header_length
    document = load_json(view[:size])
    if not isinstance(document, dict):
        raise InvalidArgument(
            "Unable to parse 'inputs': attempt to access non-existing object member 'inputs'"
        )
    if "id" in document:
        r.id = _text(document, "id")
    binary_default = False
    if "parameters" in document:
        binary_default = request_parameters(r, document["parameters"])
    at = size
    r.inputs = []
    for item in _list(document, "inputs"):
        tensor, at = _read_input(r, item, view, at, header_length, shared_memory)
        r.inputs.append(tensor)
    if at != len(view):
        raise InvalidArgument(f"unexpected additional input data for model '{r.model_name}'")
    outputs = document.get("outputs") if "outputs" in document else []
    if not isinstance(outputs, list):
        raise kind_error("outputs", "array", "array")
    if outputs:
        r.outputs = _read_outputs(outputs)
    return binary_default


def _read_input(
    r: InferRequest, item: Any, view: memoryview, at: int, header_length: int | None, shared_memory: Any
) -> tuple[Tensor, int]:
    if not isinstance(item, dict):
        raise InvalidArgument("Unable to parse 'inputs': attempt to access JSON non-object as object")
    parameters = item.get("parameters")
    parameters = parameters if isinstance(parameters, dict) else {}
    sources = [
        label
        for label, present in (
            ("'data'", "data" in item),
            ("'binary_data_size'", "binary_data_size" in parameters),
            ("'shared_memory_region'", "shared_memory_region" in parameters),
        )
        if present
    ]
    if len(sources) != 1:
        found = "But no field is set" if not sources else "But set " + " ".join(sources)
        raise InvalidArgument(
            "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
            f"'shared_memory_region' in 'parameters'. {found}"
        )
    name = _text(item, "name")
    datatype = _text(item, "datatype")
    shape = tuple(_uint("shape", d) for d in _list(item, "shape"))
    dtype = datatypes.NUMBER.get(datatype, 0)
    if not dtype:
        raise InvalidArgument(f"invalid datatype for input {name}")
    if "data" in item:
        return _json_tensor(name, dtype, shape, item["data"]), at
    if "shared_memory_region" in parameters:
        region = parameters["shared_memory_region"]
        offset = _uint("shared_memory_offset", parameters.get("shared_memory_offset", 0))
        size = _uint("shared_memory_byte_size", parameters.get("shared_memory_byte_size", 0))
        return shared_memory.input_tensor(name, dtype, shape, region, offset, size), at
    size = _uint("binary_data_size", parameters["binary_data_size"])
    left = len(view) - at if header_length is not None else 0
    if size > left:
        raise InvalidArgument(
            f"unexpected size for input '{name}', expecting {size - left} additional bytes for model "
            f"'{r.model_name}'"
        )
    return Tensor(name, dtype, shape, view[at : at + size]), at + size


def _read_outputs(items: list[Any]) -> list[RequestedOutput]:
    outputs: dict[str, RequestedOutput] = {}
    for item in items:
        if not isinstance(item, dict):
            raise InvalidArgument("Unable to parse 'outputs': attempt to access JSON non-object as object")
        output = RequestedOutput(_text(item, "name"))
        output.binary = 0
        parameters = item.get("parameters")
        if isinstance(parameters, dict):
            if "binary_data" in parameters:
                if not isinstance(parameters["binary_data"], bool):
                    raise kind_error("binary_data", "boolean", "boolean")
                output.binary = int(parameters["binary_data"])
            if "classification" in parameters:
                output.class_count = _uint("classification", parameters["classification"])
            if "shared_memory_region" in parameters:
                output.shm_region = parameters["shared_memory_region"]
                output.shm_offset = _uint("shared_memory_offset", parameters.get("shared_memory_offset", 0))
                output.shm_byte_size = _uint(
                    "shared_memory_byte_size", parameters.get("shared_memory_byte_size", 0)
                )
                if output.binary:
                    raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")
        outputs.setdefault(output.name, output)
    return list(outputs.values())


def tensor_data(tensor: Tensor) -> list[Any]:
    """A tensor's elements as JSON values, flat."""
    if tensor.dtype in (datatypes.FP16, datatypes.BF16):
        raise InvalidArgument(
            f"sending {datatypes.NAME[tensor.dtype]} data via JSON is not supported. Please use the binary data "
            "format for output"
        )
    if tensor.dtype == datatypes.BYTES:
        return [element.decode("utf-8", "replace") for element in split_bytes(tensor)]
    array = to_numpy(tensor).reshape(-1)
    if array.dtype == np.float32:
        array = array.astype(np.float64)
    values: list[Any] = array.tolist()
    return values


def encode_response(
    request: InferRequest, response: InferResponse, binary_default: bool
) -> tuple[list[tuple[bytes, bytes]], list[Any]]:
    """A successful response as (headers without lengths, body buffers)."""
    wants = {o.name: o for o in request.outputs} if request.outputs is not None else None
    document: dict[str, Any] = {}
    if response.id:
        document["id"] = response.id
    document["model_name"] = response.model_name
    document["model_version"] = response.model_version
    if response.parameters:
        document["parameters"] = response.parameters
    outputs: list[dict[str, Any]] = []
    blobs: list[Any] = []
    binary_bytes = 0
    for tensor in response.outputs or ():
        row: dict[str, Any] = {
            "name": tensor.name,
            "datatype": datatypes.NAME[tensor.dtype],
            "shape": list(tensor.shape),
        }
        want = wants.get(tensor.name) if wants is not None else None
        if want is not None and want.shm_region is not None:
            pass
        elif (want.binary == 1) if want is not None else binary_default:
            row["parameters"] = {"binary_data_size": tensor.nbytes}
            binary_bytes += tensor.nbytes
            blobs.append(tensor)
        else:
            row["data"] = tensor_data(tensor)
        outputs.append(row)
    document["outputs"] = outputs
    head = orjson.dumps(document)
    if binary_bytes:
        headers = [
            (b"content-type", b"application/octet-stream"),
            (HEADER_LENGTH, str(len(head)).encode()),
        ]
        return headers, [head, *blobs]
    return [(b"content-type", b"application/json")], [head]
