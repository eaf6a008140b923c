"""What a front end does not understand itself: it sends the bytes to the engine, and the engine's answer to the client.

ForwardingApp stands for the app of the REST routes, ForwardingCall for the handlers of gRPC calls. Both are used by
the transports that the engine's own ports use.

Rules:
 1. Infer requests are decoded here. Everything else goes to the engine as it came, with its headers, and is checked,
    executed, recorded in the audit log and answered there.
 2. A client that leaves is told to the engine, which ends the work.
 3. Answers come in pieces, a few ahead of what the client has read.
 4. When requests came is told to the engine, for its traces.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Callable
from typing import Any

import trio
from grpclib.const import Cardinality
from grpclib.exceptions import GRPCError

from neptrio.errors import TritonError, raise_it
from neptrio.frontend.frames import Frames, Kind, Room, pairs, texts
from neptrio.service import Services, Verbs
from neptrio.service.certificates import Certificate
from neptrio.transport.grpc.handlers import HandlerCall
from neptrio.transport.header_policy import CERTIFICATE, RAW_HEADERS, HeaderPolicy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest import routes
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.asgi import Receive, Send, client_of, respond
from neptrio.transport.rest.control_routes import TooSlow
from neptrio.transport.rest.disconnect import Disconnected
from neptrio.transport.rest.guards import refuse
from neptrio.transport.rest.infer import JSON
from neptrio.transport.rest.times import TIMES, CallTimes

LENGTH = struct.Struct("<I")
STREAMING = {  # calls with more than one message, by the end of their path
    "/Watch": Cardinality.UNARY_STREAM,
    "/ServerReflectionInfo": Cardinality.STREAM_STREAM,
}


class Pending:
    """A call that the engine works on."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque()
        self._news = trio.Event()
        self.room = Room()
        self.ended = False  # the engine has answered

    def came(self, kind: int, payload: bytes) -> None:
        """A frame of the engine for this call."""
        if kind == Kind.NEXT:
            self.room.more()
            return
        self._frames.append((kind, payload))
        self._news.set()

    async def next(self) -> tuple[int, bytes]:
        """Waits for the next frame."""
        while not self._frames:
            self._news = trio.Event()
            await self._news.wait()
        return self._frames.popleft()


