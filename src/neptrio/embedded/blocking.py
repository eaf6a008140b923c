"""A running server and its models for ordinary code: the same calls as in `Server` and `Model`, and they block.

The server runs on a thread of its own; any number of threads may call at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from neptrio.embedded import control
from neptrio.embedded.call import Call
from neptrio.embedded.engine import Engine
from neptrio.embedded.functions import FunctionModel, FunctionOptions, takes_function_options
from neptrio.embedded.mail import ThreadMail
from neptrio.embedded.model import AHEAD, ModelHandle, SequenceState, opened
from neptrio.embedded.options import InferOptions, RequestOptions, takes_infer_options, takes_request_options
from neptrio.embedded.response import Response
from neptrio.errors import TritonError
from neptrio.request.infer_request import InferResponse

if TYPE_CHECKING:
    from neptrio.embedded.server import Server


class BlockingModel(ModelHandle):
    """A model of a server that runs in this process. From RunningServer.model()."""

    @takes_infer_options
    def infer(self, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> Response:
        """The model's response to one request: see Model.infer(). Raises TritonError."""
        mail = ThreadMail()
        call = self._call(inputs, options, mail, one_response=True)
        try:
            call.start()
            return _only(mail)
        finally:
            call.cancel()

    @takes_infer_options
    def stream(self, inputs: Mapping[str, Any], **options: Unpack[InferOptions]) -> Iterator[Response]:
        """The responses of a decoupled model as they come: see Model.stream(). Raises TritonError."""
        mail = ThreadMail()
        call = self._call(inputs, options, mail, one_response=False)
        try:
            call.start()
            final = False
            while not final:
                response, final = opened(mail.get(), call)
                if response is not None:
                    yield response
        finally:
            call.cancel()

    @takes_infer_options
    def infer_each(
        self, requests: Iterable[Mapping[str, Any]], ahead: int = AHEAD, **options: Unpack[InferOptions]
    ) -> Iterator[Response]:
        """A response for each of many requests, in their order: see Model.infer_each(). Raises TritonError."""
        waiting: deque[tuple[Call, ThreadMail]] = deque()
        try:
            for inputs in requests:
                mail = ThreadMail()
                waiting.append((self._call(inputs, options, mail, one_response=True), mail))
                waiting[-1][0].start()
                if len(waiting) >= max(1, ahead):
                    yield _first(waiting)
            while waiting:
                yield _first(waiting)
        finally:
            for call, _ in waiting:
                call.cancel()

    def sequence(self, sequence_id: int | str = 0) -> BlockingSequence:
        """A new sequence of requests to a stateful model, to be used with `with`. 0: an id is chosen."""
        return BlockingSequence(self, sequence_id)

    def ready(self) -> bool:
        """Whether the model serves and says that it can."""
        return self._engine.ask(control.model_ready, self.name, self.version)

    def metadata(self) -> dict[str, Any]:
        """Its inputs and outputs, as GET v2/models/NAME tells them. Raises NotFound, Unavailable."""
        return self._engine.ask(control.model_metadata, self.name, self.version)

    def config(self) -> dict[str, Any]:
        """Its complete configuration, as GET v2/models/NAME/config tells it. Raises NotFound, Unavailable."""
        return self._engine.ask(control.model_config, self.name, self.version)


def _only(mail: ThreadMail) -> Response:
    """The one response of a call."""
    while True:
        response, final = opened(mail.get())
        if response is not None or final:
            return response if response is not None else Response(InferResponse([]))


def _first(waiting: deque[tuple[Call, ThreadMail]]) -> Response:
    """The response of the call that was started first, which is taken out when it is there."""
    response = _only(waiting[0][1])
    waiting.popleft()[0].cancel()
    return response


