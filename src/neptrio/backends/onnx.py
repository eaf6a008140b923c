"""The onnxruntime backend: ONNX models, a session per instance.

The problem: ONNX Runtime executes well, but its Python interface invites copies (numpy in, numpy
out) and its thread pools spin on cores that the event loop needs. The choices:

 1. Inputs are OrtValues over the request's own memory when one request is executed, and over one
    gathered buffer when a batch is; outputs are the memory that ONNX Runtime made, split by rows
    without a copy. Only BYTES tensors are converted.
 2. A session runs with the GIL released, so the event loop and other models go on meanwhile.
 3. Threads that wait for work sleep instead of spinning, unless the model's parameters say
    otherwise (session.intra_op.allow_spinning): docs/onnx.md has the trade-off.
 4. Only outputs that some request of the batch wants are computed.
 5. Requests that cannot share a batch (other inputs, other sizes behind the batch dimension) are
    executed one after the other, never mixed.

What a configuration may leave open, how it must agree with the model and which parameters there
are: onnx_model.py and onnx_options.py. onnxruntime is imported when the first model needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from neptrio import datatypes
from neptrio._cext.batch import Batch
from neptrio._cext.gather import gather, split
from neptrio._cext.request import InferRequest, InferResponse, Tensor, tensor_at
from neptrio.backends import onnx_model, onnx_options, onnx_signature
from neptrio.backends.base import Backend, BackendInstance, LoadContext
from neptrio.codec.numpy_tensor import join_bytes, split_bytes
from neptrio.errors import Internal, InvalidArgument, Reason, TritonError
from neptrio.model.layout import Layout

BF16_IN_ONNX = 16  # onnx.TensorProto.BFLOAT16


class OnnxBackend(Backend):
    """See the module's text."""

    platform = "onnxruntime_onnx"
    default_model_filename = "model.onnx"
    default_cpu_instances = 2

    @classmethod
    def runs_on_gpu(cls) -> bool:
        return "CUDAExecutionProvider" in onnx_options.providers()

    @classmethod
    def auto_complete(cls, context: LoadContext) -> None:
        """Inputs, outputs, max_batch_size and dynamic batching from the model. Raises InvalidArgument."""
        config = context.config
        tensors = (*config.input, *config.output)
        if config.input and config.output and all(onnx_model.complete(t) for t in tensors):
            return
        session = onnx_options.light_session(context)
        onnx_model.auto_complete(config, session, context.settings.backend_settings("onnxruntime"))

    @classmethod
    def complete_from_files(cls, context: LoadContext) -> bool:
        signature = onnx_signature.read(onnx_options.model_path(context))
        if signature.complete:
            onnx_model.auto_complete(
                context.config, signature, context.settings.backend_settings("onnxruntime")
            )
        return signature.complete

    @classmethod
    def examine(cls, context: LoadContext, report: Callable[[str], None]) -> None:
        try:
            signature = onnx_signature.read(onnx_options.model_path(context))
        except InvalidArgument:
            return  # told by complete_from_files()
        Layout(context.config)
        for difference in onnx_model.differences(context.config, signature):
            report(difference)
        for file in signature.external:
            if not (context.version_dir / file).is_file():
                report(
                    f"weights of model '{context.name}' are in '{file}', which is not beside the model's file"
                )

    def load(self) -> None:
        """Checks that the file is there; sessions are made by the instances, in parallel."""
        onnx_options.model_path(self.context)

    def create_instance(self, name: str, kind: str, device_id: int) -> BackendInstance:
        return OnnxInstance(self.context, name, kind, device_id)


