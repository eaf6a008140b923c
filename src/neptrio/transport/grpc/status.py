"""Helpers for gRPC over HTTP/2: the headers and trailers of replies, timeouts, metadata."""

from __future__ import annotations

import binascii
from typing import Any

from grpclib.const import Status
from multidict import MultiDict

from neptrio.errors import InvalidArgument, TritonError
from neptrio.transport.grpc.message_stream import OK_HEADERS as OK_HEADERS
from neptrio.transport.grpc.message_stream import percent_encode
from neptrio.transport.http2.limits import CONTENT_TYPE, HEADERS_TOO_LARGE, METHOD, TE

OK_TRAILERS = [(b"grpc-status", b"0")]
UNITS_NS = {b"H": 3600 * 10**9, b"M": 60 * 10**9, b"S": 10**9, b"m": 10**6, b"u": 10**3, b"n": 1}
# TritonError.alike -> the trailers of all errors with that object
_TRAILERS_OF_ALIKE: dict[object, list[tuple[bytes, bytes]]] = {}
NOT_METADATA = ("te", "content-type", "user-agent")

# problem -> the answer to a request that is no gRPC call: HTTP status, gRPC status, text
PROBLEMS = {
    METHOD: (b"405", Status.UNKNOWN, "expected the POST method"),
    CONTENT_TYPE: (b"415", Status.UNKNOWN, "expected content-type application/grpc"),
    TE: (b"400", Status.UNKNOWN, "expected the header te: trailers"),
    HEADERS_TOO_LARGE: (b"200", Status.RESOURCE_EXHAUSTED, "the request's metadata is too large"),
}


def status_trailers(status: Status, message: str = "") -> list[tuple[bytes, bytes]]:
    """The trailers that end a call with a gRPC status."""
    trailers = [(b"grpc-status", b"%d" % status.value)]
    if message:
        trailers.append((b"grpc-message", percent_encode(message)))
    return trailers


def error_trailers(error: TritonError) -> list[tuple[bytes, bytes]]:
    """The trailers that end a call with an error."""
    if error.alike is None:
        return status_trailers(error.code.grpc, str(error))
    trailers = _TRAILERS_OF_ALIKE.get(error.alike)
    if trailers is None:
        trailers = _TRAILERS_OF_ALIKE[error.alike] = status_trailers(error.code.grpc, str(error))
    return trailers


def problem_headers(problem: int) -> list[tuple[bytes, bytes]]:
    """The headers of the whole reply to a request that is no gRPC call."""
    http, status, text = PROBLEMS[problem]
    return [(b":status", http), (b"content-type", b"application/grpc"), *status_trailers(status, text)]


def timeout_ns(value: bytes) -> int:
    """The nanoseconds of a grpc-timeout header. Raises InvalidArgument for a malformed one."""
    unit = UNITS_NS.get(value[-1:])
    if unit is None or not value[:-1].isdigit() or len(value) > 9:
        text = value.decode("latin-1")
        raise InvalidArgument(
            f"malformed grpc-timeout '{text}': expected 1 to 8 digits and one of the units H, M, S, m, u, n"
        )
    return int(value[:-1]) * unit


def decode_metadata(headers: list[tuple[bytes, bytes]]) -> Any:
    """Custom metadata as grpclib's MultiDict; values of -bin keys as bytes.

    Raises InvalidArgument when one of those is not base64.
    """
    found: Any = MultiDict()
    for name, value in headers:
        key = name.decode("latin-1")
        if key.startswith((":", "grpc-")) or key in NOT_METADATA:
            continue
        if not key.endswith("-bin"):
            found.add(key, value.decode("latin-1"))
            continue
        for part in value.split(b","):
            try:
                found.add(key, binascii.a2b_base64(part.strip() + b"=" * (-len(part.strip()) % 4)))
            except binascii.Error:
                raise InvalidArgument(f"the value of metadata '{key}' is not base64") from None
    return found
