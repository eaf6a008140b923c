"""What runs in the process of a kernel or ONNX instance: a model in the form of a Python model.

It makes the backend's own instance, with the thread that it has in the server's process, and gives it each batch that
execute() is called with. The event loop takes the trio thread's part.

Rules:
 1. Every batch goes through the same code as in the server's process: prepare(), the instance's thread, deliver().
 2. When the instance is lost (its device can no longer be used), the batches under way are answered first. Then the
    process ends, and those that came after that end with it. The next process begins with a device that works.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from google.protobuf import json_format

import triton_python_backend_utils as utils
from neptrio.backends.kernel.device import Device
from neptrio.backends.python.convert import NUMBERS_FOR_SERVER
from neptrio.backends.python.tensors import readonly
from neptrio.config.model_config import new_config
from neptrio.errors import TritonError
from neptrio.execution.backend import Abandonment, Backend, BackendInstance, LoadContext
from neptrio.execution.batch import accept
from neptrio.execution.instance import Instance, InstancePool
from neptrio.loop.mailbox import CompletionQueue
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    ModelCore,
    RequestedOutput,
    Responder,
    Timestamp,
)
from neptrio.request.numpy_tensor import from_numpy
from triton_python_backend_utils import _host
from triton_python_backend_utils._execute import AnswerError

LOST = 1  # the exit status of a process whose device cannot be used any more


@dataclass(frozen=True)
class _Settings:
    """The part of the server's settings that backends read."""

    backend: dict[str, str]
    pinned_memory_pool_byte_size: int
    max_output_bytes: int
    host_memory_budget: int = 0  # a process is measured as a whole
    backend_directory: Path | None = None
    model_cache_directory: Path | None = None  # what a model's process writes no other one reads
    metrics_config: Sequence[str] = ()

    def backend_settings(self, backend: str) -> dict[str, str]:
        return self.backend


class _Model(ModelCore):
    """The model, as far as batches and backends ask for it."""

    def __init__(self, context: LoadContext) -> None:
        super().__init__(context.name, str(context.version))
        config = context.config
        self.max_batch_size = config.max_batch_size
        self.output_names = {output.name for output in config.output}
        self.state_outputs = [state.output_name for state in config.sequence_batching.state]
        self.counters = ModelCounters()


class _Answers(Responder):
    """Collects the responses of one batch."""

    def __init__(self, count: int, done: asyncio.Future[None]) -> None:
        self.responses: list[InferResponse | None] = [None] * count
        self._left = count
        self._done = done

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.responses[request.context] = response
        self._left -= 1
        if not self._left:
            self._done.set_result(None)


class _Returned(list[utils.InferenceResponse]):
    """What execute() returns; `times` say when the execution began, had its inputs and had computed (monotonic ns)."""

    times: tuple[int, int, int]


def _context(args: dict[str, str]) -> LoadContext:
    """What the server's backend was told."""
    config = json_format.Parse(args["model_config"], new_config())
    settings = json.loads(args["backend_settings"])
    config.parameters.pop("isolation", None)  # this is the process that it asks for
    settings.pop("isolation", None)
    return LoadContext(
        args["model_name"],
        int(args["model_version"]),
        Path(args["model_repository"]),
        Path(args["version_directory"]),
        config,
        _Settings(settings, int(args["pinned_bytes"]), int(args["max_output_bytes"])),
        None,  # type: ignore[arg-type]  # backends of this kind can do without the server
        Abandonment(),
    )


def _loaded(context: LoadContext, args: dict[str, str]) -> tuple[Backend, BackendInstance]:
    module, _, name = args["backend"].partition(":")
    backend: Backend = getattr(import_module(module), name)(context)
    backend.load()
    return backend, backend.create_instance(
        args["model_instance_name"], args["model_instance_kind"], int(args["model_instance_device_id"])
    )


