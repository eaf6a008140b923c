"""A model as an object: requests to it from tasks of trio or asyncio."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Unpack

from neptrio.embedded import control
from neptrio.embedded.call import Call
from neptrio.embedded.engine import Engine
from neptrio.embedded.mail import AsyncMail, Item, Mail, mail_here
from neptrio.embedded.options import (
    InferOptions,
    RequestOptions,
    checked_timeout,
    new_request,
    takes_infer_options,
    takes_request_options,
)
from neptrio.embedded.response import Response, Wanted
from neptrio.errors import CLASSES, TritonError
from neptrio.request.infer_request import InferResponse

AHEAD = 32  # requests that infer_each() has under way


class ModelHandle:
    """What both kinds of model objects have in common: which model it is, and how calls begin."""

    def __init__(self, engine: Engine, name: str, version: str = "") -> None:
        self._engine = engine
        self.name = name
        self.version = version

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}{' version ' if self.version else ''}{self.version}>"

    def _call(self, inputs: Mapping[str, Any], options: InferOptions, mail: Mail, one_response: bool) -> Call:
        """A call that is not started yet."""
        timeout = checked_timeout(options)
        request = new_request(self.name, self.version, inputs, self._wanted(), options)
        return Call(self._engine, request, mail, one_response, timeout)

    def _wanted(self) -> dict[str, Wanted]:
        """What inputs the model wants; nothing for a model that does not serve: the request will say why."""
        try:
            model = self._engine.core.services.admission.sought(self.name, self.version)
        except TritonError:
            return {}
        one = not model.max_batch_size
        return {
            spec.name: Wanted(
                spec.dtype, spec.dims if one and spec.dims and all(n == 1 for n in spec.dims) else None
            )
            for spec in model.input_specs
        }


def opened(item: Item, call: Call | None = None) -> tuple[Response | None, bool]:
    """A mail's item as (response or None for an empty one, final). Raises the error that came instead. The `call` is told of
    one that is taken, if it waits for that."""
    error = item if isinstance(item, Exception) else item[0].error
    if error is not None:
        try:
            raise _classed(error)
        finally:
            # the error knows this frame and the callers', whose arrays would stay until a collection
            del item, error
    response, final = item
    if call is not None and not final:
        call.took(response)
    return None if response.null else Response(response), final


def _classed(error: Exception) -> Exception:
    """The error as an instance of its code's class, if it has one: what a model raises has only a code."""
    if type(error) is not TritonError:
        return error
    found = CLASSES.get(error.code)
    if found is None:
        return error
    made = found(str(error), reason=error.reason).with_traceback(error.__traceback__)
    made.__cause__ = error.__cause__
    return made


