"""A Python model in the server's process.

A model with a plain execute() runs on its instance's thread. A model with `async def execute`
runs on an event loop of its own: initialize(), every execute() and finalize() are called there,
and several batches' awaits overlap.
"""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as utils
from neptrio.backends.python import convert
from neptrio.backends.python.bls import InProcessHost, current_batch
from neptrio.backends.python.source import ModelSource
from neptrio.errors import Cancelled, Internal, InvalidArgument, Reason, TritonError
from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch, complete
from neptrio.execution.model_host import ModelHost
from neptrio.loop.mailbox import WorkItem
from neptrio.observe import current_span
from neptrio.request.infer_request import InferRequest, InferResponse, RequestState, monotonic_ns
from triton_python_backend_utils import _host
from triton_python_backend_utils._execute import (
    AnswerError,
    check_class,
    check_count,
    check_none,
    described,
    failure_text,
    said_ready,
)
from triton_python_backend_utils._sender import Channel

if TYPE_CHECKING:
    import asyncio  # imported by the first model that needs it: it takes 20 ms
    import concurrent.futures
    from collections.abc import Coroutine

log = logging.getLogger("neptrio.python")

OWN_FILES = ("cext/", str(Path(__file__).parents[2]))  # left out of tracebacks for a model's author
DONE = int(RequestState.DONE)
RESCHEDULE = utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
ASYNC_CAPACITY = 64  # batches that an async model may execute at once


def dropped(request: InferRequest) -> TritonError:
    """The error of a request whose model dropped its response sender before the final response."""
    if request.cancelled:
        return Cancelled()
    return Internal(
        f"model '{request.model.name}' dropped the response sender of a request without sending "
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
        reason=Reason.BACKEND,
    )


class Post(WorkItem):
    """Carries a sender's response to the trio thread. Calls `done` there when the client has room for more."""

    def __init__(
        self, request: InferRequest, response: InferResponse, final: bool, done: Callable[[], None] | None
    ) -> None:
        self._request = request
        self._response = response
        self._final = final
        self._done = done
        response.produced_ns = monotonic_ns()

    def deliver(self) -> None:
        request = self._request
        complete(request, self._response, self._final)
        if self._done is not None and (
            self._final or not request.responder.wait_for_room(request, self._done)
        ):
            self._done()


class Reschedule(WorkItem):
    """Carries a request to the trio thread that the model wants to execute again (iterative sequences)."""

    def __init__(self, request: InferRequest) -> None:
        self._request = request

    def deliver(self) -> None:
        request = self._request
        if request.scheduler is None:  # a warm-up sample
            error = InvalidArgument(
                "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, which only models with an "
                "iterative sequence batcher may do"
            )
            complete(request, InferResponse(None, error), True)
        else:
            request.scheduler.reschedule(request)


class Back:
    """What a request in execute() needs from the server: whether it is cancelled, and a sender for its responses."""

    __slots__ = ("_channel", "_completions", "_request")

    def __init__(self, request: InferRequest, completions: Any, decoupled: bool) -> None:
        self._request = request
        self._completions = completions
        self._channel: Channel | None = None
        if decoupled:
            self._channel = self._make(False)
            wake = weakref.WeakMethod(self._channel.wake)

            def on_cancel() -> None:
                method = wake()
                if method is not None:
                    method()

            request.on_cancel = on_cancel

    def is_cancelled(self) -> bool:
        return bool(self._request.cancelled)

    def sender(self, request: Any) -> utils.InferenceResponseSender:
        if self._channel is None:
            self._channel = self._make(True)
        return self._channel.sender(request)

    @property
    def taken(self) -> bool:
        """Whether the model has taken a response sender."""
        return self._channel is not None and self._channel.taken

    @property
    def sent(self) -> bool:
        """Whether the only response was sent by a sender (models that are not decoupled)."""
        return self._channel is not None and self._channel.sent

    def close(self) -> None:
        """Closes the sender, because the request is answered in another way."""
        if self._channel is not None:
            self._channel.closed = True

    def _make(self, single: bool) -> Channel:
        request, completions = self._request, self._completions

        def cancelled() -> bool:
            return bool(request.cancelled)

        def post(response: utils.InferenceResponse | None, final: bool, size: int) -> None:
            if response is None:
                made = InferResponse()
                made.null = True
            else:
                made = convert.response(request, response, False)
            made.produced_ns = monotonic_ns()
            completions.post(Post(request, made, final, lambda: channel() and channel().acknowledge(size)))

        def finish() -> None:
            if request.state != DONE:
                completions.post(Post(request, InferResponse(None, dropped(request)), True, None))

        def unread() -> bool:
            return bool(request.cancelled and not request.still_read)

        made = Channel(post, cancelled, unread, finish, single)
        channel: Any = weakref.ref(made)
        return made


