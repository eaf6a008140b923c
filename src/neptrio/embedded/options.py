"""What a caller may say of a request beside its inputs, and how a request is made of that."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

from neptrio.embedded.response import Wanted, tensors
from neptrio.embedded.spelled_out import spelled_out
from neptrio.errors import InvalidArgument
from neptrio.foreign import type_name
from neptrio.request.infer_request import InferRequest, RequestedOutput


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of the requests of a sequence, all of them optional.

    outputs: names of the outputs wanted (None: all)
    timeout: seconds until the call fails with Code.DEADLINE and the request is cancelled (None: any number)
    queue_timeout_us: microseconds that the request may wait in the queue, where the model's queue policy allows
    priority: 1 is the highest, 0 the model's default
    request_id: shown in traces and logs, and returned
    parameters: custom parameters for the model: bool, int, float or str
    """

    outputs: Sequence[str] | None
    timeout: float | None
    queue_timeout_us: int
    priority: int
    request_id: str
    parameters: Mapping[str, bool | int | float | str] | None


class InferOptions(RequestOptions, total=False):
    """Keyword arguments of infer(), stream() and infer_each(), all of them optional: those of RequestOptions, and

    sequence_id, sequence_start, sequence_end: for stateful models; model.sequence() does this for you
    """

    sequence_id: int | str
    sequence_start: bool
    sequence_end: bool


NOTHING: dict[str, Any] = {
    "outputs": None,
    "timeout": None,
    "queue_timeout_us": 0,
    "priority": 0,
    "request_id": "",
    "parameters": None,
    "sequence_id": 0,
    "sequence_start": False,
    "sequence_end": False,
}
takes_infer_options = spelled_out(InferOptions, NOTHING)
takes_request_options = spelled_out(RequestOptions, NOTHING)


# option -> the types that it may have
KINDS: dict[str, tuple[type, ...]] = {
    "outputs": (list, tuple, set, frozenset, Mapping),
    "queue_timeout_us": (Integral,),
    "priority": (Integral,),
    "request_id": (str,),
    "parameters": (Mapping,),
    "sequence_start": (bool,),
    "sequence_end": (bool,),
}


def _check(what: str, value: Any, kinds: tuple[type, ...]) -> None:
    """Raises InvalidArgument for a value of another type; a bool is no number."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        names = " or ".join("int" if kind is Integral else kind.__name__ for kind in kinds)
        raise InvalidArgument(f"{what}: expected {names}, got {type_name(value)}")


def checked_timeout(options: InferOptions) -> float | None:
    """The seconds that a call may take, None for any number. Raises InvalidArgument."""
    seconds = options.get("timeout")
    if seconds is None:
        return None
    if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise InvalidArgument(f"timeout must be a number of seconds >= 0, got {seconds!r}")
    return float(seconds)


def new_request(
    name: str, version: str, inputs: Mapping[str, Any], wanted: Mapping[str, Wanted], options: InferOptions
) -> InferRequest:
    """A request for that model; `wanted` says what its inputs are. Raises InvalidArgument, TypeError."""
    unknown = set(options) - set(NOTHING)
    if unknown:
        raise TypeError(f"unexpected argument '{min(unknown)}', expected one of {', '.join(NOTHING)}")
    if not isinstance(inputs, Mapping):
        raise TypeError(f"inputs must be a mapping of input names to arrays, got {type(inputs).__name__}")
    for option, kinds in KINDS.items():
        if options.get(option, NOTHING[option]) is not NOTHING[option]:
            _check(option, options[option], kinds)  # type: ignore[literal-required]
    request = InferRequest()
    request.model_name = name
    request.model_version = version
    request.id = options.get("request_id", "")
    request.priority = int(options.get("priority", 0))
    request.timeout_us = int(options.get("queue_timeout_us", 0))
    request.sequence_id = options.get("sequence_id", 0)
    request.sequence_start = options.get("sequence_start", False)
    request.sequence_end = options.get("sequence_end", False)
    parameters = options.get("parameters")
    if parameters is not None:
        for key, value in parameters.items():
            if not isinstance(key, str):
                raise InvalidArgument(f"expected a string as the name of a parameter, got {key!r}")
            _check(f"parameter '{key}'", value, (bool, int, float, str))
        request.parameters = dict(parameters)
    outputs = options.get("outputs")
    if outputs is not None:
        request.outputs = [RequestedOutput(output) for output in dict.fromkeys(outputs)]
    request.inputs = tensors(inputs, wanted)
    return request
