"""The process of an isolated model.

The main thread runs the model: initialize, execute one batch after the other, finalize; or an event loop for
`async def execute`. A second thread receives messages. When the server has ended, the process ends at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import itertools
import os
import queue
import socket
import sys
import threading
import time
import weakref
from typing import Any

from .. import _host
from .._config import ModelConfig
from .._errors import TritonError, TritonModelException
from .._execute import (
    check_class,
    check_completed,
    check_count,
    check_none,
    described,
    failure_text,
    response_of_rescheduled,
    said_ready,
)
from .._foreign import summary, text_of, type_name
from .._request import (
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceResponse,
    InferenceTrace,
)
from .._sender import Channel
from . import tracing
from .host import ChildHost
from .own_socket import own_socket
from .stop_signal import outlive
from .tensors import response_out, tensors_in
from .wire import Wire


def contexts(requests: list[InferenceRequest]) -> list[Any]:
    """The trace contexts of requests, None where there is none."""
    return [None if request._trace is None else request._trace.get_context() for request in requests]


class Back:
    """What a received request needs from the server: whether it is cancelled, and a sender (see _sender.Channel).

    The channel is made when the model first asks for a sender. Subclasses say how, and how they hear of cancellation.
    """

    __slots__ = ("__weakref__", "cancelled", "channel", "id", "names")

    id: int
    names: Any  # of the outputs that the client wants
    cancelled: bool
    channel: Channel | None

    def _make(self) -> Channel:
        raise NotImplementedError

    def sender(self, request: Any) -> Any:
        if self.channel is None:
            self.channel = self._make()
        return self.channel.sender(request)

    @property
    def taken(self) -> bool:
        return self.channel is not None and self.channel.taken

    def close(self) -> None:
        if self.channel is not None:
            self.channel.close()


class _Back(Back):
    """The way back over the socket."""

    __slots__ = ("_child",)

    def __init__(self, child: Child, row: dict[str, Any]) -> None:
        self.id = row["r"]
        self.names = row["w"]
        self.cancelled = False
        self.channel = None
        self._child = child
        if child.decoupled:
            self.channel = self._make()
        child.backs[self.id] = self

    def is_cancelled(self) -> bool:
        return self.cancelled

    def _make(self) -> Channel:
        child, id, names = self._child, self.id, self.names
        back = weakref.ref(self)
        known, read = child.cancelled, child.still_read

        def post(response: InferenceResponse | None, final: bool, size: int) -> None:
            rows: list[dict[str, Any]] = []
            out = None if response is None else response_out(response, names, rows)
            if final:
                known.discard(id)
                read.discard(id)
            child.send({"t": "send", "r": id, "a": out, "final": final, "size": size}, rows)

        def cancelled() -> bool:
            here = back()
            return here.cancelled if here is not None else id in known

        def unread() -> bool:
            return cancelled() and id not in read

        def finish() -> None:
            known.discard(id)
            read.discard(id)
            child.finished.put(id)

        channel = Channel(post, cancelled, unread, finish, not child.decoupled)
        child.channels[id] = channel
        return channel


class Child:
    """The process: its socket, its model, and the requests and calls that are not finished."""

    def __init__(self, sock: socket.socket) -> None:
        self.wire = Wire(sock)
        self.numbers = itertools.count(1)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[int] = queue.SimpleQueue()  # finalizers put, a thread sends
        self.backs: weakref.WeakValueDictionary[int, _Back] = weakref.WeakValueDictionary()
        self.channels: weakref.WeakValueDictionary[int, Channel] = weakref.WeakValueDictionary()
        self.cancelled: set[int] = set()
        self.still_read: set[int] = set()  # those of the cancelled requests whose responses are still read
        self._checking = threading.Lock()  # held while the model's is_ready() runs
        self.calls: dict[int, Any] = {}
        self.asked: dict[int, Any] = {}
        self.batch: int | None = None
        self.decoupled = False
        self.name = ""
        self.model: Any = None
        self.loop: asyncio.AbstractEventLoop | None = None

    def send(self, message: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """Sends a message. If the server has ended, the process has nothing left to do."""
        try:
            self.wire.send(message, rows)
        except OSError:
            os._exit(1)

    def ask(self, message: dict[str, Any], rows: list[dict[str, Any]] | None = None) -> Any:
        """Asks the server and waits for its answer. Raises TritonModelException if that is an error."""
        id = next(self.numbers)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked[id] = answer.put
        self.send({"t": "ask", "k": id, **message}, rows or [])
        reply = answer.get()
        if reply.get("error") is not None:
            raise TritonModelException(reply["error"])
        return reply.get("value")

    # ------------------------------------------------------------ the receiving thread

    def receive(self) -> None:
        """Receives and handles messages until the server has ended."""
        while True:
            message = self.wire.receive()
            if message is None:
                os._exit(1)
            kind = message["t"]
            if kind == "call_response":
                self._call_response(message)
            elif kind == "reply":
                self.asked.pop(message["k"])(message)
            elif kind == "ack":
                self._acknowledge(message)
            elif kind == "cancel":
                self._cancel(message["r"], message["read"])
            elif kind == "message_segment":
                self.descriptors_came(message)
            elif kind == "is_ready":
                threading.Thread(target=self._is_ready, args=(message["k"],), daemon=True).start()
            else:
                self.pass_on(message)

    def _acknowledge(self, message: dict[str, Any]) -> None:
        # a function of its own, so that no variable of receive()'s loop keeps the channel alive
        channel = self.channels.get(message["r"])
        if channel is not None:
            channel.acknowledge(message["size"])

    def _call_response(self, message: dict[str, Any]) -> None:
        final = message["final"]
        deliver = self.calls.pop(message["k"], None) if final else self.calls.get(message["k"])
        row = message["a"]
        if deliver is None:
            return
        if row is None:
            deliver(None, final)
            return
        error = None if row.get("e") is None else TritonError(*row["e"])
        response = InferenceResponse(
            tensors_in(self.wire, row.get("o") or (), message["blob"]), error, row.get("p")
        )
        deliver(response, final)

    def _cancel(self, id: int, read: bool) -> None:
        (self.still_read.add if read else self.still_read.discard)(id)
        self.cancelled.add(id)
        back = self.backs.get(id)
        if back is not None:
            back.cancelled = True
        channel = self.channels.get(id)
        if channel is not None:
            channel.wake()
        elif back is None:
            self.cancelled.discard(id)
            self.still_read.discard(id)

    def _is_ready(self, id: int) -> None:
        if not self._checking.acquire(blocking=False):  # the last question is not answered yet
            self.send({"t": "is_ready", "k": id, "ready": False}, [])
            return
        try:
            check = getattr(self.model, "is_ready", None)
            if check is None:
                ready = self.model is not None
            elif self.loop is not None:
                ready = said_ready(asyncio.run_coroutine_threadsafe(_awaited(check), self.loop).result())
            else:
                answer = check()
                ready = said_ready(
                    asyncio.run(_awaited(lambda: answer)) if inspect.isawaitable(answer) else answer
                )
        except BaseException as error:  # on the receiving thread, without which nobody would hear of anything
            print(f"is_ready failed: {summary(error)}", file=sys.stderr)
            ready = False
        finally:
            self._checking.release()
        self.send({"t": "is_ready", "k": id, "ready": ready}, [])

    def finish(self) -> None:
        """Sends what finalizers (__del__) report, which must not block. Runs on a thread of its own."""
        while True:
            id = self.finished.get()
            if id < 0:
                self.send({"t": "forget", "id": -id}, [])
            else:
                self.send({"t": "dropped", "r": id}, [])

    # ------------------------------------------------------------ RingChild overrides these

    def pass_on(self, message: dict[str, Any]) -> None:
        """Passes a message that is for the model to its thread. The receiving thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._dispatch, message)
        else:
            self.inbox.put(message)

    def host(self) -> ChildHost:
        """Makes the Host through which the model asks the server."""
        return ChildHost(self)

    def prepare(self, message: dict[str, Any]) -> None:
        """Called before the model's initialize() with the message that asks for it."""

    def serve(self) -> None:
        """Called after initialize(): executes batches until the process ends."""
        if inspect.iscoroutinefunction(self.model.execute):
            self._run_loop()

    def descriptors_came(self, message: dict[str, Any]) -> None:
        """Descriptors that belong to a message on a ring."""
        raise TritonModelException("this process has no rings")

    # ------------------------------------------------------------ the model

    def run(self) -> None:
        """The main thread."""
        outlive()
        host = self.host()
        _host.enter(host)
        _host.install(host)
        for target in (self.receive, self.finish):
            threading.Thread(target=target, daemon=True).start()
        while True:
            message = self.inbox.get()
            kind = message["t"]
            if kind == "auto_complete":
                self._guarded(self._auto_complete, message)
            elif kind == "initialize":
                self.prepare(message)
                self._guarded(self._initialize, message)
                if self.model is not None:
                    self.serve()
            elif kind == "execute":
                self._execute(message)
            elif kind == "sequence_end":
                self._sequence_end(message)
            elif kind == "finalize":
                self._guarded(self._finalize, message)
                self._exit()

    def _guarded(self, function: Any, message: dict[str, Any]) -> None:
        try:
            answer = function(message)
            if inspect.isawaitable(answer):
                assert self.loop is not None
                answer = self.loop.run_until_complete(answer)
            self.send(answer, [])  # which may hold a model's own objects, that cannot be sent
        except BaseException as error:
            self.model = None if message["t"] == "initialize" else self.model
            self.send({"t": "failed", "text": described(error)}, [])

    def _load(self, path: str) -> Any:
        folder = os.path.dirname(path)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        name = os.path.splitext(os.path.basename(path))[0]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module

    def _auto_complete(self, message: dict[str, Any]) -> dict[str, Any]:
        complete = getattr(
            getattr(self._load(message["path"]), "TritonPythonModel", None), "auto_complete_config", None
        )
        if complete is None:
            return {"t": "completed", "config": None}
        returned = complete(ModelConfig(message["config"]))
        return {"t": "completed", "config": check_completed(returned, message["name"])}

    def _initialize(self, message: dict[str, Any]) -> Any:
        self.name = message["name"]
        self.decoupled = message["decoupled"]
        tracing.start(message["spans"])
        model = check_class(self._load(message["path"]), message["path"])()
        self.model = model
        if inspect.iscoroutinefunction(model.execute):
            return self._initialize_async(model, message)
        if hasattr(model, "initialize"):
            model.initialize(message["args"])
        return self._initialized(False)

    def _initialize_async(self, model: Any, message: dict[str, Any]) -> Any:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)

        async def initialize() -> dict[str, Any]:
            if hasattr(model, "initialize"):
                await _awaited(lambda: model.initialize(message["args"]))
            return self._initialized(True)

        self.loop = loop
        return initialize()

    def _initialized(self, is_async: bool) -> dict[str, Any]:
        hook = callable(getattr(self.model, "on_sequence_end", None))
        return {"t": "initialized", "async": is_async, "sequence_end": hook}

    def _sequence_end(self, message: dict[str, Any]) -> None:
        try:
            self.model.on_sequence_end(message["c"], message["reason"])
        except Exception as error:
            self._hook_failed(error)

    def _hook_failed(self, error: BaseException) -> None:
        print(f"the sequence end hook of {self.name} failed: {summary(error)}", file=sys.stderr, flush=True)

    def _finalize(self, message: dict[str, Any]) -> Any:
        if hasattr(self.model, "finalize"):
            self.model.finalize()
        return {"t": "finalized"}

    def _exit(self) -> None:
        tracing.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _requests(self, message: dict[str, Any]) -> list[InferenceRequest]:
        made = []
        for row in message["requests"]:
            request = InferenceRequest.__new__(InferenceRequest)
            request._inputs = tensors_in(self.wire, row["in"], message["blob"])
            request._request_id = row["id"]
            request._correlation_id = row["c"]
            request._requested_output_names = row["o"]
            request._model_name = message["model"]
            request._model_version = message["version"]
            request._flags = row["f"]
            request._timeout = row["timeout"]
            request._preferred_memory = None
            request._trace = InferenceTrace(row["r"], row["context"]) if row["trace"] else None
            request._parameters = row["p"]
            request._channel = _Back(self, row)
            request._release_flags = 1
            made.append(request)
        return made

    def _answer(self, given: list[InferenceRequest], responses: Any) -> tuple[list[Any], list[Any]]:
        """The answers of a batch, as messages, and the rows of the tensors in them."""
        rows: list[dict[str, Any]] = []
        if self.decoupled:
            check_none(responses, self.name)
            responses = [None] * len(given)
        elif responses is None and all(r._channel.taken for r in given):
            responses = [None] * len(given)
        else:
            responses = check_count(responses, len(given))
        answers: list[Any] = []
        for request, response in zip(given, responses):  # noqa: B905  # Python 3.9 has no strict
            back = request._channel
            if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
                back.close()
                answers.append(
                    "reschedule" if response is None else self._failed(response_of_rescheduled(response))
                )
            elif self.decoupled or (response is None and back.taken):
                answers.append("open")
            elif isinstance(response, InferenceResponse):
                back.close()
                mark = len(rows)
                try:
                    answers.append(response_out(response, back.names, rows))
                except Exception as error:
                    del rows[mark:]
                    answers.append(self._failed(f"cannot use an output tensor: {text_of(error)}"))
            elif response is None:
                answers.append(self._failed("execute() returned None for a request"))
            else:
                answers.append(
                    self._failed(
                        f"execute() must return InferenceResponse objects, got {type_name(response)}"
                    )
                )
        return answers, rows

    def _failed(self, reason: str) -> dict[str, Any]:
        return {
            "e": [f"Failed to process the request(s) for model '{self.name}', message: {reason}", 1],
            "p": None,
        }

    def _execute(self, message: dict[str, Any]) -> None:
        times = [time.monotonic_ns()]
        given: list[InferenceRequest] = []
        self.batch = message["batch"]
        try:
            given = self._requests(message)
            message["blob"] = message["requests"] = None
            times.append(time.monotonic_ns())
            span = tracing.enter(contexts(given))
            try:
                responses = self.model.execute(given)
            finally:
                tracing.leave(span)
            times.append(time.monotonic_ns())
            answers, rows = self._answer(given, responses)
        except BaseException as error:
            self._batch_failed(message["batch"], given, error, times)
        else:
            self._batch_done(message["batch"], answers, rows, times)
        finally:
            self.batch = None

    def _batch_done(self, id: int, answers: list[Any], rows: list[Any], times: list[int]) -> None:
        times.append(time.monotonic_ns())
        self.send({"t": "result", "batch": id, "answers": answers, "times": times}, rows)

    def _batch_failed(
        self, id: int, given: list[InferenceRequest], error: BaseException, times: list[int]
    ) -> None:
        for request in given:
            request._channel.close()
        times += [time.monotonic_ns()] * (4 - len(times))
        self.send({"t": "result", "batch": id, "error": failure_text(self.name, error), "times": times}, [])

    # ------------------------------------------------------------ async def execute

    def _run_loop(self) -> None:
        assert self.loop is not None
        while not self.inbox.empty():  # messages that came before the loop was set
            self.loop.call_soon(self._dispatch, self.inbox.get())
        self.loop.run_forever()

    def _dispatch(self, message: dict[str, Any]) -> None:
        assert self.loop is not None
        if message["t"] == "execute":
            task = self.loop.create_task(self._execute_async(message))
        elif message["t"] == "sequence_end":
            task = self.loop.create_task(self._sequence_end_async(message))
            self.hooks.add(task)
            task.add_done_callback(self.hooks.discard)
        else:
            task = self.loop.create_task(self._finalize_async())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    tasks: set[Any] = set()  # noqa: RUF012
    hooks: set[Any] = set()  # noqa: RUF012

    async def _sequence_end_async(self, message: dict[str, Any]) -> None:
        try:
            await _awaited(lambda: self.model.on_sequence_end(message["c"], message["reason"]))
        except Exception as error:
            self._hook_failed(error)

    async def _execute_async(self, message: dict[str, Any]) -> None:
        times = [time.monotonic_ns()]
        given: list[InferenceRequest] = []
        try:
            given = self._requests(message)
            message["blob"] = message["requests"] = None
            times.append(time.monotonic_ns())
            tracing.enter(contexts(given))  # of this task; it ends with it
            responses = await self.model.execute(given)
            times.append(time.monotonic_ns())
            times[:3] = getattr(responses, "times", times[:3])
            answers, rows = self._answer(given, responses)
        except BaseException as error:
            self._batch_failed(message["batch"], given, error, times)
        else:
            self._batch_done(message["batch"], answers, rows, times)

    async def _finalize_async(self) -> None:
        try:
            if self.hooks:
                await asyncio.wait(self.hooks)
            if hasattr(self.model, "finalize"):
                await _awaited(self.model.finalize)
            self.send({"t": "finalized"}, [])
        except BaseException as error:
            self.send({"t": "failed", "text": described(error)}, [])
        self._exit()


async def _awaited(function: Any) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result


def main(descriptor: int) -> None:
    """Runs the process on the socket of that number."""
    Child(own_socket(descriptor)).run()
