"""The generate extension: the request body is one flat JSON object, and so is each response.

Top-level keys that name inputs become tensors, all others request parameters; a response's
outputs, parameters and model identity are the keys of its object.
Source: docs/protocol/observed.md 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from neptrio import datatypes
from neptrio.codec.json_reader import ArrayText, Stop, load
from neptrio.codec.json_request import add_parameter
from neptrio.codec.json_tensor import tensor_json, tensor_of
from neptrio.codec.json_writer import dump
from neptrio.codec.unsendable import unsendable
from neptrio.errors import InvalidArgument, meant
from neptrio.limits import shown
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor


def decode(
    request: InferRequest,
    body: Any,
    large: bool = False,
    reserve: Callable[[int], None] | None = None,
) -> None:
    """Fills `request`, whose model is already set, from a generate body. Raises InvalidArgument.

    With `large` this is called on a worker's thread; it calls reserve(bytes) before it allocates for numbers, and raises
    what that raises.
    """
    repeated: list[str] = []
    document = load(body, repeated, large, request.model.input_index, reserve, bounded=True)
    if not isinstance(document, dict):
        raise InvalidArgument("attempt to get members for non-object")
    specs = request.model.input_index
    request.inputs = []
    for key, value in document.items():
        if key in specs:
            request.inputs.append(_tensor(request, specs[key], value, large, reserve))
        elif key == "parameters":
            if not isinstance(value, dict):
                raise InvalidArgument(
                    "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object as object"
                )
            for name, item in value.items():
                try:
                    add_parameter(request, name, item)
                except InvalidArgument as error:
                    raise InvalidArgument(f"Converting keyword: 'parameters': {error}") from None
        else:
            if key == "id":
                if not isinstance(value, str):
                    raise InvalidArgument("Unable to parse 'id': attempt to access JSON non-string as string")
                request.id = value
            try:
                add_parameter(request, key, value)
            except InvalidArgument as error:
                near = meant(key, specs)
                raise InvalidArgument(f"{error} It is no input, either{near}") if near else error from None
    for key in repeated:
        if key in specs:  # a repeated parameter is no error: its first value counts
            raise InvalidArgument(
                f"[request id: {shown(request.id) or '<id_unknown>'}] input '{shown(key)}' already exists in request"
            )


def _tensor(
    request: InferRequest, spec: Any, value: Any, large: bool, reserve: Callable[[int], None] | None
) -> Tensor:
    """A JSON scalar or array as the input `spec`; the size of one variable dimension follows from the element count."""
    text, count = (value.text, value.count) if isinstance(value, ArrayText) else (dump([value]), 1)
    known = math.prod(d for d in spec.dims if d >= 0)
    variable = sum(d < 0 for d in spec.dims)
    if variable > 1 or (variable == 0 and known != count) or (variable and (known == 0 or count % known)):
        raise InvalidArgument(f"The schema can not convert input '{spec.name}' to tensor with proper shape")
    dims = tuple(d if d >= 0 else count // known for d in spec.dims)
    shape = (1, *dims) if request.model.max_batch_size > 0 else dims
    try:
        tensor: Tensor = tensor_of(spec.name, spec.dtype, shape, text, large, reserve)
    except InvalidArgument as error:
        raise InvalidArgument(f"The schema can not convert input '{spec.name}' to tensor: {error}") from None
    return tensor


def encode(response: InferResponse, stop: Stop | None = None) -> bytes:
    """A response as a JSON object: id first, then every other key in alphabetical order.

    With `stop` this is called on a worker's thread; raises Cancelled after stop.ask(). Raises TritonError for texts of a
    model's that are no Unicode.
    """
    try:
        return _encoded(response, stop)
    except UnicodeEncodeError as error:
        raise unsendable(response, error, "surrogateescape") from None


def _encoded(response: InferResponse, stop: Stop | None) -> bytes:
    entries: dict[str, bytes] = {
        "model_name": dump(response.model_name),
        "model_version": dump(response.model_version),
    }
    for key, value in (response.parameters or {}).items():
        entries[key] = dump(value)
    for tensor in response.outputs or ():
        text = tensor_json(tensor, stop)
        single = tensor.nbytes == datatypes.ITEM_SIZE[tensor.dtype] or (
            tensor.dtype == datatypes.BYTES and math.prod(tensor.shape) == 1
        )
        entries[tensor.name] = text[1:-1] if single and len(text) > 2 else text
    parts = [b'"id":' + dump(response.id)] if response.id else []
    parts += [dump(key) + b":" + entries[key] for key in sorted(entries)]
    return b"{" + b",".join(parts) + b"}"


def event(payload: bytes) -> bytes:
    """`payload` as a server-sent event."""
    return b"data: " + payload + b"\n\n"
