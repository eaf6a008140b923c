"""The life of a model in a process of its own, as the server asks for it over the socket.

initialize, finalize, auto_complete_config, is_ready; what it answers and asks is sent from here, too. Batches come on
rings: ring_child.py. The main thread runs the model, a second thread receives messages. When the server has ended, the
process ends at once.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import queue
import socket
import sys
import threading
from collections.abc import Sequence
from typing import Any

from .. import _host
from .._config import ModelConfig
from .._errors import TritonModelException
from .._execute import check_class, check_completed, described, said_ready
from .._foreign import summary
from . import modules, threads, tracing
from .stop_signal import outlive
from .wire import Wire


class Child:
    """The process: its socket, its model, and the questions that are not answered."""

    def __init__(self, sock: socket.socket) -> None:
        self.wire = Wire(sock)
        self.numbers = itertools.count(1)
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.finished: queue.SimpleQueue[int] = queue.SimpleQueue()  # finalizers put, a thread sends
        self._checking = threading.Lock()  # held while the model's is_ready() runs
        self.asked: dict[int, Any] = {}
        self.decoupled = False
        self.name = ""
        self.model: Any = None
        self.asking = _host.Host()
        self.loop: asyncio.AbstractEventLoop | None = None
        self.loop_stopped = False  # by the model, which is not ready then
        self.tasks: set[Any] = set()  # of the loop
        self.hooks: set[Any] = set()  # those of them that are ends of sequences

    def send(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Sends a message. If the server has ended, the process has nothing left to do."""
        try:
            self.wire.send(message, descriptors)
        except OSError:
            os._exit(1)

    def ask(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Asks the server and waits for its answer. Raises TritonModelException if that is an error."""
        id = next(self.numbers)
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked[id] = answer.put
        self.send({"t": "ask", "k": id, **message}, descriptors)
        reply = answer.get()
        if reply["failure"] is not None:
            number, text = reply["failure"]
            error = TritonModelException(text)
            error._number = number
            raise error
        return reply["value"]

    # ------------------------------------------------------------ the receiving thread

    def receive(self) -> None:
        """Receives and handles messages until the server has ended."""
        while True:
            message = self.wire.receive()
            if message is None:
                os._exit(1)
            kind = message["t"]
            if kind == "reply":
                self.asked.pop(message["k"])(message)
            elif kind == "message_segment":
                self.descriptors_came(message)
            elif kind == "is_ready":
                self._ask_whether_ready(message["k"])
            else:
                self.inbox.put(message)

    def _ask_whether_ready(self, id: int) -> None:
        try:
            threads.start(self._is_ready, id)
        except threads.NoThread as error:
            print(f"is_ready was not asked: {error}", file=sys.stderr)
            self.send({"t": "is_ready", "k": id, "ready": False})

    def _is_ready(self, id: int) -> None:
        if not self._checking.acquire(blocking=False):  # the last question is not answered yet
            self.send({"t": "is_ready", "k": id, "ready": False})
            return
        try:
            check = getattr(self.model, "is_ready", None)
            if self.loop_stopped:
                ready = False
            elif check is None:
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
        self.send({"t": "is_ready", "k": id, "ready": ready})

    # ------------------------------------------------------------ RingChild has what follows

    def finish(self) -> None:
        """Sends what finalizers (__del__) report, which must not block. Runs on a thread of its own."""
        raise NotImplementedError

    def host(self) -> _host.Host:
        """Makes the Host through which the model asks the server."""
        raise NotImplementedError

    def prepare(self, message: dict[str, Any]) -> None:
        """Called before the model's initialize() with the message that asks for it. What it raises fails that."""
        raise NotImplementedError

    def begin(self) -> None:
        """Called when the model has been initialized and nobody knows it yet. What it raises fails initialize()."""
        raise NotImplementedError

    def serve(self) -> None:
        """Executes batches until the process ends."""
        raise NotImplementedError

    def leave(self) -> None:
        """Called in a process that the model has forked: what leads to the server is its parent's."""
        self.wire.leave()

    def descriptors_came(self, message: dict[str, Any]) -> None:
        """Descriptors that belong to a message on a ring."""
        raise NotImplementedError

    # ------------------------------------------------------------ the model

    def run(self) -> None:
        """The main thread."""
        outlive()
        self.asking = host = self.host()
        _host.enter(host)
        _host.install(host)
        os.register_at_fork(after_in_child=self.leave)
        for target in (self.receive, self.finish):
            threads.start(target)
        while True:
            message = self.inbox.get()
            kind = message["t"]
            if kind == "auto_complete":
                self._guarded(self._auto_complete, message)
            elif kind == "initialize":
                self._guarded(self._initialize, message)
                if self.model is not None:
                    self.serve()

    def _guarded(self, function: Any, message: dict[str, Any]) -> None:
        try:
            answer = function(message)
            if inspect.isawaitable(answer):
                assert self.loop is not None
                answer = self.loop.run_until_complete(answer)
            self.send(answer)  # which may hold a model's own objects, that cannot be sent
        except BaseException as error:
            self.model = None if message["t"] == "initialize" else self.model
            self.send({"t": "failed", "text": described(error)})

    def _load(self, path: str) -> Any:
        """Executes the model's file and returns its module."""
        return modules.load(path)

    def _auto_complete(self, message: dict[str, Any]) -> dict[str, Any]:
        self.asking.model_dir = message["folder"]
        self.asking.lent = message.get("descriptors", ())
        complete = getattr(
            getattr(self._load(message["path"]), "TritonPythonModel", None), "auto_complete_config", None
        )
        if complete is None:
            return {"t": "completed", "config": None}
        returned = complete(ModelConfig(message["config"], message["folder"]))
        return {"t": "completed", "config": check_completed(returned, message["name"])}

    def _initialize(self, message: dict[str, Any]) -> Any:
        self.name = message["name"]
        self.decoupled = message["decoupled"]
        self.asking.model_dir = message["folder"]
        self.prepare(message)
        tracing.start(message["spans"])
        model = check_class(self._load(message["path"]), message["path"])()
        self.model = model
        if inspect.iscoroutinefunction(model.execute):
            return self._initialize_async(model, message)
        if hasattr(model, "initialize"):
            model.initialize(message["args"])
        return self._initialized(False)

    def _initialize_async(self, model: Any, message: dict[str, Any]) -> Any:
        """A plain initialize() is called before the loop runs: it may run coroutines, as on a Triton server."""
        self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)
        answer = model.initialize(message["args"]) if hasattr(model, "initialize") else None
        if self.loop.is_closed():  # by the model, which took it for one of its own
            self.loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

        async def initialized() -> dict[str, Any]:
            if inspect.isawaitable(answer):
                await answer
            return self._initialized(True)

        return initialized()

    def _initialized(self, is_async: bool) -> dict[str, Any]:
        self.begin()
        hook = callable(getattr(self.model, "on_sequence_end", None))
        exclusive = self.asking.exclusive
        return {"t": "initialized", "async": is_async, "sequence_end": hook, "exclusive": exclusive}

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

    # ------------------------------------------------------------ async def execute

    def dispatch(self, message: dict[str, Any]) -> None:
        """Begins what a message asks for. The event loop."""
        assert self.loop is not None
        if message["t"] == "sequence_end":
            task = self.loop.create_task(self._sequence_end_async(message))
            self.hooks.add(task)
            task.add_done_callback(self.hooks.discard)
        else:
            task = self.loop.create_task(self._finalize_async())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _sequence_end_async(self, message: dict[str, Any]) -> None:
        try:
            await _awaited(lambda: self.model.on_sequence_end(message["c"], message["reason"]))
        except Exception as error:
            self._hook_failed(error)

    async def _finalize_async(self) -> None:
        try:
            if self.hooks:
                await asyncio.wait(self.hooks)
            if hasattr(self.model, "finalize"):
                answer, failure = await _beside_loop(self.model.finalize)
                if failure is not None:
                    raise failure
                if inspect.isawaitable(answer):
                    await answer
            self.send({"t": "finalized"})
        except BaseException as error:
            self.send({"t": "failed", "text": described(error)})
        self._exit()


async def _beside_loop(function: Any) -> tuple[Any, BaseException | None]:
    """Has a thread call a plain function: it may run coroutines, or wait for what this loop does. As on a Triton server, where
    the loop has a thread of its own. That of a coroutine is called here. Returns what it returned, and what it raised."""
    if inspect.iscoroutinefunction(function):
        return function(), None
    loop = asyncio.get_running_loop()
    called: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
    try:
        threads.start(lambda: loop.call_soon_threadsafe(called.set_result, _outcome(function)))
    except threads.NoThread:
        return _outcome(function)
    return await called


def _outcome(function: Any) -> tuple[Any, BaseException | None]:
    try:
        return function(), None
    except BaseException as error:
        return None, error


async def _awaited(function: Any) -> Any:
    result = function()
    return await result if inspect.isawaitable(result) else result