class BlockingSequence(SequenceState):
    """Requests to a stateful model that belong together. Leaving the context ends the sequence if no request did."""

    _handle: BlockingModel

    def __enter__(self) -> BlockingSequence:
        return self

    @takes_request_options
    def infer(
        self, inputs: Mapping[str, Any], end: bool = False, **options: Unpack[RequestOptions]
    ) -> Response:
        """The next request of the sequence; `end` marks the last one. As BlockingModel.infer()."""
        said = self._next(options, end)
        try:
            return self._handle.infer(inputs, **said)
        except TritonError:
            self._failed(said, self._handle._engine.ask(*self._where))
            raise

    @takes_request_options
    def stream(
        self, inputs: Mapping[str, Any], end: bool = False, **options: Unpack[RequestOptions]
    ) -> Iterator[Response]:
        """The next request, to a decoupled model. As BlockingModel.stream()."""
        said = self._next(options, end)
        try:
            yield from self._handle.stream(inputs, **said)
        except TritonError:
            self._failed(said, self._handle._engine.ask(*self._where))
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle._engine.soon(self._leave)


class RunningServer:
    """A server that runs on its own thread. From Server.running(); Server says what the methods do."""

    def __init__(self, engine: Engine, server: Server) -> None:
        self._engine = engine
        self._server = server

    def model(self, name: str, version: str = "") -> BlockingModel:
        """A model of this server. It need not be loaded yet."""
        return BlockingModel(self._engine, name, version)

    @takes_function_options
    def add(
        self, function: Callable[..., Any], *, replace: bool = False, **options: Unpack[FunctionOptions]
    ) -> BlockingModel:
        """Makes a function a model and loads it: see Server.add(). Raises TritonError, TypeError, ValueError."""
        made = FunctionModel(function, **options)
        replaces = replace or not self._engine.ask(control.serves, made.name)
        with self._server._added(made, replaces):
            self._engine.ask(control.load, made.name, None, None)
        return self.model(made.name)

    def remove(self, name: str) -> None:
        """Unloads a function model and forgets its function. Raises NotFound when there is none of that name."""
        self._server._removable(name)
        self._engine.ask(control.unload, name, False)
        self._server._forget(name)

    def stop(self) -> None:
        """Ends the server: see Server.stop()."""
        self._server.stop()

    def ready(self) -> bool:
        """Whether the server is ready for requests."""
        return self._engine.ask(control.ready)

    def metadata(self) -> dict[str, Any]:
        """Name, version and extensions, as GET v2 tells them."""
        return self._engine.ask(control.server_metadata)

    def index(self, ready_only: bool = False) -> list[dict[str, Any]]:
        """All models of the repositories with their versions, states and reasons."""
        return self._engine.ask(control.index, ready_only)

    def load(
        self,
        name: str,
        config: Mapping[str, Any] | str | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> BlockingModel:
        """Loads or reloads a model, and returns when it serves. Raises the load's TritonError."""
        self._engine.ask(control.load, name, config, files)
        return self.model(name)

    def unload(self, name: str, unload_dependents: bool = False) -> None:
        """Takes a model out of service; accepted requests are still answered."""
        self._engine.ask(control.unload, name, unload_dependents)

    def names(self, name: str) -> dict[str, Any]:
        """A model's version labels and aliases: see Server.names()."""
        return self._engine.ask(control.names, name)

    def set_names(
        self,
        name: str,
        labels: Mapping[str, int | None] | None = None,
        aliases: Mapping[str, bool | None] | None = None,
    ) -> dict[str, Any]:
        """Moves version labels and aliases: see Server.set_names()."""
        return self._engine.ask(control.set_names, name, labels or {}, aliases or {})

    def statistics(self, model: str = "", version: str = "", live: bool = False) -> dict[str, Any]:
        """The statistics of one model or of all."""
        return self._engine.ask(control.statistics, model, version, live)

    def sequences(self, model: str, version: str = "") -> dict[str, Any]:
        """A stateful model's live sequences."""
        return self._engine.ask(control.sequences, model, version)

    def trace_settings(self, changes: Mapping[str, Any] | None = None, model: str = "") -> dict[str, Any]:
        """Changes trace settings, of one model or of all, and returns them."""
        return self._engine.ask(control.trace_settings, changes or {}, model)

    def log_settings(self, changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Changes log settings and returns them."""
        return self._engine.ask(control.log_settings, changes or {})

    def metrics(self) -> str:
        """The metrics page."""
        return self._engine.ask(control.metrics)

    @property
    def addresses(self) -> dict[str, str]:
        """Where it listens: "http", "grpc", "metrics" -> "host:port", for those that are switched on."""
        return self._engine.addresses
