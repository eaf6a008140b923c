"""Converts requests and responses between the server's types and those that Python models see."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable
from typing import Any

import neptrio.request.device_memory as device_memory
import triton_python_backend_utils as utils
from neptrio.backends import device_outputs
from neptrio.backends.python import device_tensors
from neptrio.backends.python.tensors import copied, outputs, private, readonly, writable
from neptrio.errors import Code, Reason, TritonError
from neptrio.foreign import text_of
from neptrio.request.infer_request import InferRequest, InferResponse, MemoryKind, Tensor
from triton_python_backend_utils._errors import ErrorCode

# no constant of TritonError: what a kernel or ONNX model's own process answers a batch that took too long with
TIMED_OUT = 8
CODES = {
    utils.TritonError.UNKNOWN: Code.UNKNOWN,
    utils.TritonError.INTERNAL: Code.INTERNAL,
    utils.TritonError.NOT_FOUND: Code.NOT_FOUND,
    utils.TritonError.INVALID_ARG: Code.INVALID_ARG,
    utils.TritonError.UNAVAILABLE: Code.UNAVAILABLE,
    utils.TritonError.UNSUPPORTED: Code.UNSUPPORTED,
    utils.TritonError.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    utils.TritonError.CANCELLED: Code.CANCELLED,
    TIMED_OUT: Code.TIMED_OUT,
}
# what models are told; their TritonError knows no more
NUMBERS = {code: number for number, code in CODES.items()} | {
    Code.TIMED_OUT: utils.TritonError.UNAVAILABLE,
    Code.DEADLINE: utils.TritonError.UNAVAILABLE,
    Code.RESOURCE_EXHAUSTED: utils.TritonError.UNAVAILABLE,
    Code.FORBIDDEN: utils.TritonError.UNAVAILABLE,
    Code.TOO_MANY: utils.TritonError.UNAVAILABLE,
    Code.UNAUTHENTICATED: utils.TritonError.UNAVAILABLE,
    Code.DENIED: utils.TritonError.UNAVAILABLE,
}
NUMBERS_FOR_SERVER = NUMBERS | {Code.TIMED_OUT: TIMED_OUT}  # what the server is told
GPU = int(MemoryKind.GPU_MEMORY)
log = logging.getLogger("neptrio.python")
_telling = threading.Lock()  # so that a model's instances together log a warning once
new_request = utils.InferenceRequest.__new__
over = utils.Tensor._over


class Reader:
    """Makes the requests that a model's execute() gets. With `read_only`, models may not write to inputs."""

    def __init__(self, model_name: str, model_version: int, output_names: list[str], read_only: bool) -> None:
        self._model_name = model_name
        self._model_version = model_version
        self._output_names = output_names
        self._read_only = read_only

    def request(self, request: InferRequest, channel: Any) -> utils.InferenceRequest:
        """`request` in the model's type; `channel` is the way back for its responses."""
        made: utils.InferenceRequest = new_request(utils.InferenceRequest)
        inputs = []
        for tensor in request.inputs:
            if tensor.memory_kind == GPU:
                inputs.append(device_tensors.given(tensor))
                continue
            if self._read_only:
                convert, keep = readonly, False
            elif private(tensor):
                convert, keep = writable, False
            else:
                convert, keep = copied, True
            inputs.append(over(tensor.name, tensor.dtype, tensor.shape, tensor, convert, keep))
        made._inputs = inputs
        made._request_id = request.id
        made._correlation_id = request.sequence_id
        made._requested_output_names = (
            self._output_names if request.outputs is None else [o.name for o in request.outputs]
        )
        made._model_name = self._model_name
        made._model_version = self._model_version
        made._flags = (1 if request.sequence_start else 0) | (2 if request.sequence_end else 0)
        made._timeout = request.timeout_us
        made._preferred_memory = None
        made._trace = (
            None if request.trace is None else utils.InferenceTrace(request, request.trace.context())
        )
        made._parameters = request.parameters
        made._channel = channel
        made._release_flags = 1
        return made


def wanted_names(request: InferRequest) -> list[str] | None:
    """The names of the outputs that the client wants and of the implicit state, None if it wants all outputs."""
    if request.outputs is None:
        return None
    return [*(o.name for o in request.outputs), *request.model.state_outputs]


def response(request: InferRequest, made: utils.InferenceResponse, sole: bool) -> InferResponse:
    """A model's response in the server's type; for `sole`, see rule 2 of backends.python.tensors."""
    error = made._error
    if error is not None:
        refused = TritonError(text_of(error._message), CODES[error._code], Reason.BACKEND)
        refused.__cause__ = getattr(error, "cause", None)  # of functions in this process
        return InferResponse(None, refused, made._parameters)
    names: Collection[str] | None = wanted_names(request)
    tensors = outputs(made, request.model.known_outputs if names is None else names, sole)
    if names is None and len(tensors) != len(made._tensors):
        _tell_of(request.model, (tensor._name for tensor in made._tensors))
    if device_memory.in_use():
        tensors = device_outputs.settle(request, tensors)
    return InferResponse(tensors, None, made._parameters)


def known(request: InferRequest, tensors: list[Tensor]) -> list[Tensor]:
    """A model's outputs without those that its configuration lacks; all of them if the client named outputs."""
    if request.outputs is not None:
        return tensors
    names = request.model.known_outputs
    kept = [tensor for tensor in tensors if tensor.name in names]
    if len(kept) != len(tensors):
        _tell_of(request.model, (tensor.name for tensor in tensors))
    return kept


def _tell_of(model: Any, made: Iterable[str]) -> None:
    with _telling:
        told, model.told_of_outputs = model.told_of_outputs, True
    if not told:
        extra = [name for name in made if name not in model.known_outputs]
        log.warning(
            "model '%s' makes output(s) %s that its configuration does not have: they are not sent",
            model.name,
            extra,
            extra={"subject": model.name},
        )


def received(response: InferResponse) -> utils.InferenceResponse:
    """The response of a called model, in the type that the calling model sees."""
    made = utils.InferenceResponse.__new__(utils.InferenceResponse)
    made._parameters = response.parameters
    error = response.error
    made._error = (
        None if error is None else utils.TritonError(str(error), ErrorCode(NUMBERS.get(error.code, 0)))
    )
    made._tensors = [
        device_tensors.given(t)
        if t.memory_kind == GPU
        else over(t.name, t.dtype, t.shape, t, writable if private(t) else copied, not private(t))
        for t in response.outputs or ()
    ]
    return made
