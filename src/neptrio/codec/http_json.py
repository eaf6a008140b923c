"""JSON for the REST front: control documents here, infer bodies in cext/codec/json_request and json_response."""

from __future__ import annotations

import json
from typing import Any

import orjson

from neptrio.codec.json_reader import kind_error, load
from neptrio.codec.json_request import decode_request
from neptrio.codec.json_response import encode_response
from neptrio.codec.json_writer import dump

HEADER_LENGTH = b"inference-header-content-length"

load_json = load


def dump_json(value: Any) -> bytes:
    """Compact JSON. Text that is not valid Unicode is written as the bytes it came from; half a
    surrogate pair, which came from no bytes, as a question mark."""
    try:
        return orjson.dumps(value)
    except TypeError:
        pass
    try:
        return dump(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


__all__ = ["HEADER_LENGTH", "decode_request", "dump_json", "encode_response", "kind_error", "load_json"]
