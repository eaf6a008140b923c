"""Text that may come from bytes that are not UTF-8, as bytes and back.

A client may send bytes that are not UTF-8 wherever a JSON string stands. They pass through the server as lone
surrogates, made by Python's error handler `surrogateescape` (cext/codec/json_reader, rule 3). Other lone
surrogates, which stand for no bytes, can only come from a Python model or an embedding program.
"""

from __future__ import annotations


def text_bytes(text: str) -> bytes:
    """The bytes that `text` came from; never raises. Lone surrogates that stand for no bytes get their
    three-byte form."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def bytes_text(raw: bytes) -> str:
    """The text of a client's bytes; text_bytes() gives the same bytes back, UTF-8 or not. Never raises."""
    return raw.decode("utf-8", "surrogateescape")
