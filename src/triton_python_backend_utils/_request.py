"""InferenceRequest and InferenceResponse."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Set  # noqa: UP035

from . import _checks, _host
from ._errors import TritonError, TritonModelException
from ._json import parameters_text
from ._tensor import Tensor

if TYPE_CHECKING:
    from ._sender import InferenceResponseSender

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2


class MemoryType(IntEnum):
    """Where memory lies."""

    TRITONSERVER_MEMORY_CPU = 0
    TRITONSERVER_MEMORY_GPU = 2


TRITONSERVER_MEMORY_CPU = MemoryType.TRITONSERVER_MEMORY_CPU
TRITONSERVER_MEMORY_GPU = MemoryType.TRITONSERVER_MEMORY_GPU
HIGHEST_64, HIGHEST_32 = (1 << 64) - 1, (1 << 32) - 1


class OutputNames(Set[str]):  # noqa: UP006  # Python 3.8 cannot subscript set here
    """The outputs that a request asks for: a set of str, iterated in the order in which they were asked for."""

    _order: tuple[str, ...] = ()  # the default is for copies, which are made without __init__

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._order = tuple(names)
        super().__init__(self._order)

    def __iter__(self) -> Iterator[str]:
        kept = dict.fromkeys(name for name in self._order if name in self)
        if len(kept) != len(self):  # the model has added to it
            kept.update(dict.fromkeys(super().__iter__()))
        return iter(kept)

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}}}" if self else "set()"


class PreferredMemory:
    """Where a model wants the outputs of its request to another model: in host memory or on a GPU."""

    __slots__ = ("_device", "_kind")

    def __init__(self, preferred_memory_type: MemoryType, preferred_device_id: int = 0) -> None:
        what = "preferred_memory_type of PreferredMemory"
        self._kind = _checks.member(preferred_memory_type, MemoryType, what, "pb_utils")
        what = "preferred_device_id of PreferredMemory"
        self._device = _checks.number(preferred_device_id, what, -HIGHEST_64, HIGHEST_64)

    def memory_type(self) -> MemoryType:
        """TRITONSERVER_MEMORY_CPU or TRITONSERVER_MEMORY_GPU."""
        return self._kind

    def device_id(self) -> int:
        """The number of the device."""
        return self._device


class InferenceTrace:
    """A request's trace. Requests to other models that get it become part of the same trace; that of a request which is
    not traced says nothing."""

    __slots__ = ("_context", "_id", "_key", "_parent")

    def __init__(self, key: Any = None, context: str | None = None) -> None:
        self._key = key
        self._context = context
        self._id = self._parent = 0  # as the trace file has them; for models in processes of their own

    def get_context(self) -> str | None:
        """The W3C trace context of the request, None when it is not traced with OpenTelemetry."""
        return self._context


class InferenceResponse:
    """Outputs, or an error, of one request."""

    __slots__ = ("__weakref__", "_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        tensors = _tensors(output_tensors, "output_tensors of InferenceResponse")
        if error is not None and not isinstance(error, TritonError):
            raise _checks.wrong("error of InferenceResponse", "a TritonError", error)
        if parameters:
            _check_parameters(parameters)
        self._tensors = tensors
        self._error = error
        self._parameters = parameters

    def output_tensors(self) -> list[Tensor]:
        """The outputs, in the order given."""
        return self._tensors

    def has_error(self) -> bool:
        """True when the response carries an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error, or None."""
        return self._error

    def parameters(self) -> str:
        """The response's parameters as a JSON object without blanks."""
        return parameters_text(self._parameters)

    def __repr__(self) -> str:
        return f"InferenceResponse({self._tensors!r}, error={self._error!r})"


def _version(value: Any, what: str) -> int | str:
    """A version's number, or the text of a label, which begins with a letter or `_`. Raises TypeError."""
    if isinstance(value, str) and (value[:1].isalpha() or value[:1] == "_"):
        return value
    return _checks.number(value, what, -HIGHEST_64, HIGHEST_64)


