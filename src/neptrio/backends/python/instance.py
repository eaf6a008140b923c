"""A Python model in the server's process.

A model with a plain execute() runs on its instance's thread. A model with `async def execute`
runs on an event loop of its own: every execute() is called there, and several batches' awaits
overlap. So do initialize() and finalize() where they are coroutines. Plain ones are called on the
instance's thread, where no loop runs: they may run coroutines, as on a Triton server.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as utils
from neptrio.backends.python.bls import current_batch
from neptrio.backends.python.model_runner import OWN_FILES, ModelRunner
from neptrio.errors import Internal, Reason, TritonError, settled
from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch
from neptrio.foreign import summary
from neptrio.loop import threads
from neptrio.observe import current_span
from neptrio.request.infer_request import RequestState, monotonic_ns
from triton_python_backend_utils import _host
from triton_python_backend_utils._execute import (
    LOOP_STOPPED,
    AnswerError,
    described,
    said_ready,
)

if TYPE_CHECKING:
    import asyncio  # imported by the first model that needs it: it takes 20 ms
    import concurrent.futures
    from collections.abc import Coroutine

log = logging.getLogger("neptrio.python")

DONE = int(RequestState.DONE)
ASYNC_CAPACITY = 64  # batches that an async model may execute at once


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
        self._loop_stopped = False  # by the model, which is not ready then
        self._loop_ends = False
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
            if issubclass(type(error), TritonError):
                raise settled(error) from None  # type: ignore[arg-type]
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
        if self._loop_stopped:
            return False
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
        try:
            self._thread = threads.start(self._run_loop, name=f"{self._runner.name}-loop")
        except threads.NoThread:
            loop, self._loop = self._loop, None
            loop.close()
            raise
        try:
            self._beside_loop(self._runner.initialize)
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

    def _beside_loop(self, function: Callable[[], Any]) -> None:
        """Calls a method of the model on this thread. If it is a coroutine, it runs on the loop."""
        import asyncio

        asyncio.set_event_loop(self._loop)
        try:
            answer = function()
        finally:
            asyncio.set_event_loop(None)
        if inspect.isawaitable(answer):
            self._on_loop(_awaited(answer))

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

    async def _hooks_ended(self) -> None:
        import asyncio

        if self._hooks:
            await asyncio.wait(self._hooks)

    def _run_loop(self) -> None:
        import asyncio

        assert self._loop is not None
        _host.enter(self._runner.host)
        asyncio.set_event_loop(self._loop)
        try:
            while not self._loop_ends:
                self._run_on()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()

    def _run_on(self) -> None:
        """Runs the loop until it is stopped, or a task raises what asyncio lets through (SystemExit). Others wait for what the loop
        does for them, so it goes on then."""
        assert self._loop is not None
        try:
            self._loop.run_forever()
        except BaseException as error:
            log.error("%s: a task of its event loop has raised %s", self._runner.name, summary(error))
            return
        if not self._loop_ends:
            self._loop_stopped = True
            log.error("%s: %s", self._runner.name, LOOP_STOPPED)

    async def _call(self, function: Callable[[], Any]) -> Any:
        result = function()
        return await result if inspect.isawaitable(result) else result

    def _stop_loop(self) -> None:
        assert self._loop is not None
        try:
            self._on_loop(self._hooks_ended())
            self._beside_loop(self._runner.finalize)
        finally:
            self._end_loop()

    def _end_loop(self) -> None:
        assert self._loop is not None and self._thread is not None
        if self._checking is not None:  # otherwise its caller would wait for ever
            self._checking.cancel()
        self._loop.call_soon_threadsafe(self._leave_loop)
        self._thread.join()
        self._loop = None

    def _leave_loop(self) -> None:
        """On the loop, so that whoever sees the flag knows that the loop has been stopped, or runs no more."""
        assert self._loop is not None
        self._loop_ends = True
        self._loop.stop()

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
