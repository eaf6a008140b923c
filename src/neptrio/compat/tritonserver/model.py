"""A model of the server as an object."""

from __future__ import annotations

import asyncio
import queue
from typing import TYPE_CHECKING, Any

from neptrio.compat.tritonserver.enums import ModelBatchFlag, ModelTxnPropertyFlag
from neptrio.compat.tritonserver.errors import InvalidArgumentError, converting
from neptrio.compat.tritonserver.request import LATEST, InferenceRequest
from neptrio.compat.tritonserver.response import AsyncResponseIterator, ResponseFeed, ResponseIterator, queued
from neptrio.embedded import control
from neptrio.embedded.call import Call
from neptrio.embedded.mail import Mail, ThreadMail, mail_here
from neptrio.request.infer_request import ModelCore
from neptrio.request.validate import validate

if TYPE_CHECKING:
    from neptrio.compat.tritonserver.server import Server


class Model:
    """A model, from Server.model(), models() or load(). `version` -1: whichever the version policy serves."""

    def __init__(
        self,
        server: Server,
        name: str,
        version: int = LATEST,
        state: str | None = None,
        reason: str | None = None,
    ) -> None:
        self._running = server._running()
        self.name = name
        self.version = version
        self.state = state
        self.reason = reason

    def __repr__(self) -> str:
        shown = {"name": self.name, "version": self.version, "state": self.state}
        return str(shown | ({"reason": self.reason} if self.reason else {}))

    def _resolved(self, name: str, version: str) -> Model:
        """This model, as a response names it."""
        made = object.__new__(Model)
        made.__dict__.update(self.__dict__)
        made.name, made.version = name, int(version) if version.isdecimal() else self.version
        return made

    def create_request(self, **kwargs: Any) -> InferenceRequest:
        """A request to this model; arguments are the fields of InferenceRequest."""
        kwargs.pop("model", None)
        return InferenceRequest(self, **kwargs)

    def infer(
        self,
        inference_request: InferenceRequest | None = None,
        raise_on_error: bool = True,
        **kwargs: Any,
    ) -> ResponseIterator:
        """Sends a request and returns an iterator over its responses at once.

        Without `inference_request` one is made of the other arguments. With `raise_on_error` the iterator raises the
        errors of responses, else they are in InferenceResponse.error.

        Raises InvalidArgumentError, NotFoundError and so on for a request that the model cannot take.
        """
        request = self._request(inference_request, kwargs, queue.SimpleQueue, "infer")
        mail = ThreadMail()
        call, feed = self._begin(request, mail)
        return ResponseIterator(call, feed, mail, raise_on_error)

    def async_infer(
        self,
        inference_request: InferenceRequest | None = None,
        raise_on_error: bool = True,
        **kwargs: Any,
    ) -> AsyncResponseIterator:
        """The same for a coroutine: the iterator is for `async for`."""
        request = self._request(inference_request, kwargs, asyncio.Queue, "async_infer")
        mail = mail_here(self._running.engine.token)
        call, feed = self._begin(request, mail)
        return AsyncResponseIterator(call, feed, mail, raise_on_error)

    def _request(
        self, given: InferenceRequest | None, fields: dict[str, Any], queue_class: type, method: str
    ) -> InferenceRequest:
        request = InferenceRequest(self, **fields) if given is None else given
        if request.response_queue is not None and not isinstance(request.response_queue, queue_class):
            raise InvalidArgumentError(
                f"response_queue of {method}() must be {queue_class.__module__.lstrip('_')}.{queue_class.__name__}, "
                f"got {type(request.response_queue).__name__}"
            )
        return request

    def _begin(self, request: InferenceRequest, mail: Mail) -> tuple[Call, ResponseFeed]:
        engine = self._running.engine
        core = request._core()
        with converting():
            # here and not only when it is submitted, so that the caller learns what is wrong at once
            validate(core, self._serving())
            feed = ResponseFeed(self, request.request_id or "", mail)
            feed.allocator = request.output_memory_allocator
            if request.response_queue is not None:
                feed.queue = queued(request.response_queue)
            feed.call = call = Call(engine, core, feed, one_response=False, timeout=None)
            call.start()
        return call, feed

    def _serving(self) -> ModelCore:
        return self._running.engine.core.services.admission.sought(self.name, self._version)

    @property
    def _version(self) -> str:
        return "" if self.version == LATEST else str(self.version)

    def ready(self) -> bool:
        """Whether the model serves and says that it can."""
        return self._running.ask(control.model_ready, self.name, self._version)

    def metadata(self) -> dict[str, Any]:
        """Its inputs and outputs, as the metadata extension tells them. Raises NotFoundError, UnavailableError."""
        return self._running.ask(control.model_metadata, self.name, self._version)

    def config(self, config_version: int = 1) -> dict[str, Any]:
        """Its complete configuration. Raises InvalidArgumentError for another version of the format than 1."""
        if config_version != 1:
            raise InvalidArgumentError(f"configurations have version 1, got {config_version!r}")
        return self._running.ask(control.model_config, self.name, self._version)

    def statistics(self) -> dict[str, Any]:
        """Its statistics, as the statistics extension tells them."""
        return self._running.ask(control.statistics, self.name, self._version, False)

    def batch_properties(self) -> ModelBatchFlag:
        """FIRST_DIM if the first dimension of its tensors is the batch, else UNKNOWN."""
        with converting():
            batches = self._serving().max_batch_size > 0
        return ModelBatchFlag.FIRST_DIM if batches else ModelBatchFlag.UNKNOWN

    def transaction_properties(self) -> ModelTxnPropertyFlag:
        """DECOUPLED if a request may have any number of responses, else ONE_TO_ONE."""
        with converting():
            decoupled = self._serving().decoupled
        return ModelTxnPropertyFlag.DECOUPLED if decoupled else ModelTxnPropertyFlag.ONE_TO_ONE
