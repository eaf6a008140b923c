"""The one error table: class, HTTP status, gRPC status.

Everything the server refuses or fails is a TritonError with a Code. Foreign exceptions are
mapped to one at the edge where they appear (a backend, a codec) and nowhere else.
Source: spec/features.md A1 and A2, with the first deviation of spec/README.md: a malformed
request is INVALID_ARGUMENT, not INTERNAL.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

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
    RESOURCE_EXHAUSTED = ("Resource exhausted", 413, Status.RESOURCE_EXHAUSTED)
    FORBIDDEN = ("Forbidden", 403, Status.UNAVAILABLE)

    def __init__(self, title: str, http: int, grpc: Status) -> None:
        self.title = title
        self.http = http
        self.grpc = grpc


class Reason(Enum):
    """Why a request failed, as the failure metric labels it (spec/rules.md E3.11)."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class TritonError(Exception):
    """An error with the code a client sees and the message it is told."""

    code = Code.UNKNOWN
    # its encoded answers, shared by errors that say the same and come by the thousand (a full queue)
    answers: dict[Any, Any] | None = None

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


class NotFound(TritonError):
    """No such model, version, region or route."""

    code = Code.NOT_FOUND


class Unavailable(TritonError):
    """Not now: not ready, queue full, timed out, shutting down."""

    code = Code.UNAVAILABLE


class Unsupported(TritonError):
    """A combination this server (or any Triton server) does not serve."""

    code = Code.UNSUPPORTED


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
