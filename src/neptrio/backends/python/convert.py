"""Converts requests and responses between the server's types and those that Python models see."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import neptrio.request.device_memory as device_memory
import triton_python_backend_utils as utils
from neptrio.backends import device_outputs
from neptrio.backends.python import device_tensors, output_differences
from neptrio.backends.python.tensors import as_configured, copied, outputs, private, readonly, writable
from neptrio.errors import Code, Reason, TritonError
from neptrio.foreign import text_of
from neptrio.request.infer_request import InferRequest, InferResponse, MemoryKind
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
        failed = TritonError(text_of(error._message), CODES[error._code], Reason.BACKEND)
        failed.__cause__ = getattr(error, "cause", None)  # of functions in this process
        return InferResponse(None, failed, made._parameters)
    names: Collection[str] | None = wanted_names(request)
    tensors = outputs(made, request.model.known_outputs if names is None else names, sole)
    # of outputs that the client did not name, others are none of its business where it gets some
    left_out = len(tensors) != len(made._tensors) and (names is None or not tensors)
    if left_out or not as_configured(request, tensors):
        rows = [(tensor._name, tensor._dtype, len(tensor.shape())) for tensor in made._tensors]
        refused = output_differences.refusal(
            request.model, rows, None if request.outputs is None else [o.name for o in request.outputs]
        )
        if refused is not None:
            return InferResponse(None, refused, made._parameters)
    if device_memory.in_use():
        tensors = device_outputs.settle(request, tensors)
    return InferResponse(tensors, None, made._parameters)


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
