"""The table of errors: class, HTTP status, gRPC status.

Everything that the server refuses or that fails is a TritonError with a Code. Errors of other libraries are
converted to one where they appear (in a backend, in a codec) and nowhere else.
Source: docs/protocol/features.md A1 and A2, with the first deviation of docs/protocol/README.md: a malformed
request is INVALID_ARGUMENT, not INTERNAL.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import Enum
from itertools import islice

from grpclib.const import Status

from neptrio.foreign import text_of, type_name
from neptrio.limits import LONGEST_ERROR, shown

MOST_NAMES = 100  # compared with a wrong one: comparing all would be work that anybody can ask for
LONGEST_COMPARED = 64


def meant(word: str, known: Iterable[str]) -> str:
    """What follows the text about an unknown name: the nearest of those that there are, "" where none is near.

    Upper and lower case are alike here. Not for names that clients have encoded, whose mistake is another one.
    """
    if len(word) > LONGEST_COMPARED or "%" in word:
        return ""
    short = (name for name in known if len(name) <= LONGEST_COMPARED)
    names = {name.lower(): name for name in islice(short, MOST_NAMES)}
    near = difflib.get_close_matches(word.lower(), list(names), 1, 0.6)
    return f", did you mean '{names[near[0]]}'?" if near else ""


class Code(Enum):
    """Triton's error codes: (name on the wire, HTTP status, gRPC status)."""

    UNKNOWN = ("Unknown", 400, Status.UNKNOWN)
    INTERNAL = ("Internal", 500, Status.INTERNAL)
    NOT_FOUND = ("Not found", 404, Status.NOT_FOUND)
    INVALID_ARG = ("Invalid argument", 400, Status.INVALID_ARGUMENT)
    # a version that a request names and that is neither a number nor a label: over HTTP a Triton server has no such path
    NO_LABEL = ("Invalid argument", 404, Status.INVALID_ARGUMENT)
    UNAVAILABLE = ("Unavailable", 503, Status.UNAVAILABLE)
    UNSUPPORTED = ("Unsupported", 501, Status.UNIMPLEMENTED)
    ALREADY_EXISTS = ("Already exists", 400, Status.ALREADY_EXISTS)
    CANCELLED = ("Cancelled", 400, Status.CANCELLED)
    DEADLINE = ("Deadline exceeded", 400, Status.DEADLINE_EXCEEDED)
    TIMED_OUT = (
        "Deadline exceeded",
        504,
        Status.DEADLINE_EXCEEDED,
    )  # a limit of the server, not the client's mistake
    RESOURCE_EXHAUSTED = ("Resource exhausted", 413, Status.RESOURCE_EXHAUSTED)
    FORBIDDEN = ("Forbidden", 403, Status.UNAVAILABLE)  # what a Triton server answers at restricted endpoints
    UNAUTHENTICATED = ("Unauthenticated", 401, Status.UNAUTHENTICATED)
    TOO_MANY = ("Too many requests", 429, Status.RESOURCE_EXHAUSTED)
    DENIED = ("Permission denied", 403, Status.PERMISSION_DENIED)

    def __init__(self, title: str, http: int, grpc: Status) -> None:
        self.title = title
        self.http = http
        self.grpc = grpc


