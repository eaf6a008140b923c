"""Which sequence a request belongs to, read from its bytes without decoding the rest.

A key is text: the model's name, and the correlation id with its type, because 7 and "7" are different sequences.
Requests that are malformed have no key: whoever executes them says what is wrong with them.
"""

from __future__ import annotations

import zlib
from typing import Any

from neptrio.codec.http_json import load_json
from neptrio.errors import TritonError

NAME = b"sequence_id"
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protobuf


def key(model: str, sequence_id: int | str) -> str:
    """The key of a model's sequence."""
    return f"{model}\n{'s' if isinstance(sequence_id, str) else 'u'}{sequence_id}"


def parsed(text: str) -> tuple[str, int | str]:
    """Model and correlation id of a key."""
    model, _, rest = text.partition("\n")
    return model, rest[1:] if rest[0] == "s" else int(rest[1:])


def of_json(model: str, body: bytes, header_length: int | None = None) -> str:
    """The key of an infer request over REST, "" if it belongs to no sequence.

    `body` is not compressed; `header_length` is what Inference-Header-Content-Length says.
    """
    text = body if header_length is None else body[:header_length]
    if NAME not in text:
        return ""
    try:
        document = load_json(text)
    except TritonError:
        return ""
    parameters = document.get("parameters") if isinstance(document, dict) else None
    return _checked(model, parameters.get("sequence_id") if isinstance(parameters, dict) else None)


def _checked(model: str, found: Any) -> str:
    if isinstance(found, bool) or not isinstance(found, (int, str)) or not found:
        return ""
    return key(model, found)


def inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """At most `limit` bytes of a body with Content-Encoding gzip or deflate; b"" if it is neither."""
    window = {"gzip": 31, "deflate": 15}.get(encoding.strip().lower())
    if window is None:
        return b""
    try:
        return zlib.decompressobj(window).decompress(body, limit)
    except zlib.error:
        return b""


def of_message(message: bytes) -> str:
    """The key of a ModelInferRequest as it is on the wire, "" if it belongs to no sequence."""
    if NAME not in message:
        return ""
    model, found = "", None
    try:
        for number, value in _fields(message):
            if number == 1 and isinstance(value, bytes):
                model = value.decode()
            elif number == 4 and isinstance(value, bytes):
                entry = dict(_fields(value))
                if entry.get(1) == NAME and isinstance(entry.get(2), bytes):
                    found = _parameter(entry[2])
    except (ValueError, IndexError):
        return ""
    return _checked(model, found)


def _parameter(message: Any) -> int | str | None:
    """The value of an InferParameter that may be a correlation id."""
    found: int | str | None = None
    for number, value in _fields(message):
        if number in (2, 5) and isinstance(value, int):
            found = value
        elif number == 3 and isinstance(value, bytes):
            found = value.decode()
    return found


def _fields(message: bytes) -> Any:
    """The fields of a protobuf message: numbers, and bytes or integers. Raises ValueError, IndexError."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == VARINT:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif kind == BYTES:
            size, at = _varint(message, at)
            if at + size > len(message):
                raise ValueError("a field is cut off")
            if tag >> 3 in (1, 2, 3, 4):  # others may be large, and are not looked at
                yield tag >> 3, message[at : at + size]
            at += size
        elif kind in (FIXED64, FIXED32):
            at += 8 if kind == FIXED64 else 4
        else:
            raise ValueError(f"wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
