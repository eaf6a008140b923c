"""TritonError, the error in a response, and TritonModelException, which models and this module raise."""

from __future__ import annotations

from ._foreign import text_of


class TritonError:
    """An error of one response: a message and a code that becomes an HTTP or gRPC status."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    __slots__ = ("_code", "_message")

    def __init__(self, message: str = "", code: int = INTERNAL) -> None:
        if not isinstance(code, int) or not 0 <= code <= 7:
            raise TritonModelException(
                f"TritonError code must be one of its constants (0 to 7), got {code!r}"
            )
        self._message = text_of(message)
        self._code = int(code)

    def message(self) -> str:
        """The text that the client gets."""
        return self._message

    def code(self) -> int:
        """One of the constants of this class."""
        return self._code

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, code={self._code})"

    def __str__(self) -> str:
        return self._message


class TritonModelException(Exception):
    """Raised by this module for wrong use, and by models that want to fail a whole execution."""
