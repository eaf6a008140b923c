"""Calls of the server's REST app from an asyncio program, without a socket between the two.

The problem: the app runs on the server's trio thread; an ASGI program that hosts it (Ray Serve, uvicorn) has an asyncio
loop on another thread. Neither loop may block, large bodies and slow readers must not fill the memory, and whoever ends
a call early, the client or the server, must end it on both sides.

The choice: a call is a task on each side and two short queues of events between them. Both sides are woken by what
wakes them anyway: the trio thread by its completions, the asyncio loop by call_soon_threadsafe().

Rules:
 1. Events arrive in order, each once, as they come: bodies and answers are not collected here.
 2. One request event is read ahead of the app, not more; the app's send() waits while more than AHEAD_BYTES of the
    answer have not been taken by the program's send(). So each side is slowed down by the other.
 3. A disconnect reaches the app as an event. A program that cancels its call, whose send() raises, or whose
    receive() raises within a body, cancels the app.
 4. When the server stops, calls under way are answered. Later ones, and those that are left when it ends, raise
    Unavailable, before the answer began if it had not begun.
 5. Where the program listens is not known here: its clients count as being on other machines (docs/security.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import trio

from neptrio.errors import Unavailable
from neptrio.service import Services, Verbs
from neptrio.transport.header_policy import HeaderPolicy, http_policy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.asgi import client_of
from neptrio.transport.rest.guards import Bounded

if TYPE_CHECKING:
    from neptrio.embedded.engine import Engine

log = logging.getLogger("neptrio.rest")

Event = dict[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
AHEAD_BYTES = 256 << 10
STOPPING = "the server is shutting down"


class AsgiFront:
    """The server's side: starts the app for each call. A front like those with a port; trio thread only.

    `hold`: whether a stopping server waits for live sequences even while no call is under way, because their next
    requests will come. The embedding program sets it.
    """

    def __init__(self, services: Services, verbs: Verbs) -> None:
        self.hold = False
        self._services = services
        self._verbs = verbs
        self._nursery: trio.Nursery | None = None
        self._open = 0
        self._held = 0
        self._ended = trio.Event()
        self._draining = False
        self._made: tuple[RestApp, HeaderPolicy | None] | None = None
        services.held.add(lambda: self._held)

    @property
    def connections(self) -> int:
        """How many calls are under way, one more while sequences are held."""
        return self._open + self.hold

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def drain(self) -> None:
        """Refuses calls that begin now and returns when all others have ended."""
        self._draining = True
        while self._open:
            await self._ended.wait()

    def start(self, call: AsgiCall) -> None:
        """Begins a call; it fails if the server drains."""
        if self._nursery is None or self._draining:
            call.fail(Unavailable(STOPPING))
            return
        self._open += 1
        self._nursery.start_soon(self._serve, call)

    async def _serve(self, call: AsgiCall) -> None:
        app, policy = self._app()
        address = client_of(call.scope)
        bounded = Bounded(app, self._services, address, self._count, policy)
        limits = self._services.request_limits
        limits.join(address, bounded.open_requests)
        try:
            with call.cancelling:
                await bounded(call.scope, call.receive, call.send)
            call.finish()
        except Exception as error:
            log.exception("%s %s failed", call.scope.get("method"), call.scope.get("path"))
            call.fail(error)
        except BaseException:
            call.fail(Unavailable(STOPPING))
            raise
        finally:
            limits.leave(address, bounded.open_requests)
            self._open -= 1
            self._ended.set()
            self._ended = trio.Event()

    def _count(self, size: int) -> None:
        self._held += size

    def _app(self) -> tuple[RestApp, HeaderPolicy | None]:
        if self._made is None:
            settings = self._services.settings
            policy = http_policy(settings, self._services.tokens)
            origins = OriginPolicy(settings.cors_allow_origin, settings.allowed_host, False)
            self._made = RestApp(self._services, self._verbs, policy, origins), policy
        return self._made


class AsgiCall:
    """One call under way, from the first event of its request to the end of its answer.

    receive(), send() and finish() are called on the trio thread, the others on the loop of the program.
    """

    def __init__(self, engine: Engine, scope: Event, first: Event) -> None:
        self.scope = scope
        self.cancelling = trio.CancelScope()
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        # the program's side
        self._answer: deque[Event] = deque()
        self._news = asyncio.Event()
        self._room = asyncio.Event()  # for one more request event
        self._more = first.get("more_body", False)  # of the body is to be read
        self._over = False
        self._error: Exception | None = None
        # the app's side
        self._request: deque[Event] = deque([first])
        self._came = trio.Event()
        self._ahead = 0
        self._taken = trio.Event()

    # ------------------------------------------------------------ on the trio thread

    async def receive(self) -> Event:
        """The next event of the request; after the last, a disconnect again and again."""
        while not self._request:
            self._came = trio.Event()
            await self._came.wait()
        event = self._request.popleft()
        if event["type"] == "http.disconnect":
            self._request.append(event)
        else:
            self._call_soon(self._room.set)
        return event

    async def send(self, event: Event) -> None:
        """Gives an event of the answer to the program, and waits while it has not taken those before."""
        self._ahead += len(event.get("body", b""))
        self._call_soon(self._put, event)
        while self._ahead > AHEAD_BYTES and event.get("more_body"):
            self._taken = trio.Event()
            await self._taken.wait()

    def finish(self) -> None:
        """The app has returned."""
        self._engine.leave(self)
        self._call_soon(self._end, None)

    def fail(self, error: Exception) -> None:
        """Ends the call for the program with an error. On any thread."""
        self._engine.leave(self)
        self._call_soon(self._end, error)

    def _arrived(self, event: Event) -> None:
        self._request.append(event)
        self._came.set()

    def _less(self, size: int) -> None:
        self._ahead -= size
        self._taken.set()

    def _call_soon(self, function: Callable[..., None], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # the program's loop is closed: nobody is left who could take it

    # ------------------------------------------------------------ on the program's loop

    def _put(self, event: Event) -> None:
        self._answer.append(event)
        self._news.set()

    def _end(self, error: Exception | None) -> None:
        if not self._over:
            self._over, self._error = True, error
            self._news.set()

    async def feed(self, receive: Receive) -> None:
        """Reads the rest of the request for the app, one event ahead of it. A body that cannot be read fails the call;
        behind it, only a disconnect can come."""
        while True:
            await self._room.wait()
            self._room.clear()
            try:
                event = await receive()
            except Exception as error:
                if self._more:
                    self.cancel()
                    self._end(error)
                return
            self._more = event.get("more_body", False)
            self._engine.soon(lambda event=event: self._arrived(event))  # type: ignore[misc]
            if event["type"] == "http.disconnect":
                return

    async def answer(self, send: Send) -> None:
        """Sends the answer's events as they come. Raises Unavailable, and what receive() and send() raise."""
        while True:
            while self._answer:
                event = self._answer.popleft()
                await send(event)
                size = len(event.get("body", b""))
                if size and event.get("more_body"):
                    self._engine.soon(lambda size=size: self._less(size))  # type: ignore[misc]
            if self._over:
                break
            self._news.clear()
            await self._news.wait()
        if self._error is not None:
            raise self._error

    def cancel(self) -> None:
        """Ends the app, if it still runs."""
        if not self._over:
            self._engine.soon(self.cancelling.cancel)


async def call_app(engine: Engine, scope: Event, receive: Receive, send: Send) -> None:
    """Answers one HTTP request: an ASGI application when `engine` is bound. For tasks of asyncio loops.

    The path is matched without the scope's `root_path`. Raises Unavailable when the server has stopped.
    Cancellation: cancels the request.
    """
    call = AsgiCall(engine, relative(scope), await receive())
    engine.enter(call)
    engine.soon(lambda: engine.asgi.start(call))
    feeder = asyncio.ensure_future(call.feed(receive))
    try:
        await call.answer(send)
    finally:
        call.cancel()
        feeder.cancel()


def relative(scope: Event) -> Event:
    """The scope with the path as the app sees it: as it was sent, without the prefix under which the app is found."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    root = scope.get("root_path", "").encode()
    if root and path.startswith(root):
        path = path[len(root) :]
    headers = [(bytes(name).lower(), bytes(value)) for name, value in scope["headers"]]
    text = path.decode("latin-1")
    return {**scope, "raw_path": path, "path": text, "root_path": "", "headers": headers}