class Reason(Enum):
    """Why a request failed: the label of the failure metric (docs/protocol/rules.md E3.11)."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class TritonError(Exception):
    """An error, with the code and the message that the client gets."""

    code = Code.UNKNOWN
    # Errors with the same object here have the same code and text, so a transport may encode the first and reuse
    # that for the others. It is set for errors that come by the thousand (queue full), and only to objects of
    # modules, so that transports keep few encodings.
    alike: object = None
    logged = False  # the log has it already: whoever else meets it need not say it again
    # headers of the HTTP answer, in addition to those of every error
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(self, message: str, code: Code | None = None, reason: Reason = Reason.OTHER) -> None:
        if len(message) > LONGEST_ERROR:  # whatever it quotes, an answer is no copy of what was sent
            message = shown(message, LONGEST_ERROR)
        super().__init__(message)
        self.message = message
        self.reason = reason
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        return self.message


def settled(error: TritonError) -> TritonError:
    """The error that code of others has raised, such that its text, code and reason are what the server takes them for: in
    place where its class is one of ours, else a new one of the class that its code has."""
    made = error
    try:
        message, code, reason = error.message, error.code, error.reason
    except BaseException:  # the class may say anything
        message, code, reason = text_of(error), Code.INTERNAL, Reason.OTHER
    code = code if type(code) is Code else Code.INTERNAL
    if globals().get(type_name(error)) is not type(error):
        made = CLASSES.get(code, TritonError)(text_of(error))
    else:
        made.message = text_of(message)
    made.code = code
    made.reason = reason if type(reason) is Reason else Reason.OTHER
    return made


def raise_it(error: BaseException | None) -> None:
    """Raises `error`, unless it is None. For errors that were made or caught elsewhere.

    A variable of a function that raises what it holds makes a cycle, as the error's traceback holds the function's frame
    and with it all its variables: the request, its body, the connection. So callers pass the error without keeping it.
    """
    if error is not None:
        try:
            raise error
        finally:
            del error


class InvalidArgument(TritonError):
    """The request is wrong; sending it again will fail again."""

    code = Code.INVALID_ARG


class Unauthenticated(TritonError):
    """The client sent no token, or one that is not valid."""

    code = Code.UNAUTHENTICATED
    headers = ((b"www-authenticate", b"Bearer"),)


class Denied(TritonError):
    """The server does not do this for this client, or for no client over the network."""

    code = Code.DENIED


class NotFound(TritonError):
    """There is no such model, version, region or route."""

    code = Code.NOT_FOUND


class Unavailable(TritonError):
    """The server cannot do this now: not ready, queue full, timed out, shutting down."""

    code = Code.UNAVAILABLE


class Overloaded(Unavailable):
    """The server has too much to do; the answer says when to try again."""

    headers = ((b"retry-after", b"5"),)


class TooManyRequests(TritonError):
    """This client sends too many requests, per second or at once; other clients are served."""

    code = Code.TOO_MANY
    headers = ((b"retry-after", b"1"),)


class Unsupported(TritonError):
    """This server, or any Triton server, does not support this combination."""

    code = Code.UNSUPPORTED


class UnsupportedEncoding(Unsupported):
    """Bodies may not have this Content-Encoding; the answer names those that they may have."""

    headers = ((b"accept-encoding", b"gzip, deflate"),)


class Internal(TritonError):
    """The model or the server failed."""

    code = Code.INTERNAL


class Killed(Internal):
    """The model's process was ended from outside, which is no fault of the model."""


class NotBegun(Internal):
    """The instance could not begin the batch: its requests are as they came, and may be executed by another."""


class AlreadyExists(TritonError):
    """Something with this name exists already."""

    code = Code.ALREADY_EXISTS


class Cancelled(TritonError):
    """The client went away or cancelled the request."""

    code = Code.CANCELLED

    def __init__(self, message: str = "request cancelled") -> None:
        super().__init__(message, reason=Reason.CANCELED)


# the class of a code, for errors that come as a code and a text
CLASSES: dict[Code, type[TritonError]] = {
    made.code: made
    for made in (InvalidArgument, Denied, NotFound, Unavailable, Unsupported, Internal, AlreadyExists)
}


def bare(error: TritonError) -> TritonError:
    """The error, from now on without traceback and causes. These refer to all that the frames on its way have held, a whole
    model, and where the error is kept also to itself: only the collector would free it."""
    chain: list[BaseException | None] = [error]
    while chain:
        link = chain.pop()
        if link is not None:
            chain += [link.__cause__, link.__context__]
            link.__traceback__ = link.__cause__ = link.__context__ = None
    return error