class ModelRunner:
    """Calls a TritonPythonModel: what models with a plain and with an asynchronous execute() have in common."""

    def __init__(
        self,
        name: str,
        source: ModelSource,
        args: dict[str, str],
        reader: convert.Reader,
        services: ModelHost,
        decoupled: bool,
    ) -> None:
        self.name = name
        self.reader = reader
        self.completions = services.completions
        self.decoupled = decoupled
        self.host = InProcessHost(name, args["model_name"], services)
        self.model: Any = None
        self._source = source
        self._args = args

    def load(self) -> None:
        """Imports the model file and makes the model object."""
        module = self._source.load()
        self.model = check_class(module, str(self._source.path))()

    def initialize(self) -> Any:
        """Calls the model's initialize(args), if it has one. Returns the coroutine if it is async."""
        if hasattr(self.model, "initialize"):
            return self.model.initialize(dict(self._args))
        return None

    def finalize(self) -> Any:
        """Calls the model's finalize(), if it has one. Returns the coroutine if it is async."""
        return self.model.finalize() if hasattr(self.model, "finalize") else None

    def forget(self) -> None:
        """Drops the model and its modules."""
        self.model = None
        self._source.unload()

    @property
    def wants_sequence_end(self) -> bool:
        """Whether the model has on_sequence_end(id, reason)."""
        return callable(getattr(self.model, "on_sequence_end", None))

    def requests(self, batch: Batch) -> list[utils.InferenceRequest]:
        """The requests of a batch, in the type that execute() gets."""
        completions, decoupled, reader = self.completions, self.decoupled, self.reader
        made = []
        for request in batch.requests:
            made.append(reader.request(request, Back(request, completions, decoupled)))
        return made

    def answer(self, batch: Batch, given: list[utils.InferenceRequest], responses: Any) -> None:
        """Checks what execute() returned and fills in the batch's responses."""
        batch.mark_output_start()
        if self.decoupled:
            check_none(responses, self.name)
        elif responses is None and all(r._channel.taken for r in given):
            responses = [None] * len(given)
        else:
            responses = check_count(responses, len(given))
        kept: list[InferRequest] = []
        answers: list[InferResponse | None] = []
        for i, request in enumerate(batch.requests):
            seen, response = given[i], None if responses is None else responses[i]
            if seen._release_flags == RESCHEDULE:
                seen._channel.close()
                if response is None:
                    self.completions.post(Reschedule(request))
                    continue
                answers.append(self._failed("a request that is rescheduled must have None as its response"))
            elif self.decoupled:
                answers.append(None)
            elif response is None:
                if seen._channel.taken:
                    continue  # the sender answers it, or has already
                answers.append(self._failed("execute() returned None for a request"))
            elif not isinstance(response, utils.InferenceResponse):
                answers.append(
                    self._failed(
                        f"execute() must return InferenceResponse objects, got {type(response).__name__}"
                    )
                )
            elif seen._channel.sent:
                log.warning(
                    "%s: a response was both sent and returned for a request; the sent one counts", self.name
                )
                continue
            else:
                seen._channel.close()
                try:
                    answers.append(convert.response(request, response, True))
                except (TritonError, ValueError, TypeError) as error:
                    answers.append(self._failed(f"cannot use an output tensor: {error}"))
            kept.append(request)
        if len(kept) != len(batch.requests):
            batch.requests = kept
        batch.responses = answers

    def close(self, given: list[utils.InferenceRequest]) -> None:
        """Closes the senders of a failed batch's requests."""
        for request in given:
            request._channel.close()

    def _failed(self, reason: str) -> InferResponse:
        text = f"Failed to process the request(s) for model '{self.name}', message: {reason}"
        return InferResponse(None, Internal(text, reason=Reason.BACKEND))

    def failure(self, error: BaseException) -> TritonError:
        """The error of requests whose execute() raised."""
        if isinstance(error, TritonError):
            return error
        return Internal(failure_text(self.name, error, OWN_FILES), reason=Reason.BACKEND)


async def _awaited(answer: Any) -> Any:
    return await answer


