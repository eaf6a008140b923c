"""TritonError, the error in a response, and TritonModelException, which models and this module raise."""

from __future__ import annotations

from enum import IntEnum

from . import _checks
from ._foreign import valid


class ErrorCode(IntEnum):
    """The code of a TritonError."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7


class TritonError:
    """An error of one response: a message and a code that becomes an HTTP or gRPC status."""

    UNKNOWN = ErrorCode.UNKNOWN
    INTERNAL = ErrorCode.INTERNAL
    NOT_FOUND = ErrorCode.NOT_FOUND
    INVALID_ARG = ErrorCode.INVALID_ARG
    UNAVAILABLE = ErrorCode.UNAVAILABLE
    UNSUPPORTED = ErrorCode.UNSUPPORTED
    ALREADY_EXISTS = ErrorCode.ALREADY_EXISTS
    CANCELLED = ErrorCode.CANCELLED

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        self._message = valid(_checks.text(message, "message of TritonError"))
        self._code = _checks.member(code, ErrorCode, "code of TritonError", "TritonError")

    def message(self) -> str:
        """The text that the client gets."""
        return self._message

    def code(self) -> ErrorCode:
        """One of the constants of this class."""
        return self._code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, code={int(self._code)})"

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by this module for wrong use, and by models that want to fail a whole execution."""

    _number: int = ErrorCode.INTERNAL  # the server's, where it is the server that refused
