"""gzip and deflate (zlib format) bodies: bounded when they come in, negotiated when they go out.

Source: spec/observed.md 4. An undecodable body is an error here, not an empty body.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from neptrio.errors import Code, InvalidArgument, TritonError, Unsupported

WINDOW_BITS = {"gzip": 31, "deflate": 15}


def too_large(limit: int) -> TritonError:
    """The refusal of a body over --http-max-input-size, compressed or not."""
    return TritonError(
        f"request body exceeds the limit of {limit} bytes. Use --http-max-input-size to increase the limit.",
        Code.RESOURCE_EXHAUSTED,
    )


def decompress(encoding: str, body: Any, limit: int) -> Any:
    """The plain body; never more than `limit` bytes are made.

    Raises Unsupported for an unknown encoding, InvalidArgument for undecodable or cut-off data,
    TritonError (413) over the limit.
    """
    if encoding in ("", "identity"):
        return body
    bits = WINDOW_BITS.get(encoding)
    if bits is None:
        raise Unsupported("Unsupported compression type")
    plain = bytearray()
    data: Any = body
    while True:
        decoder = zlib.decompressobj(bits)
        try:
            part = decoder.decompress(data, limit + 1 - len(plain))
        except zlib.error as error:
            raise InvalidArgument(f"failed to decompress the {encoding} request body: {error}") from None
        plain += part
        if len(plain) > limit:
            raise too_large(limit)
        if not decoder.eof:
            raise InvalidArgument(
                f"failed to decompress the {encoding} request body: it ends before the compressed data does"
            )
        data = decoder.unused_data
        if not data:
            return plain
        if encoding != "gzip":
            raise InvalidArgument(
                f"failed to decompress the {encoding} request body: {len(data)} bytes follow the compressed data"
            )


def compress(encoding: str, parts: Iterable[Any]) -> bytes:
    """The buffers, one after the other, as one compressed body."""
    encoder = zlib.compressobj(6, zlib.DEFLATED, WINDOW_BITS[encoding])
    out = [encoder.compress(part) for part in parts]
    out.append(encoder.flush())
    return b"".join(out)


@lru_cache(256)
def negotiate(accept: bytes) -> str:
    """What an Accept-Encoding header asks for: "gzip", "deflate" or "" (identity).

    The highest q wins, the first listed on ties; names are case-sensitive and `*` means nothing,
    as in the observed server.
    """
    best, best_q = "", 0.0
    for item in accept.decode("latin-1").split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if name not in ("gzip", "deflate", "identity"):
            continue
        q = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                try:
                    q = float(value)
                except ValueError:
                    q = 0.0
        if q > best_q:
            best, best_q = name, q
    return "" if best == "identity" else best
