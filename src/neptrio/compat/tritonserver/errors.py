"""The interface's exceptions: each is a neptrio.TritonError too, with its code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from neptrio import errors
from neptrio.errors import Code


class TritonError(errors.TritonError):
    """What the server or a model refuses, or fails at. Of a model's response, `args[1]` is the InferenceResponse."""


class UnknownError(TritonError):
    """An error without a class."""

    code = Code.UNKNOWN


class InternalError(TritonError):
    """The server or the model failed."""

    code = Code.INTERNAL


class NotFoundError(TritonError):
    """There is no such model, version or file."""

    code = Code.NOT_FOUND


class InvalidArgumentError(TritonError):
    """The request or the option is wrong."""

    code = Code.INVALID_ARG


class UnavailableError(TritonError):
    """Not now: not ready, queue full, timed out, shutting down."""

    code = Code.UNAVAILABLE


class UnsupportedError(TritonError):
    """This server does not do that."""

    code = Code.UNSUPPORTED


class AlreadyExistsError(TritonError):
    """Something with this name exists already."""

    code = Code.ALREADY_EXISTS


_CLASSES: dict[Code, type[TritonError]] = {
    made.code: made
    for made in (
        UnknownError,
        InternalError,
        NotFoundError,
        InvalidArgumentError,
        UnavailableError,
        UnsupportedError,
        AlreadyExistsError,
    )
}
# codes that the interface has no class for, where another one means the same to a caller
_CLASSES |= dict.fromkeys((Code.TIMED_OUT, Code.RESOURCE_EXHAUSTED, Code.TOO_MANY), UnavailableError)


def converted(error: errors.TritonError) -> TritonError:
    """The same error as one of this interface's. Its code stays."""
    if isinstance(error, TritonError):
        return error
    return _CLASSES.get(error.code, TritonError)(str(error), error.code, error.reason)


@contextmanager
def converting() -> Iterator[None]:
    """Raises errors of the server inside as this interface's."""
    try:
        yield
    except errors.TritonError as error:
        raise converted(error) from error.__cause__
