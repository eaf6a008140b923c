"""What a model in the server's process may ask of the server: calls of other models, the repository, metrics, the log.

A model may ask from any thread. What it asks for is posted to the trio thread, and the answer is called there.

Rules:
 1. Whoever asks when the server has ended gets an error: a thread of the model's may outlive the instance.
 2. A model that unloads itself does not wait for that: the unload waits for the request that asks for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import trio

import triton_python_backend_utils as utils
from neptrio.backends.python import convert
from neptrio.backends.python.bls import STOPPED, Call, OnLoop, current_batch
from neptrio.errors import Code, TritonError
from neptrio.execution.batch import Batch
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import InferRequest, RequestedOutput
from neptrio.request.numpy_tensor import from_numpy
from triton_python_backend_utils._host import Host

log = logging.getLogger("neptrio.python")
LEVELS = {0: logging.INFO, 1: logging.WARNING, 2: logging.ERROR, 3: logging.DEBUG}

Failure = tuple[int, str]  # an error's number, as models know it (TritonError), and its text
Answer = Callable[[Any, "Failure | None"], None]  # takes a value, and what failed or None
ENDED: Failure = (int(utils.TritonError.UNAVAILABLE), STOPPED)


def failure_of(error: Exception) -> Failure:
    """What a model is told of an error. One that is not the server's own is INTERNAL."""
    code = error.code if isinstance(error, TritonError) else Code.INTERNAL
    return int(convert.NUMBERS.get(code, 0)), text_of(error)