class Engine:
    """The engine, as a front end sees it over the socket."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self._calls: dict[int, Pending] = {}
        self._asked: dict[int, Callable[[Any], None]] = {}
        self._number = 0
        self.answered = 0  # calls that have ended

    def begin(self) -> tuple[int, Pending]:
        """A new call, and its number."""
        self._number += 1
        made = self._calls[self._number] = Pending()
        return self._number, made

    def end(self, number: int) -> None:
        """Nobody waits for the call any more."""
        self._calls.pop(number, None)
        self.answered += 1

    def ask(self, kind: Kind, payload: bytes, answered: Callable[[Any], None]) -> None:
        """Sends a frame of that kind. `answered` is given the document of the answer; answers come in order."""
        self._number += 1
        self._asked[self._number] = answered
        self.frames.send(kind, self._number, payload)

    def came(self, kind: int, number: int, payload: bytes) -> None:
        """A frame of the engine for one of the calls."""
        answered = self._asked.pop(number, None)
        if answered is not None:
            answered(json.loads(payload))
            return
        call = self._calls.get(number)
        if call is not None:
            call.came(kind, payload)

    @property
    def under_way(self) -> int:
        """Calls that the engine works on."""
        return len(self._calls)


def as_document(certificate: Certificate | None) -> Any:
    """A certificate as JSON can carry it."""
    if certificate is None:
        return None
    return {"subject": certificate.subject, "names": {k: list(v) for k, v in certificate.names.items()}}


class ForwardingApp(RestApp):
    """The app of a front end's REST port (rule 1)."""

    def __init__(
        self,
        services: Services,
        verbs: Verbs,
        policy: HeaderPolicy | None,
        origins: OriginPolicy,
        engine: Engine,
    ) -> None:
        super().__init__(services, verbs, policy, origins)
        self.engine = engine

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        route = routes.match(scope["method"], scope["raw_path"].decode("latin-1"))
        reads = self._services.admission.reads
        if (
            route is not None
            and route.verb == "infer"
            and route.allowed
            and reads(route.model, route.version)
        ):
            await super().__call__(scope, receive, send)
            return
        number, call = self.engine.begin()
        scope[TIMES] = CallTimes(scope)
        try:
            body = await self._body(scope, receive)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, number, receive)
                await self._forward(number, call, scope, body, send)
                nursery.cancel_scope.cancel()
        except Disconnected:
            pass
        except TooSlow:
            await respond(send, 408, JSON, [b'{"error":"the request did not arrive in time"}'])
        except TritonError as error:
            await refuse(error, send)
        finally:
            if not call.ended:
                self.engine.frames.send(Kind.GONE, number)
            self.engine.end(number)

    async def _watch(self, number: int, receive: Receive) -> None:
        """Tells the engine when the client has closed its side. It may still read: what is answered is sent."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.engine.frames.send(Kind.GONE, number)

    async def _forward(
        self, number: int, call: Pending, scope: dict[str, Any], body: Any, send: Send
    ) -> None:
        frames = self.engine.frames
        times: CallTimes = scope[TIMES]
        head = json.dumps(
            {
                "method": scope["method"],
                "path": scope["path"],
                "raw_path": scope["raw_path"].decode("latin-1"),
                "query": scope["query_string"].decode("latin-1"),
                "version": scope.get("http_version", "1.1"),
                "headers": texts(scope["headers"]),
                "raw_headers": texts(scope[RAW_HEADERS]) if scope.get(RAW_HEADERS) else None,
                "client": client_of(scope),
                "certificate": as_document(scope.get(CERTIFICATE)),
                "received": [times.began, times.whole],
            }
        ).encode()
        frames.send(Kind.HTTP, number, b"".join((LENGTH.pack(len(head)), head, body)))
        del body
        while True:
            kind, payload = await call.next()
            if kind == Kind.HEADERS:
                told = json.loads(payload)
                await send(
                    {
                        "type": "http.response.start",
                        "status": told["status"],
                        "headers": pairs(told["headers"]),
                    }
                )
            elif kind == Kind.BODY:
                await send({"type": "http.response.body", "body": payload, "more_body": True})
                frames.send(Kind.NEXT, number)
            else:
                call.ended = True
                if json.loads(payload)["whole"]:
                    await send({"type": "http.response.body", "body": b""})
                return  # what broke off ends the connection


class ForwardingCall(HandlerCall):
    """A gRPC call that the engine answers: its messages are not parsed here."""

    async def read(self, raw: bytes) -> Any:
        return raw

    def tell(self, failure: TritonError | None) -> None:
        """Nothing: the engine records it."""

    async def forward(self, engine: Engine) -> None:
        """Lets the engine answer."""
        number, call = engine.begin()
        frames = engine.frames
        connection = self._connection
        frames.send_json(
            Kind.CALL,
            number,
            {
                "path": self._path.decode("latin-1"),
                "metadata": texts(self.headers()),
                "deadline": None if self.deadline is None else self.deadline.time_remaining(),
                "client": connection.client,
                "peer": str(connection.wire.peer),
                "certificate": as_document(connection.certificate),
            },
        )

        async def requests() -> None:
            async for message in self:
                await call.room.take()
                frames.send(Kind.MESSAGE, number, message)
            frames.send(Kind.HALF_CLOSE, number)

        try:
            failure: Exception | None = None
            async with trio.open_nursery() as nursery:

                async def sender() -> None:
                    nonlocal failure
                    try:
                        await requests()
                    except (TritonError, GRPCError) as error:
                        failure = error  # raised below, because a nursery would wrap it
                        nursery.cancel_scope.cancel()

                nursery.start_soon(sender)
                while not call.ended:
                    kind, payload = await call.next()
                    if kind == Kind.HEADERS:
                        self.send_headers(pairs(json.loads(payload)))
                    elif kind == Kind.MESSAGE:
                        await self.send_message(payload)
                        frames.send(Kind.NEXT, number)
                    else:
                        self.set_outcome(pairs(json.loads(payload)))
                        call.ended = True
                nursery.cancel_scope.cancel()
            raise_it(failure)
        finally:
            failure = None  # which refers to this frame
            if not call.ended:
                frames.send(Kind.GONE, number)
            engine.end(number)


class Handlers:
    """In place of the mapping from paths to handlers: every call is the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._made = {ending: Handler(engine, cardinality) for ending, cardinality in STREAMING.items()}
        self._unary = Handler(engine, Cardinality.UNARY_UNARY)

    def get(self, path: bytes) -> Handler:
        """The handler of a call."""
        return self._made.get("/" + path.decode("latin-1").rpartition("/")[2], self._unary)


class Handler:
    """Has what HandlerCall needs of grpclib's handlers."""

    def __init__(self, engine: Engine, cardinality: Cardinality) -> None:
        self._engine = engine
        self.cardinality = cardinality

    async def func(self, call: ForwardingCall) -> None:
        """Answers the call."""
        await call.forward(self._engine)