class InProcessInstance(BackendInstance):
    """A backend instance whose model runs in the server's process."""

    def __init__(self, runner: ModelRunner, gpu: int | None = None) -> None:
        """`gpu` is the number of the device whose memory the model may get; None gives it host memory only."""
        self._runner = runner
        self.takes_device_memory = gpu is not None
        self._gpu = gpu
        self._device: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._hooks: set[asyncio.Task[None]] = set()
        self._checking: concurrent.futures.Future[Any] | None = None  # is_ready()

    def initialize(self) -> None:
        _host.enter(self._runner.host)
        _host.install(self._runner.host)
        self._runner.host.thread = threading.get_ident()
        try:
            if self._gpu is not None:
                from neptrio.backends.kernel.device import Device

                self._device = Device.get(self._gpu)
            self._runner.load()
            if inspect.iscoroutinefunction(self._runner.model.execute):
                self._start_loop()
            else:
                self._runner.initialize()
                self.wants_sequence_end = self._runner.wants_sequence_end
        except BaseException as error:
            _host.uninstall(self._runner.host)
            self._runner.forget()
            self._leave_device()
            if isinstance(error, TritonError):
                raise
            raise Internal(described(error, OWN_FILES), reason=Reason.BACKEND) from error

    def _leave_device(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.release()

    def describe_failure(self, error: BaseException) -> TritonError:
        return self._runner.failure(error)

    def is_ready(self) -> bool:
        model = self._runner.model
        check = getattr(model, "is_ready", None)
        if check is None:
            return model is not None
        if self._loop is not None:
            answer = self._ready_on_loop(check)
        else:
            answer = check()
            if inspect.isawaitable(answer):
                import asyncio

                answer = asyncio.run(_awaited(answer))
        try:
            return said_ready(answer)
        except AnswerError as error:
            log.error("%s: %s", self._runner.name, error)
            return False

    def _ready_on_loop(self, check: Callable[[], Any]) -> Any:
        import asyncio
        import concurrent.futures

        assert self._loop is not None
        self._checking = asyncio.run_coroutine_threadsafe(self._call(check), self._loop)
        try:
            return self._checking.result()
        except concurrent.futures.CancelledError:  # the instance ends
            return False

    def execute(self, batch: Batch) -> None:
        runner = self._runner
        given = runner.requests(batch)
        batch.mark_input_end()
        host = runner.host
        host.batch = batch
        span = current_span.enter(batch.requests) if current_span.active else None
        try:
            runner.answer(batch, given, runner.model.execute(given))
        except BaseException:
            runner.close(given)
            raise
        finally:
            host.batch = None
            if span is not None:
                current_span.leave(span)

    def finalize(self) -> None:
        try:
            if self._loop is not None:
                self._stop_loop()
            elif self._runner.model is not None:
                self._runner.finalize()
        finally:
            _host.uninstall(self._runner.host)
            self._runner.forget()
            self._leave_device()

    # ------------------------------------------------------------ async def execute

    def _start_loop(self) -> None:
        import asyncio

        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"{self._runner.name}-loop", daemon=True)
        self._thread.start()
        try:
            self._on_loop(self._call(self._runner.initialize))
        except BaseException:
            self._end_loop()
            raise
        self.capacity = ASYNC_CAPACITY
        self.overlapping = True
        self.wants_sequence_end = self._runner.wants_sequence_end

    def _on_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the loop and waits for its result. Any other thread."""
        import asyncio

        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        hook = self._runner.model.on_sequence_end
        if self._loop is None:
            hook(sequence_id, reason)
        else:
            self._loop.call_soon_threadsafe(self._spawn_hook, lambda: hook(sequence_id, reason))

    def _spawn_hook(self, hook: Callable[[], Any]) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._call_hook(hook))
        self._hooks.add(task)
        task.add_done_callback(self._hooks.discard)

    async def _call_hook(self, hook: Callable[[], Any]) -> None:
        try:
            await self._call(hook)
        except Exception as error:
            log.error(
                "the sequence end hook of %s failed: %s", self._runner.name, self._runner.failure(error)
            )

    async def _finalize_after_hooks(self) -> None:
        import asyncio

        if self._hooks:
            await asyncio.wait(self._hooks)
        await self._call(self._runner.finalize)

    def _run_loop(self) -> None:
        import asyncio

        assert self._loop is not None
        _host.enter(self._runner.host)
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    async def _call(self, function: Callable[[], Any]) -> Any:
        result = function()
        return await result if inspect.isawaitable(result) else result

    def _stop_loop(self) -> None:
        assert self._loop is not None
        try:
            self._on_loop(self._finalize_after_hooks())
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        assert self._loop is not None and self._thread is not None
        if self._checking is not None:  # otherwise its caller would wait for ever
            self._checking.cancel()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop = None

    def begin(self, batch: Batch) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._spawn, batch)

    def _spawn(self, batch: Batch) -> None:
        assert self._loop is not None
        task = self._loop.create_task(self._execute(batch))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _execute(self, batch: Batch) -> None:
        runner = self._runner
        batch.compute_start = monotonic_ns()
        current_batch.set(batch)
        given: list[utils.InferenceRequest] = []
        if current_span.active:
            current_span.enter(batch.requests)  # set for this task only
        try:
            given = runner.requests(batch)
            batch.mark_input_end()
            runner.answer(batch, given, await runner.model.execute(given))
        except BaseException as error:
            runner.close(given)
            batch.error = runner.failure(error)
        batch.compute_end = monotonic_ns()
        runner.completions.post(batch)
