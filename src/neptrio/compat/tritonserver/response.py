"""Responses, and the iterators and queues that they come in.

Rules:
 1. A response is made when it leaves the model, on the server's thread, over the server's memory.
 2. The same object goes to the iterator and to the request's queue.
 3. The last one is `final`: a decoupled model's may be without outputs.
 4. A decoupled model waits for whoever iterates. It does not wait for a queue, nor for an iterator that is gone.
"""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from neptrio import errors
from neptrio.compat.tritonserver.errors import InternalError, TritonError, converted
from neptrio.compat.tritonserver.memory import MemoryAllocator
from neptrio.compat.tritonserver.tensor import Tensor
from neptrio.embedded.call import Call
from neptrio.embedded.mail import AsyncMail, Mail, ThreadMail
from neptrio.foreign import summary
from neptrio.request.infer_request import InferResponse

if TYPE_CHECKING:
    from neptrio.compat.tritonserver.model import Model


@dataclass
class InferenceResponse:
    """A model's response: `outputs` by name, or the `error` that came instead. `final`: no other one follows."""

    model: Model
    request_id: str | None = None
    parameters: dict[str, str | int | bool] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    error: TritonError | None = None
    classification_label: str | None = None
    final: bool = False


class ResponseFeed:
    """The server's side: makes responses, and gives them to the iterator's mail and the request's queue."""

    def __init__(self, model: Model, request_id: str, mail: Mail) -> None:
        self._model = model
        self._request_id = request_id
        self._mail = mail
        self.queue: Callable[[InferenceResponse], object] | None = None
        self.allocator: MemoryAllocator | None = None
        self.unread = False  # nobody iterates any more
        self.call: Call | None = None

    def put(self, item: Any) -> None:
        """A response of the server, as Mail.put() takes it."""
        made, core = self._made(item)
        if self.queue is not None:
            self.queue(made)
        read = self.queue is None and not self.unread
        if not read and core is not None and self.call is not None:
            self.call.took(core)
        if not self.unread:
            self._mail.put((made, core if read else None))

    def _made(self, item: Any) -> tuple[InferenceResponse, InferResponse | None]:
        """The response, and what has to be reported as taken."""
        if isinstance(item, Exception):
            error = item if isinstance(item, errors.TritonError) else InternalError(str(item))
            return self._failed(converted(error), True), None
        core, final = item
        taken = None if final else core
        if core.error is not None:
            return self._failed(converted(core.error), final), taken
        made = InferenceResponse(self._model, self._request_id, final=final)
        if not core.null:
            made.model = self._model._resolved(core.model_name, core.model_version)
            made.request_id = core.id
            made.parameters = dict(core.parameters or {})
            made.outputs = {tensor.name: Tensor._of_core(tensor) for tensor in core.outputs or ()}
            if self.allocator is not None:
                try:
                    made.outputs = {
                        name: output._moved(name, self.allocator) for name, output in made.outputs.items()
                    }
                except Exception as error:  # of the program's allocator
                    failed = error if isinstance(error, TritonError) else InternalError(summary(error))
                    return self._failed(failed, final), taken
        return made, taken

    def _failed(self, error: TritonError, final: bool) -> InferenceResponse:
        made = InferenceResponse(self._model, self._request_id, error=error, final=final)
        error.args = (str(error), made)
        return made


class _Responses:
    """What both iterators have in common."""

    def __init__(self, call: Call, feed: ResponseFeed, raise_on_error: bool) -> None:
        self._call = call
        self._feed = feed
        self._raise = raise_on_error
        self._complete = False

    def _opened(self, item: tuple[InferenceResponse, InferResponse | None]) -> InferenceResponse:
        response, core = item
        if core is not None:
            self._call.took(core)
        self._complete = response.final
        if response.error is not None and self._raise:
            raise response.error
        return response

    def cancel(self) -> None:
        """Cancels the request. No further response comes, and the iteration ends."""
        self._complete = True
        self._call.cancel()

    def __del__(self) -> None:
        self._feed.unread = True
        if not self._complete:
            self._call.abandon()


class ResponseIterator(_Responses):
    """The responses to a request, one after the other, as they come. From Model.infer()."""

    def __init__(self, call: Call, feed: ResponseFeed, mail: ThreadMail, raise_on_error: bool) -> None:
        super().__init__(call, feed, raise_on_error)
        self._mail = mail

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        if self._complete:
            raise StopIteration
        return self._opened(self._mail.get())


class AsyncResponseIterator(_Responses):
    """The same for a task of asyncio (or trio). From Model.async_infer()."""

    def __init__(self, call: Call, feed: ResponseFeed, mail: AsyncMail, raise_on_error: bool) -> None:
        super().__init__(call, feed, raise_on_error)
        self._mail = mail

    def __aiter__(self) -> AsyncResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._complete:
            raise StopAsyncIteration
        return self._opened(await self._mail.get())


def queued(wanted: queue.SimpleQueue | asyncio.Queue) -> Callable[[InferenceResponse], object]:
    """How the server's thread puts something into that queue."""
    if isinstance(wanted, queue.SimpleQueue):
        return wanted.put
    loop = asyncio.get_running_loop()

    def put(response: InferenceResponse) -> None:
        try:
            loop.call_soon_threadsafe(wanted.put_nowait, response)
        except RuntimeError:
            pass  # the loop is closed

    return put
