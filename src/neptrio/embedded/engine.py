"""The running server behind `neptrio.Server`: on the caller's own trio loop, or on a thread with a loop of its own.

Rules:
 1. soon() may be called from any thread while the engine is open; what it is given runs on the server's thread.
 2. A call that was entered gets an answer: when the engine closes, those that are left fail with Unavailable.
 3. After close() every use raises Unavailable.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import sniffio
import trio

from neptrio import startup
from neptrio.embedded.asgi import AsgiFront
from neptrio.errors import Unavailable
from neptrio.loop import threads
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import monotonic_ns
from neptrio.server import Server as CoreServer
from neptrio.settings import Settings

T = TypeVar("T")
log = logging.getLogger("neptrio.server")
STOPPED = "the server has stopped"


class Entered(Protocol):
    """What is under way on the engine, and fails when it closes."""

    def fail(self, error: Exception) -> None:
        """Ends it for its caller. On any thread, harmless when it has ended."""


class _Soon(WorkItem):
    def __init__(self, function: Callable[[], object]) -> None:
        self._function = function

    def deliver(self) -> None:
        self._function()


class Engine:
    """A server that runs, and the ways into its thread. Made on that thread."""

    def __init__(self, settings: Settings) -> None:
        self.core = CoreServer(settings)
        self.asgi = AsgiFront(self.core.services)
        self.core.fronts.append(self.asgi)
        self.token = trio.lowlevel.current_trio_token()
        self._thread = threading.get_ident()
        # Of the two below, because callers may be on any thread. Reentrant, because an iterator that is collected
        # while its thread is in here cancels its request.
        self._lock = threading.RLock()
        self._calls: set[Entered] = set()
        self._closed = False

    async def run(self, task_status: trio.TaskStatus[Engine]) -> None:
        """Loads the models, serves until stop(), drains and unloads. Reports the start when all models are loaded."""
        try:
            await self.core.serve(lambda: task_status.started(self))
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
        return threading.get_ident() == self._thread

    def stop(self) -> None:
        """Begins the shutdown. On the server's thread; harmless when it has begun."""
        if not self.core.stopping.is_set():
            self.core.stop()

    def close(self) -> None:
        """Fails the calls that are left (rule 2)."""
        with self._lock:
            self._closed = True
            left = list(self._calls)
        for call in left:
            call.fail(Unavailable(STOPPED))

    def enter(self, call: Entered) -> None:
        """Counts a call as under way. Raises Unavailable."""
        with self._lock:
            if self._closed:
                raise Unavailable(STOPPED)
            self._calls.add(call)

    def leave(self, call: Entered) -> None:
        """The call has ended."""
        with self._lock:
            self._calls.discard(call)

    def soon(self, function: Callable[[], object]) -> None:
        """Runs `function` on the server's thread: at once if this is it, else with the next completions."""
        if threading.get_ident() == self._thread:
            function()
            self.core.loop.loop_pass.soon()
        else:
            self.later(function)

    def later(self, function: Callable[[], object]) -> None:
        """Runs `function` on the server's thread with the next completions, whatever thread this is. For all that a
        finalizer may call: iterators and generators end at any moment, in the middle of a scheduler's loop too."""
        with self._lock:
            if not self._closed:
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
        if self._closed:
            raise Unavailable(STOPPED)
        if threading.get_ident() == self._thread:
            raise RuntimeError(
                "this would block the server's own thread; use the object of `async with` there"
            )
        try:
            return trio.from_thread.run(function, self.core, *args, trio_token=self.token)
        except (trio.RunFinishedError, trio.Cancelled):
            raise Unavailable(STOPPED) from None

    async def reach(self, function: Callable[..., Awaitable[T]], *args: Any) -> T:
        """The same for a task, of whichever loop."""
        if sniffio.current_async_library() == "asyncio":
            return await asyncio.to_thread(self.ask, function, *args)
        if trio.lowlevel.current_trio_token() is self.token:
            if self._closed:
                raise Unavailable(STOPPED)
            await trio.lowlevel.checkpoint()
            return await function(self.core, *args)
        return await threads.run(self.ask, function, *args, abandon_on_cancel=True)


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
        if not self._thread.ident:
            return
        self._stop_asked = True
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