class OnnxInstance(BackendInstance):
    """One session and the thread that runs it."""

    def __init__(self, context: LoadContext, name: str, kind: str, device_id: int) -> None:
        self._context = context
        self._name = name
        self._kind = kind
        self._device_id = device_id
        self._session: Any = None
        self._outputs: dict[str, int] = {}
        self._strings = False
        config = context.config
        self._batching = config.max_batch_size > 0
        ragged = any(i.allow_ragged_batch for i in config.input) and self._batching
        whole = ragged or config.batch_input or config.batch_output
        self._layout = Layout(config) if whole else None

    def initialize(self) -> None:
        """Makes the session and compares it with the configuration. Raises InvalidArgument."""
        import onnxruntime

        self._new_value = onnxruntime.OrtValue.ortvalue_from_numpy
        self._new_typed_value = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type
        self._session = onnx_options.session(self._context, self._kind, self._device_id)
        onnx_model.compare(self._context.config, self._session)
        self._inputs = {i.name for i in self._session.get_inputs()}
        self._inputs |= {i.name for i in self._session.get_overridable_initializers()}
        wanted = {o.name for o in self._context.config.output}
        wanted |= {state.output_name for state in self._context.config.sequence_batching.state}
        self._outputs = {
            o.name: onnx_model.datatype(o.type) for o in self._session.get_outputs() if o.name in wanted
        }
        # OrtValues hold no strings in ONNX Runtime's Python interface: such models go through numpy
        types = [i.type for i in self._session.get_inputs()]
        self._strings = "tensor(string)" in types or datatypes.BYTES in self._outputs.values()

    def finalize(self) -> None:
        self._session = None

    def execute(self, batch: Batch) -> None:
        """Groups what can run together, runs each group, answers each request."""
        groups: dict[Any, list[int]] = {}
        if self._layout is not None:
            self._execute_layout(batch, self._layout)
            return
        if len(batch.requests) == 1:
            groups[None] = [0]
        else:
            for i, request in enumerate(batch.requests):
                groups.setdefault(self._key(request, i), []).append(i)
        for members in groups.values():
            requests = [batch.requests[i] for i in members]
            try:
                answers = self._run(requests, batch)
            except TritonError as error:
                if len(groups) == 1:
                    raise
                answers = [InferResponse(None, error) for _ in members]
            for i, answer in zip(members, answers, strict=True):
                batch.responses[i] = answer

    def _key(self, request: InferRequest, index: int) -> Any:
        if not self._batching:
            return index
        return tuple(sorted((t.name, t.shape[1:]) for t in request.inputs))

    def _run(self, requests: list[InferRequest], batch: Batch) -> list[InferResponse]:
        feeds = {
            t.name: self._feed(gather(requests, t.name)) for t in requests[0].inputs if t.name in self._inputs
        }
        answers = [InferResponse([]) for _ in requests]
        for tensor in self._call(self._wanted(requests), feeds, batch):
            for answer, part in zip(answers, self._split(tensor, requests), strict=True):
                answer.outputs.append(part)
        return answers

    def _execute_layout(self, batch: Batch, layout: Layout) -> None:
        """Ragged inputs, batch inputs and batch outputs: the whole batch, as the configuration says."""
        tensors = layout.inputs(batch)
        known = {t.name for t in tensors}
        for extra in batch.requests[0].inputs:  # control and state inputs of sequences
            if extra.name not in known:
                tensors.append(gather(batch.requests, extra.name))
        feeds = {t.name: self._feed(t) for t in tensors if t.name in self._inputs}
        layout.respond(batch, self._call(self._wanted(batch.requests), feeds, batch))

    def _call(self, names: list[str], feeds: dict[str, Any], batch: Batch) -> list[Tensor]:
        """Runs the session (without the GIL) and returns the named outputs."""
        batch.mark_input_end()
        try:
            if self._strings:
                results = self._session.run(names, feeds)
            else:
                results = _run(self._session, names, feeds)
        except Exception as error:
            raise Internal(
                f"onnx runtime error: {_text(error)} (model '{self._context.name}')", reason=Reason.BACKEND
            ) from error
        batch.mark_output_start()
        return [self._tensor(name, result) for name, result in zip(names, results, strict=True)]

    def _wanted(self, requests: list[InferRequest]) -> list[str]:
        if any(r.outputs is None for r in requests):
            return list(self._outputs)
        listed = {o.name for r in requests for o in r.outputs}
        model = requests[0].model
        if model is not None:
            listed.update(model.state_outputs)
        return [name for name in self._outputs if name in listed]

    def _feed(self, tensor: Tensor) -> Any:
        """One input as ONNX Runtime takes it."""
        if tensor.dtype == datatypes.BYTES:
            array = np.empty(tensor.count(), dtype=object)
            array[:] = [_decode(tensor.name, element) for element in split_bytes(tensor)]
            return array.reshape(tensor.shape)
        dtype = np.dtype(np.uint16) if tensor.dtype == datatypes.BF16 else datatypes.NUMPY[tensor.dtype]
        if tensor.nbytes == 0:
            array = np.empty(tensor.shape, dtype)
        else:
            array = np.frombuffer(tensor, dtype).reshape(tensor.shape)
        if tensor.address % dtype.itemsize != 0:
            array = array.copy()  # a tensor may start at any byte of a request's body
        if tensor.dtype == datatypes.BF16:
            return self._new_typed_value(array, BF16_IN_ONNX)
        return self._new_value(array)

    def _tensor(self, name: str, result: Any) -> Tensor:
        """A result as a tensor over the memory that ONNX Runtime made."""
        dtype = self._outputs[name]
        if isinstance(result, np.ndarray):
            if dtype == datatypes.BYTES:
                return Tensor(name, dtype, tuple(result.shape), join_bytes(result.reshape(-1).tolist()))
            result = np.ascontiguousarray(result)
            return tensor_at(name, dtype, tuple(result.shape), result.ctypes.data, result.nbytes, result)
        if result.device_name() != "cpu":
            return self._tensor(name, result.numpy())
        shape = tuple(result.shape())
        return tensor_at(name, dtype, shape, result.data_ptr(), result.tensor_size_in_bytes(), result)

    def _split(self, tensor: Tensor, requests: list[InferRequest]) -> list[Tensor]:
        """The rows of each request, without a copy."""
        if len(requests) == 1:
            return [tensor]
        rows = sum(r.batch_size for r in requests)
        if not tensor.shape or tensor.shape[0] != rows:
            raise Internal(
                f"output '{tensor.name}' of model '{self._context.name}' has the shape {list(tensor.shape)}, expected "
                f"the batch dimension {rows}; set max_batch_size to 0 if the model does not batch",
                reason=Reason.BACKEND,
            )
        shapes = [(r.batch_size, *tensor.shape[1:]) for r in requests]
        return list(split(tensor, shapes, f"model '{self._context.name}'"))

    def describe_failure(self, error: BaseException) -> TritonError:
        return Internal(
            f"{type(error).__name__}: {_text(error)} (instance '{self._name}')", reason=Reason.BACKEND
        )


def _run(session: Any, names: list[str], feeds: dict[str, Any]) -> list[Any]:
    """session.run_with_ort_values, without walking over the vector it gets its results in.

    The end of such a walk is a C++ exception, which costs several times what a small model does.
    """
    inner = getattr(session, "_sess", None)
    if inner is None or not hasattr(inner, "run_with_ort_values"):
        return list(session.run_with_ort_values(names, feeds))
    import onnxruntime

    values = {name: value._get_c_value() for name, value in feeds.items()}
    made = inner.run_with_ort_values(values, names, None)
    return [onnxruntime.OrtValue(made[i]) for i in range(len(made))]


def _decode(name: str, element: bytes) -> str:
    try:
        return element.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"input '{name}' must hold UTF-8 strings for an ONNX model, got bytes that are not: {error}"
        ) from None


def _text(error: BaseException) -> str:
    text = str(error).strip()
    # "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : what happened"
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
