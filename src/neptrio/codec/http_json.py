"""JSON for the control routes of REST. Infer bodies are in cext/codec/json_request and json_response."""

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
    """`value` as compact JSON.

    Text that came from bytes that are not UTF-8 is written as those bytes (codec/text.py). A lone surrogate that
    came from no bytes becomes a question mark.
    """
    try:
        return orjson.dumps(value)
    except TypeError:
        pass
    try:
        return dump(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


__all__ = ["HEADER_LENGTH", "decode_request", "dump_json", "encode_response", "kind_error", "load_json"]
