"""Requests that a model makes to other models: waiting for their responses.

Responses come from another thread, and a call collects them. `exec` waits for them on a condition, `async_exec` on a
future of the running event loop. Responses of a decoupled model are taken by iterating. The call tells the host of each
one that was taken, so that a model which sends faster than the caller reads has to wait.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ._errors import TritonError, TritonModelException
from ._request import InferenceRequest, InferenceResponse
from ._sender import _resolve

if TYPE_CHECKING:
    import asyncio  # coroutines import it: a model without any does without


class _Call:
    """One inference. The host calls deliver() from any thread; the model calls take() or take_async()."""

    def __init__(self, decoupled: bool) -> None:
        self._decoupled = decoupled
        self._ready = threading.Condition()
        self._responses: deque[InferenceResponse] = deque()
        self._final = False
        # what each event loop that waits is to call, and with which future
        self._waiters: list[tuple[asyncio.AbstractEventLoop, Any, asyncio.Future[Any]]] = []
        self.handle: Any = None

    def deliver(self, response: InferenceResponse | None, final: bool) -> None:
        if response is None and final and self._decoupled:
            response = InferenceResponse(
                []
            )  # like on a Triton server, a final flag without data is a response, too
        with self._ready:
            if response is not None:
                self._responses.append(response)
            self._final = self._final or final
            self._ready.notify_all()
            waiters = self._waiters
            if waiters:
                self._waiters = []
        for loop, function, future in waiters:
            try:
                loop.call_soon_threadsafe(function, future)
            except RuntimeError:  # the waiting event loop has ended
                pass

    def take(self) -> InferenceResponse | None:
        """Waits for the next response; None after the final one."""
        with self._ready:
            while not self._responses and not self._final:
                self._ready.wait()
            response = self._responses.popleft() if self._responses else None
        if response is not None:
            self.handle.took(response)
        return response

    async def take_async(self) -> InferenceResponse | None:
        """take() for coroutines; cancelling it cancels the inference."""
        import asyncio

        while True:
            with self._ready:
                if self._responses or self._final:
                    response = self._responses.popleft() if self._responses else None
                    break
                loop = asyncio.get_running_loop()
                arrived = loop.create_future()
                self._waiters.append((loop, _resolve, arrived))
            try:
                await arrived  # when it has come another task may be faster
            except asyncio.CancelledError:
                self.handle.cancel()
                raise
        if response is not None:
            self.handle.took(response)
        return response

    def answer(self, loop: asyncio.AbstractEventLoop) -> asyncio.Future[Any]:
        """A future of the running `loop` for what async_exec() gives; cancelling it cancels the inference."""
        future: asyncio.Future[Any] = loop.create_future()
        future.add_done_callback(self._left)
        with self._ready:
            if not self._responses and not self._final:
                self._waiters.append((loop, self._answered, future))
                return future
        self._answered(future)
        return future

    def _answered(self, future: asyncio.Future[Any]) -> None:
        if future.done():  # cancelled
            return
        if self._decoupled:
            future.set_result(ResponseIterator(self))
            return
        with self._ready:
            response = self._responses.popleft() if self._responses else None
        if response is not None:
            self.handle.took(response)
        future.set_result(_single(response))

    def _left(self, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self.handle.cancel()
            self.handle.drop()


class ResponseIterator:
    """The responses of a request to a decoupled model. It keeps them: once it has come to the end, iter() begins anew."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._kept: list[InferenceResponse] = []
        self._ended = False  # the last response was taken
        self._next = 0  # of those that are kept, once it has ended

    def __iter__(self) -> Iterator[InferenceResponse]:
        if self._ended:
            self._next = 0
        return self

    def __next__(self) -> InferenceResponse:
        response = self._again() if self._ended else self._keep(self._call.take())
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        iter(self)
        return self

    async def __anext__(self) -> InferenceResponse:
        response = self._again() if self._ended else self._keep(await self._call.take_async())
        if response is None:
            raise StopAsyncIteration
        return response

    def _keep(self, response: InferenceResponse | None) -> InferenceResponse | None:
        if response is None:
            self._ended, self._next = True, len(self._kept)
        else:
            self._kept.append(response)
        return response

    def _again(self) -> InferenceResponse | None:
        if self._next >= len(self._kept):
            return None
        self._next += 1
        return self._kept[self._next - 1]

    def cancel(self) -> None:
        """Cancels the request. Responses that its model still sends can be read to the end."""
        self._call.handle.cancel()

    def __del__(self) -> None:
        if not self._call._final:
            self._call.handle.drop()


def _start(host: Any, request: InferenceRequest, decoupled: bool, blocking: bool) -> _Call:
    if not request._model_name:
        raise TritonModelException("a request to another model needs a model_name")
    call = _Call(decoupled)
    call.handle = host.infer(request, decoupled, call.deliver, blocking)
    return call


def _single(response: InferenceResponse | None) -> InferenceResponse:
    return (
        InferenceResponse(error=TritonError("the model sent no response")) if response is None else response
    )


def execute(host: Any, request: InferenceRequest, decoupled: bool) -> Any:
    """InferenceRequest.exec."""
    if not decoupled and request._model_name:
        response = host.infer_here(request)
        if response is not NotImplemented:
            return _single(response)
    call = _start(host, request, decoupled, True)
    return ResponseIterator(call) if decoupled else _single(call.take())


def execute_async(host: Any, request: InferenceRequest, decoupled: bool) -> Any:
    """InferenceRequest.async_exec. The request is sent at once, as on a Triton server, and a future of the running event loop
    tells of its answer. With `decoupled` that is there with the first response, because models often await several calls together
    and then iterate over the responses with a plain `for`, which blocks the event loop."""
    import asyncio

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _execute_later(host, request, decoupled)
    try:
        return _start(host, request, decoupled, False).answer(loop)
    except Exception as error:
        return _failed(loop, error)


def _failed(loop: asyncio.AbstractEventLoop, error: Exception) -> asyncio.Future[Any]:
    future = loop.create_future()  # in no frame of the error's traceback, so that neither needs the collector
    future.set_exception(error)
    return future


async def _execute_later(host: Any, request: InferenceRequest, decoupled: bool) -> Any:
    """async_exec() where no event loop runs, as in asyncio.run(request.async_exec())."""
    return await execute_async(host, request, decoupled)