class TritonPythonModel:
    """The instance and its thread, behind the interface of a Python model."""

    async def initialize(self, args: dict[str, str]) -> None:
        """Loads the model and initializes the instance. Raises AnswerError with the reason why that failed."""
        Device.remedy = "its process ends and is started anew"
        self._lost = False
        self._under_way = 0
        self._host = _host.find()
        self._loop = asyncio.get_running_loop()
        self._completions = CompletionQueue()
        self._loop.add_reader(self._completions.read_fd, self._drain)
        try:
            context = _context(args)
            name = args["model_instance_name"]
            # loading asks drivers for devices, which no event loop should wait for
            self._backend, instance = await asyncio.to_thread(_loaded, context, args)
            instance.tell(self)
            self._model = _Model(context)
            self._instance = Instance(name, self._model, instance, self._completions, InstancePool())
            await self._called(self._instance.start)
        except TritonError as error:
            raise AnswerError(str(error)) from error
        self.memory_changed()

    async def _called(self, function: Callable[[Callable[[BaseException | None], None]], None]) -> None:
        """Waits until `function`, which is given a callback, has called it. Raises the error that it is called with."""
        done: asyncio.Future[BaseException | None] = self._loop.create_future()
        function(done.set_result)
        error = await done
        if error is not None:
            raise error

    def _drain(self) -> None:
        for item in self._completions.drain():
            item.deliver()

    # ------------------------------------------------------------ execution

    async def execute(self, requests: list[Any]) -> _Returned:
        """Executes a batch; the errors of its requests are in their responses."""
        if self._lost:
            await self._loop.create_future()  # rule 2
        done: asyncio.Future[None] = self._loop.create_future()
        answers = _Answers(len(requests), done)
        made = [self._request(request, i, answers) for i, request in enumerate(requests)]
        self._under_way += 1
        try:
            self._instance.submit(made, "", 0)
            await done
        finally:
            self._under_way -= 1
            self._leave_if_lost()
        returned = _Returned(_response(response) for response in answers.responses)
        first = made[0]
        returned.times = (
            first.timestamp(Timestamp.COMPUTE_START),
            first.timestamp(Timestamp.COMPUTE_INPUT_END),
            first.timestamp(Timestamp.COMPUTE_OUTPUT_START),
        )
        return returned

    def _request(self, request: Any, place: int, answers: _Answers) -> InferRequest:
        made = InferRequest()
        made.model = self._model
        made.model_name = self._model.name
        made.id = request._request_id
        made.sequence_id = request._correlation_id
        made.parameters = request._parameters
        made.inputs = [from_numpy(t._name, t.as_numpy()) for t in request._inputs]
        made.outputs = [RequestedOutput(name) for name in request._requested_output_names]
        shape = made.inputs[0].shape if made.inputs else ()
        made.batch_size = shape[0] if self._model.max_batch_size > 0 and shape else 1
        made.collect_statistics = False  # the server counts
        made.responder = answers
        made.context = place
        accept(made)
        return made

    # ------------------------------------------------------------ health and memory

    def health_changed(self) -> None:
        self._lost = self._instance.backend.lost
        self._leave_if_lost()

    def _leave_if_lost(self) -> None:
        if self._lost and not self._under_way:
            self._loop.call_soon(_leave)  # when the last answer is on its way

    def state_lost(self, backend: BackendInstance, error: TritonError) -> None:
        pass  # it would be lost with this process

    def memory_changed(self) -> None:
        if self._host is not None:
            self._host.holds_memory(self._backend.memory_usage())

    def response_measured(self, place: int, outcome: int, computing_ns: int, output_ns: int) -> None:
        pass  # the server counts

    async def finalize(self) -> None:
        """Ends the instance and gives back what it holds."""
        await self._called(self._instance.stop)
        self._backend.unload()


def _leave() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(LOST)


def _response(response: InferResponse | None) -> utils.InferenceResponse:
    assert response is not None
    made = utils.InferenceResponse.__new__(utils.InferenceResponse)
    made._parameters = response.parameters
    made._error = None
    made._tensors = []
    if response.error is not None:
        made._error = utils.TritonError(str(response.error))
        made._error._code = NUMBERS_FOR_SERVER[response.error.code]
    else:
        made._tensors = [
            utils.Tensor._over(t.name, t.dtype, t.shape, t, readonly, False) for t in response.outputs or ()
        ]
    return made
