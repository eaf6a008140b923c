"""The error for a response that a model could make, and that a message cannot carry: halves of surrogate pairs in its texts, and
over gRPC integers beyond 64 bits.

It is one error, whatever carries the response: it names the model and what it has to put right. Which text it was is found out
only here, behind the codec that has failed, so that others do not pay for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from neptrio.errors import Code, Reason, TritonError
from neptrio.foreign import valid
from neptrio.limits import shown
from neptrio.request.infer_request import InferResponse


def unsendable(response: InferResponse, error: Exception, handler: str = "strict") -> TritonError:
    """The error for a response that could not be encoded because of `error`, an OverflowError or UnicodeEncodeError. `handler`:
    that of the codec; `surrogateescape` carries bytes that are no UTF-8."""
    way, what = "", ""
    if isinstance(error, OverflowError):
        way, what = " over gRPC", f"{_integer(response)} is an integer beyond 64 bits"
    else:
        for whose, text in _texts(response):
            try:
                text.encode("utf-8", handler)
            except UnicodeEncodeError as found:
                half = valid(text[found.start])
                what = f"{whose} is not valid Unicode: '{half}' at position {found.start} is half of a surrogate pair"
                break
    return TritonError(
        f"the response of model '{valid(response.model_name or '')}' cannot be sent{way}: {what or error}",
        Code.INTERNAL,
        Reason.BACKEND,
    )


def _named(name: str) -> str:
    return f"'{shown(valid(name))}'"


def _integer(response: InferResponse) -> str:
    for name, value in (response.parameters or {}).items():
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return f"parameter {_named(name)}"
    return "a parameter"


def _texts(response: InferResponse) -> Iterator[tuple[str, str]]:
    """What each text of a response is, and the text."""
    for name, value in (response.parameters or {}).items():
        yield f"the name of parameter {_named(name)}", name
        for text in _within(value):
            yield f"parameter {_named(name)}", text
    for output in response.outputs or ():
        yield f"the name of output {_named(output.name)}", output.name
    yield "its id", response.id or ""
    yield "its version", response.model_version or ""
    yield "its model's name", response.model_name or ""


def _within(value: Any) -> Iterator[str]:
    """The texts of a parameter: a program that embeds the server may give more than one."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield str(key)
            yield from _within(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _within(item)