class InferenceRequest:
    """A request: received by execute(), or made by a model for another model."""

    __slots__ = (
        "__weakref__",
        "_channel",
        "_correlation_id",
        "_flags",
        "_host",
        "_inputs",
        "_key",
        "_model_name",
        "_model_version",
        "_parameters",
        "_preferred_memory",
        "_priority",
        "_release_flags",
        "_request_id",
        "_requested_output_names",
        "_timed",
        "_timeout",
        "_trace",
    )

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Iterable[str] = (),
        model_name: str = "",
        model_version: int | str = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | str | None = None,
    ) -> None:
        where = "of InferenceRequest"
        tensors = _tensors(inputs, f"inputs {where}")
        expected = "a list of str"
        names = _checks.sequence(requested_output_names, f"requested_output_names {where}", expected)
        if preferred_memory is not None and not isinstance(preferred_memory, PreferredMemory):
            raise _checks.wrong(f"preferred_memory {where}", "a PreferredMemory", preferred_memory)
        if trace is not None and not isinstance(trace, InferenceTrace):
            raise _checks.wrong(f"trace {where}", "an InferenceTrace", trace)
        given = json.loads(parameters) if isinstance(parameters, str) else parameters
        if given:
            _check_parameters(given)
        self._request_id = _checks.text(request_id, f"request_id {where}")
        self._correlation_id = _correlation(correlation_id)
        self._inputs = tensors
        self._requested_output_names = list(
            dict.fromkeys(_checks.text(name, f"a name in requested_output_names {where}") for name in names)
        )
        self._model_name = _checks.text(model_name, f"model_name {where}")
        self._model_version: int | str = _version(model_version, f"model_version {where}")
        self._flags = _checks.number(flags, f"flags {where}", 0, HIGHEST_32)
        self._timeout = _checks.number(timeout, f"timeout {where}", 0, HIGHEST_64)
        self._preferred_memory = preferred_memory
        self._trace = trace
        self._parameters: dict[str, Any] | None = given
        self._channel: Any = None
        # of those that compiled backends make
        self._priority = 0
        self._timed = False
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    def inputs(self) -> list[Tensor]:
        """The input tensors."""
        return self._inputs

    def request_id(self) -> str:
        """The client's id, "" when it gave none."""
        return self._request_id

    def correlation_id(self) -> int | str:
        """The sequence's id, 0 when there is none."""
        return self._correlation_id

    def requested_output_names(self) -> set[str]:
        """The outputs that the client wants, in the order in which it named them."""
        return OutputNames(self._requested_output_names)

    def model_name(self) -> str:
        """The model that executes the request."""
        return self._model_name

    def model_version(self) -> int | str:
        """The version asked for, -1 for the latest; a text where the request names a label."""
        return self._model_version

    def flags(self) -> int:
        """TRITONSERVER_REQUEST_FLAG_SEQUENCE_START and _END."""
        return self._flags

    def set_flags(self, flags: int) -> None:
        """Sets the sequence flags."""
        self._flags = _checks.number(flags, "flags of set_flags()", 0, HIGHEST_32)

    def timeout(self) -> int:
        """The timeout in microseconds, 0 for none."""
        return self._timeout

    def preferred_memory(self) -> PreferredMemory | None:
        """Where the outputs are wanted, None for no preference."""
        return self._preferred_memory

    def trace(self) -> InferenceTrace:
        """The request's trace, for requests that are made on its behalf."""
        trace = self._trace
        return InferenceTrace() if trace is None else trace

    def parameters(self) -> str:
        """The custom parameters as a JSON object without blanks."""
        return parameters_text(self._parameters)

    def is_cancelled(self) -> bool:
        """True when the client has cancelled the request or disconnected."""
        channel = self._channel
        return channel is not None and channel.is_cancelled()

    def get_response_sender(self) -> InferenceResponseSender:
        """The sender for this request's responses; they may be sent from any thread."""
        if self._channel is None:
            raise TritonModelException("only requests that execute() received have a response sender")
        sender: InferenceResponseSender = self._channel.sender(self)
        return sender

    def set_release_flags(self, flags: int) -> None:
        """TRITONSERVER_REQUEST_RELEASE_ALL, or _RESCHEDULE to have the request executed again."""
        flags = _checks.number(flags, "flags of set_release_flags()", 0, HIGHEST_32)
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(
                "release flags must be TRITONSERVER_REQUEST_RELEASE_ALL or TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, "
                f"got {flags!r}"
            )
        self._release_flags = flags

    def exec(self, decoupled: bool = False) -> Any:
        """Runs the request on its model and waits.

        Returns the InferenceResponse; with `decoupled`, an iterator over the responses. Failures
        come as responses with has_error(). Do not call it from a coroutine: use async_exec.
        """
        from ._calls import execute

        return execute(_host.require("InferenceRequest.exec"), self, decoupled)

    def async_exec(self, decoupled: bool = False) -> Any:
        """Like exec(), as a future of the running event loop; with `decoupled`, awaiting it gives an asynchronous iterator."""
        from ._calls import execute_async

        return execute_async(_host.require("InferenceRequest.async_exec"), self, decoupled)

    def __repr__(self) -> str:
        return f"InferenceRequest(model_name={self._model_name!r}, request_id={self._request_id!r})"


def _tensors(given: Any, what: str) -> list[Tensor]:
    expected = "a list of Tensor objects"
    if isinstance(given, Tensor):  # it has a shape, but is no sequence
        raise _checks.wrong(what, expected, given)
    tensors = list(_checks.sequence(given, what, expected))
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise _checks.wrong(what, expected + " with nothing else in it", tensor)
    return tensors


def _correlation(given: Any) -> int | str:
    if isinstance(given, str):
        return _checks.text(given, "")
    if given is None:
        raise _checks.wrong("correlation_id of InferenceRequest", "an int or a str", given)
    try:
        found = operator.index(given)
    except TypeError:
        raise TritonModelException(
            f"Correlation ID must be integer or string, got {type(given).__name__}"
        ) from None
    if not 0 <= found <= HIGHEST_64:
        raise TritonModelException(
            f"Correlation ID must be integer or string: sequence id must be from 0 to {HIGHEST_64} where it is an integer, got {found}"
        )
    return found


def _check_parameters(parameters: Any) -> None:
    if not isinstance(parameters, dict):
        raise TritonModelException(f"parameters must be a dict, got {type(parameters).__name__}")
    for key, value in parameters.items():
        if not isinstance(key, str) or not isinstance(value, (bool, int, float, str)):
            raise TritonModelException(
                f"parameter {key!r} must have a str key and a bool, int, float or str value, "
                f"got {type(value).__name__}"
            )


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The input of that name, None when the request has none."""
    name = _checks.text(name, "name of get_input_tensor_by_name()")
    for tensor in inference_request._inputs:
        if tensor._name == name:
            return tensor
    return None


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The output of that name, None when the response has none."""
    if inference_response.has_error():
        raise TritonModelException("This method is not allowed to be called for an error response.")
    name = _checks.text(name, "name of get_output_tensor_by_name()")
    for tensor in inference_response._tensors:
        if tensor._name == name:
            return tensor
    return None
