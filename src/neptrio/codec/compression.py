"""gzip and deflate (zlib format) for HTTP bodies: requests are inflated up to a limit, responses compressed on demand.

Source: docs/protocol/observed.md 4. Unlike there, a request body that cannot be inflated is an error here, not
an empty body.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from neptrio.codec.inflate import Deflater, Inflater, TooLong, Undecodable
from neptrio.errors import Code, InvalidArgument, TritonError, UnsupportedEncoding
from neptrio.limits import remember

WINDOW_BITS = {"gzip": 31, "deflate": 15}
LEVEL = 6
MOST_NEGOTIATED = 256  # that are remembered


def too_large(limit: int, of_port: bool = True) -> TritonError:
    """The error for a body larger than --http-max-input-size, compressed or inflated; without `of_port` for one that is
    larger than its verb takes."""
    if not of_port:
        return TritonError(
            f"request body exceeds the limit of {limit} bytes for this verb.", Code.RESOURCE_EXHAUSTED
        )
    return TritonError(
        f"request body exceeds the limit of {limit} bytes. Use --http-max-input-size to increase the limit.",
        Code.RESOURCE_EXHAUSTED,
    )


def inflater(encoding: str, body: Any, limit: int) -> Inflater | None:
    """An Inflater for a body with this Content-Encoding; None when it is not compressed. Raises UnsupportedEncoding."""
    if encoding in ("", "identity"):
        return None
    bits = WINDOW_BITS.get(encoding)
    if bits is None:
        raise UnsupportedEncoding("Unsupported compression type")
    return Inflater(bits, body, limit, members=encoding == "gzip")


def refusal(encoding: str, limit: int, error: Undecodable | TooLong) -> TritonError:
    """The error for a body that cannot be inflated: 400, or 413 when its content exceeds the limit."""
    if isinstance(error, TooLong):
        return too_large(limit)
    return InvalidArgument(f"failed to decompress the {encoding} request body: {error}")


def deflater(encoding: str, parts: Iterable[Any]) -> Deflater:
    """A Deflater that compresses a response's buffers into one body."""
    return Deflater(WINDOW_BITS[encoding], LEVEL, parts)


_negotiated: dict[bytes, str] = {}  # the header -> the encoding


def negotiate(accept: bytes) -> str:
    """_preferred(), remembered: clients send few such headers, again and again."""
    found = _negotiated.get(accept)
    if found is None:
        found = _preferred(accept)
        remember(_negotiated, accept, found, MOST_NEGOTIATED)
    return found


def _preferred(accept: bytes) -> str:
    """The encoding that an Accept-Encoding header prefers: "gzip", "deflate" or "" for no compression.

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
