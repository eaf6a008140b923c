"""The running server behind `neptrio.Server`: on the caller's own trio loop, or on a thread with a loop of its own.

Rules:
 1. soon() may be called from any thread while the engine is open; what it is given runs on the server's thread.
 2. A call that was entered gets an answer: when the engine closes, those that are left fail with Unavailable.
 3. After close() every use raises Unavailable.
 4. Verbs that are no inference are entered as requests are, run as tasks of the engine and answer into a mail: whoever
    waits, on a thread, on trio or on asyncio, is woken without a thread of its own.
 5. A process that was forked has the objects and not the server's thread: there every use raises RuntimeError at once.
 6. What callers' threads do here takes no lock: Ctrl-C in `with lock:` leaves it locked for ever where Python looks for signals
    between taking it and the block (3.14: python/cpython#148874), and a finalizer may call in the middle of another call.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import trio

from neptrio import startup
from neptrio.embedded.asgi import AsgiFront
from neptrio.embedded.mail import Mail, ThreadMail, mail_here
from neptrio.errors import Unavailable
from neptrio.loop import threads
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import monotonic_ns
from neptrio.server import Server as CoreServer
from neptrio.settings import Settings

T = TypeVar("T")
log = logging.getLogger("neptrio.server")
STOPPED = "the server has stopped"
FORKED = "this server was made in another process, which forked this one: make a server here, or use a client"


class Entered(Protocol):
    """What is under way on the engine, and fails when it closes."""

    def fail(self, error: Exception) -> None:
        """Ends it for its caller. On any thread, harmless when it has ended."""


class _Soon(WorkItem):
    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def deliver(self) -> None:
        self._function()


class _Verb:
    """A verb under way: its mail gets (result, None) or (None, error), once."""

    def __init__(
        self, engine: Engine, mail: Mail, function: Callable[..., Awaitable[Any]], args: tuple[Any, ...]
    ) -> None:
        self._engine = engine
        self._mail = mail
        self._function = function
        self._args = args
        self._scope = trio.CancelScope()
        self._ended = False

    def start(self) -> None:
        """Has the server's thread start it. Raises Unavailable when the server has stopped."""
        self._engine.enter(self)
        self._engine.soon(self._begin)

    def _begin(self) -> None:
        if not self._ended:
            self._engine.verbs.start_soon(self._run)

    async def _run(self) -> None:
        try:
            with self._scope:
                self._end(await self._function(self._engine.core, *self._args), None)
        except Exception as error:
            self.fail(error)
        finally:
            self.fail(Unavailable(STOPPED))  # cancelled: with the engine, or nobody waits any more

    def _end(self, result: Any, error: Exception | None) -> None:
        if not self._ended:
            self._ended = True
            self._engine.leave(self)
            self._mail.put((result, error))

    def fail(self, error: Exception) -> None:
        """Ends it for its caller."""
        self._end(None, error)

    def cancel(self) -> None:
        """Its caller does not wait any more."""
        if not self._ended:
            self._engine.later(self._scope.cancel)


