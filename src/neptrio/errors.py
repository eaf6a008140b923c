"""The one error table: class, HTTP status, gRPC status.

Everything the server refuses or fails is a TritonError with a Code. Foreign exceptions are
mapped to one at the edge where they appear (a backend, a codec) and nowhere else.
Source: docs/protocol/features.md A1 and A2, with the first deviation of docs/protocol/README.md: a malformed
request is INVALID_ARGUMENT, not INTERNAL.
"""

from __future__ import annotations

from enum import Enum

from grpclib.const import Status


class Code(Enum):
    """Triton's error codes: (name on the wire, HTTP status, gRPC status)."""

    UNKNOWN = ("Unknown", 400, Status.UNKNOWN)
    INTERNAL = ("Internal", 500, Status.INTERNAL)
    NOT_FOUND = ("Not found", 404, Status.NOT_FOUND)
    INVALID_ARG = ("Invalid argument", 400, Status.INVALID_ARGUMENT)
    UNAVAILABLE = ("Unavailable", 503, Status.UNAVAILABLE)
    UNSUPPORTED = ("Unsupported", 501, Status.UNIMPLEMENTED)
    ALREADY_EXISTS = ("Already exists", 400, Status.ALREADY_EXISTS)
    CANCELLED = ("Cancelled", 400, Status.CANCELLED)
    DEADLINE = ("Deadline exceeded", 400, Status.DEADLINE_EXCEEDED)
    TIMED_OUT = (
        "Deadline exceeded",
        504,
        Status.DEADLINE_EXCEEDED,
    )  # the server's own limit, not the client's
    RESOURCE_EXHAUSTED = ("Resource exhausted", 413, Status.RESOURCE_EXHAUSTED)
    FORBIDDEN = ("Forbidden", 403, Status.UNAVAILABLE)  # a Triton server's code for restricted endpoints
    UNAUTHENTICATED = ("Unauthenticated", 401, Status.UNAUTHENTICATED)
    TOO_MANY = ("Too many requests", 429, Status.RESOURCE_EXHAUSTED)
    DENIED = ("Permission denied", 403, Status.PERMISSION_DENIED)

    def __init__(self, title: str, http: int, grpc: Status) -> None:
        self.title = title
        self.http = http
        self.grpc = grpc


class Reason(Enum):
    """Why a request failed, as the failure metric labels it (docs/protocol/rules.md E3.11)."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class TritonError(Exception):
    """An error with the code a client sees and the message it is told."""

    code = Code.UNKNOWN
    # Errors with the same object here have the same code and the same text: who encodes one may keep the
    # encoding for the others. For errors that come by the thousand (a full queue); only constants of modules
    # are put here, so whoever keeps encodings by it keeps few.
    alike: object = None
    # of its answer over HTTP, beside those of every error
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(self, message: str, code: Code | None = None, reason: Reason = Reason.OTHER) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return self.message


class InvalidArgument(TritonError):
    """The request is wrong; sending it again will not help."""

    code = Code.INVALID_ARG


class Unauthenticated(TritonError):
    """Nobody known asks: without a token, or with one that is not valid."""

    code = Code.UNAUTHENTICATED
    headers = ((b"www-authenticate", b"Bearer"),)


class Denied(TritonError):
    """The server does not do that for this client, or for nobody over the network."""

    code = Code.DENIED


class NotFound(TritonError):
    """No such model, version, region or route."""

    code = Code.NOT_FOUND


class Unavailable(TritonError):
    """Not now: not ready, queue full, timed out, shutting down."""

    code = Code.UNAVAILABLE


class Overloaded(Unavailable):
    """Too much is under way; the answer says when to try again."""

    headers = ((b"retry-after", b"5"),)


class TooManyRequests(TritonError):
    """Of this client, in this second or at once; others are served."""

    code = Code.TOO_MANY
    headers = ((b"retry-after", b"1"),)


class Unsupported(TritonError):
    """A combination this server (or any Triton server) does not serve."""

    code = Code.UNSUPPORTED


class UnsupportedEncoding(Unsupported):
    """A compression that bodies may not have; the answer names those that they may have."""

    headers = ((b"accept-encoding", b"gzip, deflate"),)


class Internal(TritonError):
    """The model or the server failed."""

    code = Code.INTERNAL


class AlreadyExists(TritonError):
    """A name that is taken."""

    code = Code.ALREADY_EXISTS


class Cancelled(TritonError):
    """The caller went away or asked for it."""

    code = Code.CANCELLED

    def __init__(self, message: str = "request cancelled") -> None:
        super().__init__(message, reason=Reason.CANCELED)
