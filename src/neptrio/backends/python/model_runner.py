"""Calls a TritonPythonModel in the server's process: its requests in, its answers out.

A Back is a request's way back, which response senders use too. What a model's thread has to say goes to the trio
thread as a work item (ResponseDelivery, Reschedule).
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton_python_backend_utils as utils
from neptrio.backends.python import convert
from neptrio.backends.python.in_process_host import InProcessHost
from neptrio.backends.python.source import ModelSource
from neptrio.backends.python.tensors import measure
from neptrio.errors import Cancelled, Internal, InvalidArgument, Reason, TritonError, settled
from neptrio.execution.batch import Batch, complete
from neptrio.execution.model_host import ModelHost
from neptrio.foreign import text_of
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import InferRequest, InferResponse, RequestState
from triton_python_backend_utils._execute import (
    OPEN_ANSWER,
    RESCHEDULED_ANSWER,
    answers,
    begun,
    check_class,
    failed_text,
    failure_text,
    listed,
)
from triton_python_backend_utils._sender import Channel

log = logging.getLogger("neptrio.python")

OWN_FILES = ("cext/", str(Path(__file__).parents[2]))  # left out of tracebacks for a model's author
DONE = int(RequestState.DONE)


def dropped(request: InferRequest) -> TritonError:
    """The error of a request whose model dropped its response sender before the final response."""
    if request.cancelled:
        return Cancelled()
    return Internal(
        f"model '{request.model.name}' dropped the response sender of a request without sending "
        "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
        reason=Reason.BACKEND,
    )


class ResponseDelivery(WorkItem):
    """Carries a sender's response to the trio thread. Calls `done` there when the client has room for more."""

    def __init__(
        self, request: InferRequest, response: InferResponse, final: bool, done: Callable[[], None] | None
    ) -> None:
        self._request = request
        self._response = response
        self._final = final
        self._done = done

    def deliver(self) -> None:
        request = self._request
        complete(request, self._response, self._final)
        if self._done is not None and (
            self._final or not request.responder.wait_for_room(request, self._done)
        ):
            self._done()

    def lost(self) -> None:
        if self._done is not None:
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

    def set_together(self, together: bool) -> None:
        """Whether execute() works on the request and on others (decoupled models)."""
        if self._channel is not None:
            self._channel.together = together

    def close(self) -> None:
        """Closes the sender, because the request is answered in another way."""
        if self._channel is not None:
            self._channel.close()

    def _make(self, single: bool) -> Channel:
        request, completions = self._request, self._completions

        def cancelled() -> bool:
            return bool(request.cancelled)

        def post(response: utils.InferenceResponse | None, final: bool, size: int, handed_over: int) -> None:
            if response is None:
                made = InferResponse()
                made.null = True
            else:
                made = convert.response(request, response, False)
            made.produced_ns = handed_over

            def delivered() -> None:
                sender = channel()  # once: the model's thread may drop it at any moment
                if sender is not None:
                    sender.acknowledge(size)

            completions.post(ResponseDelivery(request, made, final, delivered))

        def finish() -> None:
            if request.state != DONE:
                completions.post(ResponseDelivery(request, InferResponse(None, dropped(request)), True, None))

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
        self.host.model_dir = os.path.join(args["model_repository"], args["model_version"])
        self.model: Any = None
        self._source: ModelSource | None = source
        self._args = args

    def load(self) -> None:
        """Imports the model file and makes the model object."""
        assert self._source is not None
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
        source, self.model, self._source = self._source, None, None
        if source is not None:
            source.unload()

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
        if decoupled and len(made) > 1:
            begun(made)
        return made

    def answer(self, batch: Batch, given: list[utils.InferenceRequest], responses: Any) -> None:
        """Checks what execute() returned and fills in the batch's responses."""
        batch.mark_output_start()
        requests = batch.requests
        kept: list[InferRequest] = []
        responses_of: list[InferResponse | None] = []

        def made(place: int, response: utils.InferenceResponse) -> InferResponse | str:
            try:
                return convert.response(requests[place], response, True)
            except (TritonError, ValueError, TypeError) as error:
                return failed_text(self.name, f"cannot use an output tensor: {text_of(error)}")

        responses = listed(responses, given, self.name, self.decoupled)  # lets go of what the model returned
        found = answers(given, responses, self.name, self.decoupled, made)
        for request, answer in zip(requests, found, strict=True):
            if answer is RESCHEDULED_ANSWER:
                self.completions.post(Reschedule(request))
                continue
            if answer is OPEN_ANSWER:
                if not self.decoupled:
                    continue  # the sender answers it, or has already
                answer = None
            elif type(answer) is str:
                answer = InferResponse(None, Internal(answer, reason=Reason.BACKEND))
            kept.append(request)
            responses_of.append(answer)
        if len(kept) != len(requests):
            batch.requests = kept
        batch.responses = responses_of

    def close(self, given: list[utils.InferenceRequest]) -> None:
        """Closes the senders of a failed batch's requests."""
        for request in given:
            request._channel.close()

    def failure(self, error: BaseException) -> TritonError:
        """The error of requests whose execute() raised."""
        if issubclass(type(error), TritonError):
            return settled(error)  # type: ignore[arg-type]
        return Internal(failure_text(self.name, error, OWN_FILES), reason=Reason.BACKEND)


def _answer_one(execute: Callable[[], Any]) -> None:
    """Has a runner answer a request, as instances do, of which nothing else is needed."""
    runner: Any = ModelRunner.__new__(ModelRunner)
    runner.name, runner.decoupled = "", False
    request = SimpleNamespace(outputs=None, model=SimpleNamespace(known_outputs=("",)))
    channel = SimpleNamespace(taken=False, sent=False, close=lambda: None)
    batch = SimpleNamespace(requests=[request], mark_output_start=lambda: None)
    runner.answer(batch, [SimpleNamespace(_release_flags=0, _channel=channel)], execute())


measure(_answer_one)