class Engine:
    """A server that runs, and the ways into its thread. Made on that thread."""

    def __init__(self, settings: Settings) -> None:
        self.core = CoreServer(settings)
        self.asgi = AsgiFront(self.core.services, self.core.verbs)
        self.core.fronts.append(self.asgi)
        self.token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        self._process = os.getpid()
        self.verbs: trio.Nursery
        # Callers are on any thread and change these without a lock (rule 6): each change is one step for all threads.
        self._calls: set[Entered] = set()
        self._closed = False

    async def run(self, task_status: trio.TaskStatus[Engine]) -> None:
        """Loads the models, serves until stop(), drains and unloads. Reports the start when all models are loaded."""
        try:
            async with trio.open_nursery() as self.verbs:
                await self.core.serve(lambda: task_status.started(self))
                self.verbs.cancel_scope.cancel()
        finally:
            self.close()

    @property
    def addresses(self) -> dict[str, str]:
        """Where the server listens: "http", "grpc", "metrics" -> "host:port", for those that are switched on."""
        core = self.core
        listeners = {"http": core.http_listener, "grpc": core.grpc_listener, "metrics": core.metrics_listener}
        return {
            name: startup.address(listener.getsockname())
            for name, listener in listeners.items()
            if listener is not None
        }

    @property
    def here(self) -> bool:
        """Whether this is the server's own thread."""
        return threading.get_ident() == self._thread and os.getpid() == self._process

    def stop(self) -> None:
        """Begins the shutdown. On the server's thread; harmless when it has begun."""
        if not self.core.stopping.is_set():
            self.core.stop()

    def close(self) -> None:
        """Fails the calls that are left (rule 2)."""
        self._closed = True  # first: who enters after the copy sees it
        for call in self._calls.copy():
            call.fail(Unavailable(STOPPED))

    def enter(self, call: Entered) -> None:
        """Counts a call as under way. Raises Unavailable, and RuntimeError in a forked process (rule 5)."""
        if os.getpid() != self._process:
            raise RuntimeError(FORKED)
        self._calls.add(call)  # first: close() fails it, or this sees that it was closed
        if self._closed:
            self._calls.discard(call)
            raise Unavailable(STOPPED)

    def leave(self, call: Entered) -> None:
        """The call has ended."""
        self._calls.discard(call)

    def soon(self, function: Callable[[], object]) -> None:
        """Runs `function` on the server's thread: at once if this is it, else with the next completions."""
        if self.here:
            function()
            self.core.loop.loop_pass.soon()
        else:
            self.later(function)

    def later(self, function: Callable[[], object]) -> None:
        """Runs `function` on the server's thread with the next completions, whatever thread this is. For all that a
        finalizer may call: iterators and generators end at any moment, in the middle of a scheduler's loop too.
        Nothing happens in a forked process."""
        if os.getpid() == self._process and not self._closed:
            self.core.completions.post(_Soon(function))

    def look_at_clock(self) -> None:
        """Runs the timers that are due, and what they have caused. On the server's thread, when the clock jumped."""
        loop = self.core.loop
        if loop.timers.fire_due(monotonic_ns()):
            loop.loop_pass.end()

    def ask(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The result of `function(core, *args)`, which runs on the server's loop. For other threads than the server's.

        Raises what it raises, or Unavailable.
        """
        if self.here:
            raise RuntimeError(
                "this would block the server's own thread; use the object of `async with` there"
            )
        mail = ThreadMail()
        verb = _Verb(self, mail, function, args)
        try:
            verb.start()
            return _result(mail.get())
        finally:
            verb.cancel()

    async def reach(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The same for a task, of whichever loop."""
        mail = mail_here(self.token)
        verb = _Verb(self, mail, function, args)
        try:
            verb.start()
            return _result(await mail.get())
        finally:
            verb.cancel()


def _result(item: tuple[Any, Exception | None]) -> Any:
    result, error = item
    if error is not None:
        try:
            raise error
        finally:
            del item, error  # the error knows this frame
    return result


class OwnThread:
    """Runs an engine on a thread with a trio loop of its own."""

    def __init__(self, settings: Settings, clock: trio.abc.Clock | None = None) -> None:
        """`clock`: the loop's, None for trio's own."""
        self._settings = settings
        self._clock = clock
        self._engine: Engine | None = None  # from the moment it begins to load models
        self._serving = False
        self._stop_asked = False
        self._error: BaseException | None = None
        self._started = threading.Event()
        self._thread = threads.make(self._run, name="neptrio-server")

    def start(self) -> Engine:
        """Waits until the models are loaded. Raises what the start raised."""
        threads.begin(self._thread)
        try:
            self._started.wait()
        except BaseException:  # KeyboardInterrupt
            self.stop()
            raise
        if not self._serving or self._engine is None:
            self._thread.join()
            raise Unavailable(STOPPED) if self._stop_asked or self._error is None else self._error
        return self._engine

    def _run(self) -> None:
        async def main() -> None:
            self._engine = Engine(self._settings)
            if self._stop_asked:
                return
            async with trio.open_nursery() as nursery:
                await nursery.start(self._engine.run)
                self._serving = True
                self._started.set()

        try:
            trio.run(main, clock=self._clock)
        except BaseException as error:
            self._error = first_error(error)
            if self._serving:
                log.exception("the server ended with an error")
        finally:
            self._started.set()

    def stop(self) -> None:
        """Drains, unloads and ends the thread. Harmless when it has ended, or never began."""
        self._stop_asked = True  # first: a thread that begins only now sees it
        if not self._thread.ident:
            return
        engine = self._engine
        if self._thread.is_alive() and engine is not None:
            try:
                trio.from_thread.run_sync(engine.stop, trio_token=engine.token)
            except trio.RunFinishedError:
                pass
        self._thread.join()


def first_error(error: BaseException) -> BaseException:
    """The first error in a nursery's group that is no cancellation."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
