"""Instances of ONNX models: what each does with its session, through either interface of ONNX Runtime (backend.py has the choices)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from neptrio import datatypes
from neptrio.backends.onnx import model as onnx_model
from neptrio.backends.onnx import options as onnx_options
from neptrio.backends.onnx import python_session as onnx_python
from neptrio.backends.onnx import signature as onnx_signature
from neptrio.backends.onnx.batch import OnnxBatch, run_failure
from neptrio.backends.onnx.builder import OnnxBuilder
from neptrio.backends.onnx.shared_session import SharedSession
from neptrio.config import session_sharing
from neptrio.errors import Internal, InvalidArgument, Reason, TritonError
from neptrio.execution.backend import BackendInstance, LoadContext
from neptrio.execution.batch import Batch
from neptrio.execution.gather import gather, split
from neptrio.execution.layout import Layout
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor
from neptrio.request.numpy_tensor import split_bytes

log = logging.getLogger("neptrio.onnx")


def needs_python(config: Any) -> bool:
    """True when batches have strings or a layout of their own (has_layout())."""
    states = config.sequence_batching.state
    types = {t.data_type for t in (*config.input, *config.output, *states)}
    types |= {c.data_type for control in config.sequence_batching.control_input for c in control.control}
    return datatypes.BYTES in types or has_layout(config)


def has_layout(config: Any) -> bool:
    """True when the configuration has ragged inputs, batch inputs or batch outputs."""
    ragged = any(i.allow_ragged_batch for i in config.input) and config.max_batch_size > 0
    return bool(ragged or config.batch_input or config.batch_output)


class OnnxInstance(BackendInstance):
    """A session, of its own or `shared` with others of its model, and the thread on which it runs it."""

    def __init__(
        self,
        context: LoadContext,
        name: str,
        kind: str,
        device_id: int,
        shared: SharedSession | None = None,
    ) -> None:
        self._context = context
        self._name = name
        self._kind = kind
        self._device_id = device_id
        self._shared = shared
        self.session: Any = None
        self._outputs: list[str] = []  # the outputs that the configuration has, in the model's order
        self._batching = context.config.max_batch_size > 0
        self._layout = Layout(context.config) if has_layout(context.config) else None

    def initialize(self) -> None:
        """Makes the session, or takes the shared one, and checks it against the configuration. Raises InvalidArgument."""
        config = self._context.config
        if self._shared is not None:
            self.session = self._shared.acquire()
        else:
            self.session = onnx_options.session(self._context, self._kind, self._device_id)
        try:
            found = onnx_signature.ranked(self.session, onnx_options.model_path(self._context))
            onnx_model.compare(config, found)
        except InvalidArgument:
            OnnxInstance.finalize(self)
            raise
        doubt = onnx_model.doubtful(config, found)
        if doubt and self._name.endswith("_0"):  # once for a group
            log.warning("%s", doubt)
        wanted = {o.name for o in config.output} | self._states()
        self._outputs = [o.name for o in self.session.get_outputs() if o.name in wanted]

    def _states(self) -> set[str]:
        return {state.output_name for state in self._context.config.sequence_batching.state}

    def finalize(self) -> None:
        session, self.session = self.session, None
        if session is None:
            return
        if self._shared is not None:
            self._shared.release()
        else:
            session.close()

    def execute(self, batch: Batch) -> None:
        """Groups the requests that can run together, runs each group, and answers each request."""
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
                answers = self._each(requests, lambda sound: self._run(sound, batch))
            except TritonError as error:
                if len(groups) == 1:
                    raise
                answers = [InferResponse(None, error) for _ in members]
            for i, answer in zip(members, answers, strict=True):
                batch.responses[i] = answer

    def _each(
        self, requests: list[InferRequest], run: Callable[[list[InferRequest]], list[InferResponse]]
    ) -> list[InferResponse]:
        """The answers of run(requests). Where it finds something wrong with a request, that one alone is refused, and
        the others run without it."""
        try:
            return run(requests)
        except InvalidArgument:
            if len(requests) == 1:
                raise
            problems = [_problem(request) for request in requests]
            sound = [r for r, problem in zip(requests, problems, strict=True) if problem is None]
            if len(sound) == len(requests):
                raise
        rest = iter(run(sound) if sound else ())
        return [next(rest) if p is None else InferResponse(None, p) for p in problems]

    def _key(self, request: InferRequest, index: int) -> Any:
        if not self._batching:
            return index
        return tuple(sorted((t.name, t.shape[1:]) for t in request.inputs))

    def _run(self, requests: list[InferRequest], batch: Batch) -> list[InferResponse]:
        tensors = _gathered(requests, (t.name for t in requests[0].inputs))
        answers: list[list[Tensor]] = [[] for _ in requests]
        for tensor in self._call(self._wanted(requests), tensors, batch):
            for answer, part in zip(answers, self._split(tensor, requests), strict=True):
                answer.append(part)
        return [InferResponse(outputs) for outputs in answers]

    def _execute_layout(self, batch: Batch, layout: Layout) -> None:
        """Executes a batch with ragged inputs, batch inputs or batch outputs, as the configuration says."""

        def run(requests: list[InferRequest]) -> list[InferResponse]:
            part = batch if len(requests) == len(batch.requests) else Batch(batch.model, requests)
            tensors = layout.inputs(part)
            known = {t.name for t in tensors}
            # control and state inputs, which the sequence batcher adds
            extra = (t.name for t in requests[0].inputs if t.name not in known)
            tensors += _gathered(requests, extra)
            layout.respond(part, self._call(self._wanted(requests), tensors, batch))
            return [response for response in part.responses if response is not None]

        batch.responses[:] = self._each(list(batch.requests), run)

    def _call(
        self, names: list[str], tensors: list[Tensor], batch: Batch, kept: set[str] | None = None
    ) -> list[Tensor]:
        """Runs the session (without the GIL) and returns the named outputs, those in `kept` on the device."""
        try:
            results = self._bound(names, tensors, batch.mark_input_end, kept or set())
        except TritonError:
            raise
        except Exception as error:
            raise run_failure(_text(error), self._context.name) from error
        batch.mark_output_start()
        return results

    def _bound(self, names: list[str], tensors: list[Tensor], ready: Any, kept: set[str]) -> list[Tensor]:
        results: list[Tensor] = self.session.run(names, tensors, ready)
        return results

    def _wanted(self, requests: list[InferRequest]) -> list[str]:
        if any(r.outputs is None for r in requests):
            return self._outputs
        listed = {o.name for r in requests for o in r.outputs or ()}
        model = requests[0].model
        if model is not None:
            listed.update(model.state_outputs)
        return [name for name in self._outputs if name in listed]

    def _split(self, tensor: Tensor, requests: list[InferRequest]) -> list[Tensor]:
        """The rows of an output that belong to each request, without a copy."""
        if not self._batching:
            return [tensor]
        if len(requests) == 1 and requests[0].model is not None and requests[0].model.max_batch_size == 1:
            return [tensor]  # nobody else has rows in it, whatever the model counts there
        rows = sum(r.batch_size for r in requests)
        if not tensor.shape or tensor.shape[0] != rows:
            raise Internal(
                f"output '{tensor.name}' of model '{self._context.name}' has the shape {list(tensor.shape)}, expected "
                f"the batch dimension {rows}; set max_batch_size to 0 if the model does not batch",
                reason=Reason.BACKEND,
            )
        if len(requests) == 1:
            return [tensor]
        shapes = [(r.batch_size, *tensor.shape[1:]) for r in requests]
        return list(split(tensor, shapes, f"model '{self._context.name}'"))

    def describe_failure(self, error: BaseException) -> TritonError:
        return Internal(
            f"{type(error).__name__}: {_text(error)} (instance '{self._name}')", reason=Reason.BACKEND
        )


class NativeInstance(OnnxInstance):
    """One that runs a session of the C library. Its batches are executed without the GIL."""

    native = True
    batch_type = OnnxBatch

    def __init__(
        self, context: LoadContext, name: str, kind: str, device_id: int, shared: SharedSession | None
    ) -> None:
        super().__init__(context, name, kind, device_id, shared)
        # Custom operators may call Python, for which the trio thread would not give up the GIL. And ONNX Runtime
        # sets "flush denormals" on the thread that makes the session, not on the one that runs it.
        own_thread = bool(context.config.model_operations.op_library_filename) or bool(
            session_sharing.obstacle(onnx_options.settings(context))
        )
        self.builder = OnnxBuilder(context.name, self._batching, own_thread)

    @property
    def prepare(self) -> Callable[[Batch], Batch]:
        return self.builder.prepare

    def initialize(self) -> None:
        super().initialize()
        states = self._states()
        self.builder.use(self.session, self._outputs, [o for o in self._outputs if o in states])

    def execute(self, batch: Batch) -> None:
        raise AssertionError("native instances do not execute in Python")

    def finalize(self) -> None:
        self.builder.use(None, [], [])
        super().finalize()


def _problem(request: InferRequest) -> InvalidArgument | None:
    """What is wrong with a request's strings, None when nothing is."""
    for tensor in request.inputs:
        if tensor.dtype == datatypes.BYTES:
            try:
                for element in split_bytes(tensor):
                    onnx_python.decoded(tensor.name, element)
            except InvalidArgument as error:
                return error
    return None


def _gathered(requests: list[InferRequest], names: Iterable[str]) -> list[Tensor]:
    """These inputs of all requests, each as one tensor; inputs that no request has are left out."""
    return [tensor for name in names if (tensor := gather(requests, name)) is not None]


def _text(error: BaseException) -> str:
    text = str(error).strip()
    # the text is "[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : what happened"
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text
