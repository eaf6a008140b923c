"""Calls of the ASGI app: hypercorn's streams host every request that is not answered by the connection itself.

hypercorn's layer of streams turns the events of a request into an ASGI scope and its messages, and the app's messages into
events of an answer, with their checks. Its own drivers of HTTP/1.1 and HTTP/2 feed it with --http-lean=false
(transport/hypercorn); here ours do, with an exchange at the other end.
Source: ASGI 3.0, HTTP & WebSocket message format 2.3; hypercorn.protocol.http_stream.

Rules:
 1. A call is a task of its connection (transport.wire, rule 4). The app is called in it, with a queue of its own.
 2. A body comes in parts of PART_BYTES, made as the app takes them, so that a large one exists once.
 3. If the app raises before its answer began, the answer is a 500; after that, breaking off is the only way to tell the
    client. send() waits while the client does not read.
 4. Importing hypercorn takes long, so a thread does it while models are loaded (import_early); calls that come earlier wait.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from neptrio.errors import Internal
from neptrio.loop import threads
from neptrio.transport.header_policy import CERTIFICATE, RAW_HEADERS
from neptrio.transport.rest.times import ACCESS, RECEIVED

if TYPE_CHECKING:
    from hypercorn.protocol.http_stream import HTTPStream

    from neptrio.transport.rest.exchange import HttpExchange
    from neptrio.transport.rest.port import Port

log = logging.getLogger("neptrio.rest")

PART_BYTES = 1 << 20


class App(Protocol):
    """The ASGI app behind every route but infer."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None: ...


class Hypercorn:
    """The names of hypercorn that are used."""

    def __init__(self) -> None:
        from hypercorn.config import Config
        from hypercorn.protocol import events, http_stream
        from hypercorn.trio.worker_context import WorkerContext

        self.events = events
        self.stream = http_stream.HTTPStream
        self.config = Config()
        self.config.accesslog = None
        self.config.errorlog = logging.getLogger("neptrio.hypercorn")
        self.context = WorkerContext(None)


async def import_early() -> Hypercorn | None:
    """Imports it in a thread, for a server that loads its models meanwhile. None, and a log line, if that fails."""
    try:
        return await threads.run_surely(Hypercorn, abandon_on_cancel=True)
    except (ImportError, OSError) as error:  # there may be no descriptor left to read a file with
        log.error("hypercorn could not be imported: %s", error)
        return None


class AppCalls:
    """Calls apps for the exchanges of one port."""

    def __init__(self) -> None:
        self._hypercorn: Hypercorn | None = None

    async def load(self) -> None:
        """Imports what the first call needs (rule 4). If that fails, the next call tries again."""
        if self._hypercorn is None:
            self._hypercorn = await import_early()

    async def run(
        self,
        port: Port,
        exchange: HttpExchange,
        raw_headers: list[tuple[bytes, bytes]],
        body: Any,
        received: tuple[int, int],
    ) -> None:
        """Lets the port's app answer `exchange`. `body` is the whole request body; `received`: when the request's first byte came, and
        when it was whole."""
        if self._hypercorn is None:
            await self.load()
        if self._hypercorn is None:
            exchange.refuse(Internal("internal error: hypercorn could not be imported"))
            exchange.connection.loop_pass.end()
            return
        if not exchange.gone or not exchange.unread:
            await _Call(self._hypercorn, port, exchange, raw_headers, body, received).run()


class _Call:
    """One call; it is the task group that hypercorn's stream asks to call the app."""

    def __init__(
        self,
        hypercorn: Hypercorn,
        port: Port,
        exchange: HttpExchange,
        raw_headers: list[tuple[bytes, bytes]],
        body: Any,
        received: tuple[int, int],
    ) -> None:
        self._events = hypercorn.events
        self._port = port
        self._exchange = exchange
        self._raw_headers = raw_headers
        self._body = memoryview(body)
        self._at = 0
        self._whole = False  # the stream was given the end of the body
        self._received = received
        self._queue: deque[Any] = deque()
        self._started = False
        self._scope: dict[str, Any] = {}
        wire = exchange.connection.wire
        self._stream: HTTPStream = hypercorn.stream(
            None,  # type: ignore[arg-type]  # run() calls the app
            hypercorn.config,
            hypercorn.context,
            self,  # type: ignore[arg-type]  # spawn_app() is all that it calls
            wire.secure is not None,
            (wire.client, 0),
            None,
            self._send,
            1,
        )

    async def spawn_app(
        self, app: Any, config: Any, scope: dict[str, Any], send: Any
    ) -> Callable[[Any], Awaitable[None]]:
        """What hypercorn's stream asks its task group for."""
        self._scope = scope
        return self._put

    async def _put(self, event: Any) -> None:
        self._queue.append(event)

    async def run(self) -> None:
        """Makes the call."""
        exchange, connection = self._exchange, self._exchange.connection
        lower = [(name.lower(), value.rstrip(b" \t")) for name, value in self._raw_headers]
        target = exchange.path
        if not target.isascii():  # hypercorn reads ASCII
            target = quote(target.encode("latin-1"), safe="%/?=&;:@!$'()*+,~-._")
        request = self._events.Request(
            stream_id=1,
            headers=lower,
            http_version=exchange.version,
            method=exchange.method,
            raw_path=target.encode("latin-1"),
            state={},  # nothing of hypercorn's lifespan
        )
        try:
            await self._stream.handle(request)
            self._scope[RECEIVED] = self._received
            self._scope[ACCESS] = exchange.access
            self._scope[CERTIFICATE] = connection.wire.certificate
            if self._port.policy is not None:
                self._scope[RAW_HEADERS] = self._raw_headers
            await self._port.app(self._scope, self._receive, self._stream.app_send)
        except Exception as error:
            log.exception("%s %s failed", exchange.method, exchange.path)
            if not self._started:
                exchange.refuse(Internal(f"internal error: {type(error).__name__}"))
        finally:
            del self._stream  # which refers to this call: both would live until the collector finds them
        if not exchange.complete:
            exchange.break_off()
        connection.loop_pass.end()

    async def _receive(self) -> Any:
        """The app's receive()."""
        while not self._queue:
            if not self._whole:
                await self._give()
            else:
                await self._exchange.disconnected.wait()
                await self._stream.handle(self._events.StreamClosed(stream_id=1))
                if not self._queue:
                    return {"type": "http.disconnect"}
        event = self._queue[0]
        if event["type"] == "http.request":
            self._queue.popleft()
        return event

    async def _give(self) -> None:
        """Gives the stream the next part of the body."""
        part = self._body[self._at : self._at + PART_BYTES]
        self._at += len(part)
        if len(part):
            await self._stream.handle(self._events.Body(stream_id=1, data=part))
        if self._at == len(self._body):
            self._whole = True
            self._body = memoryview(b"")
            await self._stream.handle(self._events.EndBody(stream_id=1))

    async def _send(self, event: Any) -> None:
        """Takes the events of the answer."""
        exchange, events = self._exchange, self._events
        if isinstance(event, events.Response):
            self._started = True
            exchange.start(event.status_code, event.headers)
            return
        if isinstance(event, events.Body):
            exchange.write(event.data)
        elif isinstance(event, events.EndBody):
            exchange.finish()
        else:
            return
        exchange.connection.loop_pass.end()
        await (
            exchange.writable()
        )  # no other wait: a client that has what was sent may leave before the app knows that it was
