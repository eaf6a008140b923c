"""Text that need not be valid Unicode, as bytes and back.

A client may send bytes that are not UTF-8 wherever a JSON string stands; they pass through the house as
what `surrogateescape` makes of them (cext/codec/json_reader, rule 3). Halves of surrogate pairs that came from
no bytes can only come from a Python model or an embedding program.
"""

from __future__ import annotations


def text_bytes(text: str) -> bytes:
    """The bytes that `text` came from; never raises. Halves of pairs that came from none have their
    three-byte form."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "surrogatepass")


def bytes_text(raw: bytes) -> str:
    """The text of a client's bytes; what is not UTF-8 survives until text_bytes(). Never raises."""
    return raw.decode("utf-8", "surrogateescape")
