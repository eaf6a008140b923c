"""An infer body decoded slowly and obviously, on Python objects: what cext/codec/json_request is compared with.

Independent of the code under test but for the error texts.
"""

from __future__ import annotations

import json
import math
import struct
from typing import Any

SIZES = {
    "BOOL": 1, "UINT8": 1, "UINT16": 2, "UINT32": 4, "UINT64": 8,
    "INT8": 1, "INT16": 2, "INT32": 4, "INT64": 8, "FP32": 4, "FP64": 8,
}  # fmt: skip
CODES = {
    "BOOL": "?", "UINT8": "B", "UINT16": "H", "UINT32": "I", "UINT64": "Q",
    "INT8": "b", "INT16": "h", "INT32": "i", "INT64": "q", "FP32": "f", "FP64": "d",
}  # fmt: skip


class Refused(Exception):
    """The reference refuses the request."""


def first_wins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        found.setdefault(key, value)
    return found


def flatten(data: Any) -> list[Any]:
    return [leaf for item in data for leaf in flatten(item)] if isinstance(data, list) else [data]


def element(datatype: str, value: Any) -> bytes:
    if datatype == "BYTES":
        if not isinstance(value, str):
            raise Refused
        raw = value.encode("utf-8", "surrogateescape")
        return struct.pack("<I", len(raw)) + raw
    if datatype == "BOOL":
        if not isinstance(value, bool):
            raise Refused
    elif isinstance(value, bool) or not isinstance(value, (int, float) if "FP" in datatype else int):
        raise Refused
    try:
        return struct.pack("<" + CODES[datatype], value)
    except struct.error:
        raise Refused from None
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def decode(body: bytes) -> dict[str, Any]:
    """{"id", "inputs": [(name, datatype, shape, bytes)], "outputs": [(name, binary, k)] or None}."""
    try:
        document = json.loads(body.decode("utf-8", "surrogateescape"), object_pairs_hook=first_wins)
    except (ValueError, RecursionError):
        raise Refused from None
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        raise Refused
    if not isinstance(document.get("id", ""), str):
        raise Refused
    inputs = []
    for item in document["inputs"]:
        if not isinstance(item, dict) or "data" not in item:
            raise Refused
        name, datatype, shape = item.get("name"), item.get("datatype"), item.get("shape")
        if not isinstance(name, str) or not isinstance(datatype, str):
            raise Refused
        if datatype not in SIZES and datatype != "BYTES":
            raise Refused
        if not isinstance(shape, list) or not isinstance(item["data"], list):
            raise Refused
        for d in shape:
            if isinstance(d, bool) or not isinstance(d, int) or not 0 <= d < 1 << 63:
                raise Refused
        flat = flatten(item["data"])
        if len(flat) != math.prod(shape):
            raise Refused
        inputs.append((name, datatype, tuple(shape), b"".join(element(datatype, v) for v in flat)))
    outputs = document.get("outputs", [])
    if not isinstance(outputs, list):
        raise Refused
    wanted: list[tuple[str, int, int]] = []  # one that is named twice is refused by who validates
    for item in outputs:
        if not isinstance(item, dict) or not isinstance(item.get("name"), str):
            raise Refused
        parameters = item.get("parameters")
        parameters = parameters if isinstance(parameters, dict) else {}
        binary, k = parameters.get("binary_data", False), parameters.get("classification", 0)
        if not isinstance(binary, bool) or isinstance(k, bool) or not isinstance(k, int) or k < 0:
            raise Refused
        wanted.append((item["name"], int(binary), k))
    return {"id": document.get("id", ""), "inputs": inputs, "outputs": wanted or None}