class Model(ModelHandle):
    """A model of a server in this process. From Server.model(); any number of tasks may use it at once.

    A task that is cancelled cancels its request.
    """

    def _mail(self) -> AsyncMail:
        return mail_here(self._engine.token)

    @takes_infer_options
    async def infer(self, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> Response:
        """The model's response to one request.

        `inputs`: input name -> array of the model's dtype and shape (with the batch dimension, if it has one). Arrays
        are used where they lie: do not change them before the response is there.

        Raises TritonError: what a client would get over the network.
        """
        mail = self._mail()
        call = self._call(inputs, options, mail, one_response=True)
        try:
            call.start()
            return await _only(mail)
        finally:
            call.cancel()

    @takes_infer_options
    async def stream(
        self, inputs: Mapping[str, Any], **options: Unpack[InferOptions]
    ) -> AsyncIterator[Response]:
        """The responses of a decoupled model to one request, as they come; of another model, its one response.

        The model waits when the caller does not keep up. Leaving the loop cancels the request, at once if the iterator
        is closed (contextlib.aclosing), else when it is collected. Raises TritonError.
        """
        mail = self._mail()
        call = self._call(inputs, options, mail, one_response=False)
        try:
            call.start()
            final = False
            while not final:
                response, final = opened(await mail.get(), call)
                if response is not None:
                    yield response
        finally:
            call.cancel()

    @takes_infer_options
    async def infer_each(
        self,
        requests: Iterable[Mapping[str, Any]] | AsyncIterable[Mapping[str, Any]],
        ahead: int = AHEAD,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Response]:
        """A response for each of many requests, in their order. Raises TritonError at the first that fails.

        `requests` are inputs as infer() takes them. Up to `ahead` of them are under way at once, so that a batching
        model can batch them.
        """
        waiting: deque[tuple[Call, AsyncMail]] = deque()
        try:
            async with aclosing(_each(requests)) as given:
                async for inputs in given:
                    mail = self._mail()
                    waiting.append((self._call(inputs, options, mail, one_response=True), mail))
                    waiting[-1][0].start()
                    if len(waiting) >= max(1, ahead):
                        yield await _first(waiting)
            while waiting:
                yield await _first(waiting)
        finally:
            for call, _ in waiting:
                call.cancel()

    def sequence(self, sequence_id: int | str = 0) -> Sequence:
        """A new sequence of requests to a stateful model, to be used as `async with`. 0: an id is chosen."""
        return Sequence(self, sequence_id)

    async def ready(self) -> bool:
        """Whether the model serves and says that it can."""
        return await self._engine.reach(control.model_ready, self.name, self.version)

    async def metadata(self) -> dict[str, Any]:
        """Its inputs and outputs, as GET v2/models/NAME tells them. Raises NotFound, Unavailable."""
        return await self._engine.reach(control.model_metadata, self.name, self.version)

    async def config(self) -> dict[str, Any]:
        """Its complete configuration, as GET v2/models/NAME/config tells it. Raises NotFound, Unavailable."""
        return await self._engine.reach(control.model_config, self.name, self.version)


async def _only(mail: AsyncMail) -> Response:
    """The one response of a call."""
    while True:
        response, final = opened(await mail.get())
        if response is not None or final:
            return response if response is not None else Response(InferResponse([]))


async def _first(waiting: deque[tuple[Call, AsyncMail]]) -> Response:
    """The response of the call that was started first, which is taken out when it is there."""
    response = await _only(waiting[0][1])
    waiting.popleft()[0].cancel()
    return response


async def _each(requests: Any) -> AsyncGenerator[Mapping[str, Any], None]:
    if isinstance(requests, AsyncIterable):
        async for one in requests:
            yield one
    else:
        for one in requests:
            yield one


class SequenceState:
    """Where a sequence is: its id, whether it has begun, and whether it has ended."""

    def __init__(self, handle: ModelHandle, sequence_id: int | str) -> None:
        self._handle = handle
        self.id = sequence_id or secrets.randbits(63) | 1
        self._begun = False
        self._sent = False  # the server may have it
        self._ended = False

    def _next(self, options: RequestOptions, end: bool) -> InferOptions:
        """The options of the next request."""
        if self._ended:
            raise RuntimeError(f"sequence {self.id} has ended")
        first, self._begun, self._sent, self._ended = not self._begun, True, True, end
        return {**options, "sequence_id": self.id, "sequence_start": first, "sequence_end": end}

    def _failed(self, said: InferOptions, lives: bool) -> None:
        """A request has failed. Where the server refused it, it has neither begun nor ended the sequence, and the next one
        says it again; `lives`: whether the server has the sequence."""
        if said["sequence_start"]:
            self._begun = lives
        if said["sequence_end"]:
            self._ended = not lives and self._begun

    @property
    def _where(self) -> tuple[Any, ...]:
        """What tells whether the server has it."""
        return control.sequence_lives, self._handle.name, self._handle.version, self.id

    def _leave(self) -> None:
        """Ends the sequence if it is live. On the server's thread."""
        if not self._sent or self._ended:
            return
        self._ended = True
        handle = self._handle
        try:
            model = handle._engine.core.services.admission.lookup(handle.name, handle.version)
        except TritonError:
            return
        if model.scheduler.of_sequences is not None:
            model.scheduler.of_sequences.end_sequence(self.id)


class Sequence(SequenceState):
    """Requests to a stateful model that belong together. Leaving the context ends the sequence if no request did."""

    _handle: Model

    async def __aenter__(self) -> Sequence:
        return self

    @takes_request_options
    async def infer(
        self, inputs: Mapping[str, Any], end: bool = False, **options: Unpack[RequestOptions]
    ) -> Response:
        """The next request of the sequence; `end` marks the last one. As Model.infer()."""
        said = self._next(options, end)
        try:
            return await self._handle.infer(inputs, **said)
        except TritonError:
            self._failed(said, await self._handle._engine.reach(*self._where))
            raise

    @takes_request_options
    async def stream(
        self, inputs: Mapping[str, Any], end: bool = False, **options: Unpack[RequestOptions]
    ) -> AsyncIterator[Response]:
        """The next request, to a decoupled model. As Model.stream()."""
        said = self._next(options, end)
        try:
            async with aclosing(self._handle.stream(inputs, **said)) as responses:  # type: ignore[type-var]
                async for response in responses:
                    yield response
        except TritonError:
            self._failed(said, await self._handle._engine.reach(*self._where))
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle._engine.soon(self._leave)