class _Submission(WorkItem):
    """A call on its way to the trio thread."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def deliver(self) -> None:
        self._call.submit()

    def lost(self) -> None:
        self._call.lost()


class _Question(OnLoop):
    """A function to be called on the trio thread, for an answer that a thread may wait for."""

    def __init__(self, function: Callable[[], object], answer: Answer) -> None:
        super().__init__(function)
        self._answer = answer

    def lost(self) -> None:
        self._answer(None, ENDED)


async def _logged(operation: Callable[[], Any]) -> None:
    try:
        await operation()
    except Exception as error:
        log.error("a model could not unload itself: %s", error)


def _awaited(ask: Callable[[Answer], None]) -> Any:
    """Asks and waits for the answer. Not on the trio thread. Raises TritonModelException if it is an error."""
    done = threading.Event()
    answers: list[tuple[Any, Failure | None]] = []

    def answer(value: Any, failure: Failure | None) -> None:
        answers.append((value, failure))
        done.set()

    ask(answer)
    done.wait()
    value, failure = answers[0]
    if failure is not None:
        raise utils.TritonModelException(failure[1])
    return value


class InProcessHost(Host):
    """What a model in the server's process may ask of the server."""

    def __init__(self, name: str, model: str, services: ModelHost) -> None:
        super().__init__()
        self.batch: Batch | None = None  # the batch that the instance's thread executes
        self.thread = 0  # the id of that thread
        self._model = model
        self._services = services
        self._log = logging.getLogger("neptrio.model." + name)

    @property
    def server(self) -> ModelHost:
        return self._services

    def infer(
        self, request: Any, decoupled: bool, deliver: Callable[[Any, bool], None], blocking: bool
    ) -> Call:
        made = InferRequest()
        made.model_name = request._model_name
        version = request._model_version
        made.model_version = version if isinstance(version, str) else "" if version < 0 else str(version)
        made.id = str(request._request_id)
        made.sequence_id = request._correlation_id
        made.sequence_start = bool(request._flags & 1)
        made.sequence_end = bool(request._flags & 2)
        made.timeout_us = int(request._timeout)
        made.parameters = dict(request._parameters) if request._parameters else None
        made.inputs = [
            (from_numpy(t._name, t.as_numpy()) if t.is_cpu() else t._source).renamed(t._name)
            for t in request._inputs
        ]
        if request._requested_output_names:
            names = dict.fromkeys(request._requested_output_names)  # a model may name one twice
            made.outputs = [RequestedOutput(name) for name in names]
            preferred = request._preferred_memory
            if preferred is not None and preferred._kind == utils.TRITONSERVER_MEMORY_GPU:
                for output in made.outputs:
                    output.keep_on_device = True
        made.parent = self._parent(request)
        made.owner = None if made.parent is None else made.parent.owner
        here = blocking and self.batch is not None and threading.get_ident() == self.thread
        call = Call(
            self._services, made, decoupled, deliver, self.batch.instance if here and self.batch else None
        )
        self._services.completions.post(_Submission(call))
        return call

    def _parent(self, request: Any) -> InferRequest | None:
        trace = request._trace
        if trace is not None and isinstance(trace._key, InferRequest):
            return trace._key
        batch = current_batch.get() or self.batch
        if batch is not None and len(batch.requests) == 1:
            parent: InferRequest = batch.requests[0]
            return parent
        return None

    def log(self, level: int, message: str, file: str, line: int) -> None:
        self._log.log(LEVELS.get(level, logging.INFO), "%s:%d] %s", file.rpartition("/")[2], line, message)

    # ------------------------------------------------------------ the repository

    def _await(self, call: Callable[[], Awaitable[Any]], answer: Answer) -> None:
        """Has an asynchronous function run on the trio thread, and answers with what it returns."""

        async def run() -> None:
            value: Any = None
            failure: Failure | None = ENDED  # where the loop ends meanwhile
            try:
                value = await call()
                failure = None
            except Exception as error:
                failure = failure_of(error)
            finally:
                answer(value, failure)

        self._ask(lambda: trio.lowlevel.spawn_system_task(run), answer)

    def _ask(self, function: Callable[[], object], answer: Answer) -> None:
        self._services.completions.post(_Question(function, answer))

    def ask_load(self, name: str, files: dict[str, bytes], config: str, answer: Answer) -> None:
        """load_model() without waiting: `answer` is called on the trio thread."""
        parameters: dict[str, Any] = dict(files)
        if config:
            parameters["config"] = config

        async def load() -> None:
            await self._services.repository.load(name, parameters)

        self._await(load, answer)

    def ask_unload(self, name: str, unload_dependents: bool, answer: Answer) -> None:
        """unload_model() without waiting: `answer` is called on the trio thread, or at once."""

        async def unload() -> None:
            await self._services.repository.unload(name, unload_dependents)

        if name == self._model:  # the unload waits for the request that asks for it, so do not wait here
            self._services.completions.post(OnLoop(lambda: trio.lowlevel.spawn_system_task(_logged, unload)))
            answer(None, None)
        else:
            self._await(unload, answer)

    def ask_ready(self, name: str, version: str, answer: Answer) -> None:
        """is_model_ready() without waiting: `answer` is called on the trio thread."""

        def look() -> None:
            try:
                ready = bool(self._services.admission.ready(name, "" if version == "-1" else version))
            except TritonError:
                ready = False
            answer(ready, None)

        self._ask(look, answer)

    def ask_described(self, subject: str, name: str, version: str, answer: Answer) -> None:
        """What the server says of itself or of a model: (-1, JSON), or (an error's number, its text). `answer` is called on the
        trio thread."""

        async def describe() -> tuple[int, str]:
            try:
                return -1, await self._services.describe(subject, name, version)
            except Exception as error:
                return failure_of(error)

        self._await(describe, answer)

    def ask_decoupled(self, name: str, version: str, answer: Answer) -> None:
        """is_model_decoupled() without waiting: `answer` is called on the trio thread."""

        def look() -> None:
            try:
                answer(bool(self._services.admission.lookup(name, version).decoupled), None)
            except TritonError as error:
                answer(None, failure_of(error))

        self._ask(look, answer)

    def load_model(self, name: str, files: dict[str, bytes], config: str) -> None:
        _awaited(lambda answer: self.ask_load(name, files, config, answer))

    def unload_model(self, name: str, unload_dependents: bool) -> None:
        _awaited(lambda answer: self.ask_unload(name, unload_dependents, answer))

    def is_model_ready(self, name: str, version: str) -> bool:
        return bool(_awaited(lambda answer: self.ask_ready(name, version, answer)))

    def is_model_decoupled(self, name: str, version: str) -> bool:
        return bool(_awaited(lambda answer: self.ask_decoupled(name, version, answer)))

    def metric_family(self, name: str, description: str, kind: int) -> Any:
        return self._services.custom_metrics.family(name, description, kind)
