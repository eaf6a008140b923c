"""What a trace file says of a traced tensor: made on the trace writer's thread from a copy (observe.tensor_copy).

Source: docs/protocol/trace-file.md.
"""

from __future__ import annotations

from base64 import b64encode
from typing import Any

from neptrio import datatypes
from neptrio.codec.http_json import dump_json
from neptrio.limits import KEPT_PARAMETERS, LONGEST_VALUE, shown
from neptrio.observe.element_text import numbers_text, strings_text
from neptrio.observe.tensor_copy import TensorCopy
from neptrio.request.infer_request import InferRequest


def parameters_of(request: InferRequest) -> dict[str, Any]:
    """A request's options, under their names in the protocol: what a replay needs beside the tensors."""
    made: dict[str, Any] = {}
    if request.sequence_id:
        made["sequence_id"] = request.sequence_id
        made["sequence_start"], made["sequence_end"] = request.sequence_start, request.sequence_end
    if request.priority:
        made["priority"] = request.priority
    if request.timeout_us:
        made["timeout"] = request.timeout_us
    left = KEPT_PARAMETERS  # traces are kept when their requests have gone
    for name, value in (request.parameters or {}).items():
        kept = shown(value, LONGEST_VALUE) if isinstance(value, str) else value
        left -= len(name) + (len(kept) if isinstance(kept, str) else 8)
        if left < 0:
            break
        made[name] = kept
    return made


def tensor_text(copied: TensorCopy) -> tuple[bytes, bytes, bytes]:
    """The tensor as a JSON object with name, data (comma-joined text), shape and dtype: what is before its data, the
    data, which may be large, and what is after it.

    Of a tensor larger than the limit there are the elements that fit: `shape` is their number, and
    `truncated_from` the tensor's shape. BF16 is written as FP32, which holds all its values. BYTES elements that
    are not UTF-8 cannot be recovered from their text: then `base64` holds the elements as on the wire.

    It is made once: of most tensors there are two objects, as they were queued and as the model got them.
    """
    if copied.text is None:
        copied.make()
        copied.text = _text(copied)
    return copied.text


def _text(copied: TensorCopy) -> tuple[bytes, bytes, bytes]:
    dtype, raw, data = copied.dtype, copied.raw, b""
    shape = ",".join(map(str, copied.shape))
    after: dict[str, Any] = {"shape": shape, "dtype": datatypes.NAME[dtype]}
    if raw is None:
        after["omitted"] = copied.omitted
    else:
        if dtype == datatypes.BYTES:
            data, count, end, is_text = strings_text(raw)
            if not is_text:
                after["base64"] = b64encode(memoryview(raw)[:end]).decode()
        else:
            data = numbers_text(raw, dtype)
            count = len(raw) // datatypes.ITEM_SIZE[dtype]
            if dtype == datatypes.BF16:
                after["dtype"], after["source_dtype"] = "FP32", "BF16"
        if copied.nbytes > len(raw):
            after["truncated_from"], after["shape"] = shape, str(count)
    return dump_json({"name": copied.name})[:-1] + b',"data":"', data, b'",' + dump_json(after)[1:]
