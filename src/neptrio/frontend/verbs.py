"""Answers what front ends pass on: HTTP requests with the app of the REST routes, gRPC calls with their handlers.

Rules:
 1. The app and the handlers are those of the engine's own ports, with the same checks of origin, tokens, restrictions
    and models, and the same audit log.
 2. Before a change of models or of settings is answered, every front end knows of it: the app and the handlers see to that,
    here as at the engine's own ports (service.changes).
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from grpclib.const import Status
from grpclib.metadata import Deadline

from neptrio.addresses import is_loopback
from neptrio.errors import Code, TooManyRequests, TritonError
from neptrio.frontend.clients import ClientsOfFront, Counted
from neptrio.frontend.forward import LENGTH
from neptrio.frontend.frames import PIECE, Frames, Kind, Room, pairs, texts
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services, Verbs
from neptrio.service.certificates import KINDS, Certificate
from neptrio.service.tokens import Account
from neptrio.transport import admin_only
from neptrio.transport.grpc import handler_import
from neptrio.transport.grpc.audit_call import audit_call
from neptrio.transport.grpc.connection import PROBES
from neptrio.transport.grpc.handlers import Peer, encoded, failed, parsed
from neptrio.transport.grpc.status import (
    OK_HEADERS,
    OK_TRAILERS,
    decode_metadata,
    status_trailers,
)
from neptrio.transport.header_policy import CERTIFICATE, RAW_HEADERS, grpc_policy, http_policy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.guards import always_answered, refuse
from neptrio.transport.rest.times import RECEIVED

log = logging.getLogger("neptrio.frontend")


class ForwardedVerbs:
    """What is the same for all front ends."""

    def __init__(self, services: Services, verbs: Verbs, http_address: str) -> None:
        settings = services.settings
        self.services = services
        self._verbs = verbs
        origins = OriginPolicy(settings.cors_allow_origin, settings.allowed_host, is_loopback(http_address))
        self.http_policy = http_policy(settings, services.tokens)
        self.app = RestApp(services, verbs.at(http_address), self.http_policy, origins)
        self.policy = grpc_policy(settings, services.tokens)
        self.admin_elsewhere = settings.admin_address is not None
        self.handlers: dict[bytes, Any] = {}
        self.loaded = trio.Event()

    async def load(self) -> None:
        """Imports the handlers of gRPC calls, on a thread because that takes long."""
        verbs = self._verbs.at(self.services.settings.grpc_address)
        self.handlers = await handler_import.imported(self.services, verbs)
        self.loaded.set()


def certificate_of(document: Any) -> Certificate | None:
    """The certificate that a front end has seen. Raises ValueError, TypeError or KeyError."""
    if document is None:
        return None
    names = {str(kind): tuple(str(v) for v in values) for kind, values in document["names"].items()}
    return Certificate(
        str(document["subject"]), {kind: names.get(kind, ()) for kind in ("common_name", *KINDS)}
    )


def believed(received: Any, first_ns: int) -> tuple[int, int]:
    """When a request began to come and when it was whole, as a front end says, within what can be: from `first_ns` to now.
    Raises ValueError or TypeError."""
    began, whole = received
    if type(began) is not int or type(whole) is not int:
        raise TypeError(f"times that are no whole numbers: {received!r}")
    whole = min(max(whole, first_ns), monotonic_ns())
    return min(max(began, first_ns), whole), whole


class HttpCall:
    """An HTTP request that a front end has passed on. The constructor raises ValueError, TypeError or KeyError."""

    def __init__(
        self,
        verbs: ForwardedVerbs,
        frames: Frames,
        number: int,
        payload: bytes,
        clients: ClientsOfFront,
        first_ns: int,
    ) -> None:
        """`first_ns`: the front end has received nothing before."""
        self._verbs = verbs
        self._frames = frames
        self._number = number
        self._clients = clients
        self._counted: Counted | None = None
        self._room = Room()
        self._gone = trio.Event()
        self._ended = False
        (length,) = LENGTH.unpack_from(payload)
        told = json.loads(payload[LENGTH.size : LENGTH.size + length])
        self._body: bytes | None = payload[LENGTH.size + length :]
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": str(told["version"]),
            "method": str(told["method"]),
            "scheme": "http",
            "path": str(told["path"]),
            "raw_path": told["raw_path"].encode("latin-1"),
            "query_string": told["query"].encode("latin-1"),
            "headers": pairs(told["headers"]),
            "client": (str(told["client"]), 0),
        }
        if told["raw_headers"] is not None:
            self._scope[RAW_HEADERS] = pairs(told["raw_headers"])
        self._scope[RECEIVED] = believed(told["received"], first_ns)
        certificate = certificate_of(told["certificate"])
        if certificate is not None:
            self._scope[CERTIFICATE] = certificate

    def came(self, kind: int, payload: bytes) -> None:
        """A frame of the front end."""
        if kind == Kind.NEXT:
            self._room.more()
        elif kind == Kind.GONE:
            self._gone.set()

    def end(self) -> None:
        """The front end has ended."""
        self._gone.set()

    async def run(self) -> None:
        """Has the app answer."""
        try:
            problem = self._begin()
            if problem is None:
                await self._verbs.app(self._scope, self._receive, self._send)
            else:
                await refuse(problem, self._send)
        except Exception:
            log.exception("%s %s failed", self._scope["method"], self._scope["path"])
        finally:
            self._over()
            self._verbs.services.loop.loop_pass.end()
        self._frames.send_json(Kind.END, self._number, {"whole": self._ended})

    def _begin(self) -> TooManyRequests | None:
        """Counts the request; the error if its client address is at a limit."""
        verbs = self._verbs
        if verbs.services.request_limits.on and not always_answered(self._scope, verbs.http_policy):
            counted = self._scope["client"][0], 0
            try:
                self._clients.enter(counted)
            except TooManyRequests as error:
                return error
            self._counted = counted
        return None

    def _over(self) -> None:
        if self._counted is not None:
            self._clients.leave(self._counted)
            self._counted = None

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            told = {"status": event["status"], "headers": texts(event["headers"])}
            self._frames.send_json(Kind.HEADERS, self._number, told)
            return
        if not event.get("more_body", False):
            self._over()  # before sending: a client that has read the answer may send its next request at once
        body = memoryview(event.get("body", b""))
        for at in range(0, len(body), PIECE):
            await self._unless_gone(self._room.take)
            self._frames.send(Kind.BODY, self._number, bytes(body[at : at + PIECE]))
        self._ended = not event.get("more_body", False)

    async def _unless_gone(self, wait: Callable[[], Awaitable[None]]) -> None:
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                await self._gone.wait()
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            await wait()
            nursery.cancel_scope.cancel()


class GrpcCall:
    """A gRPC call that a front end has passed on, with the part of grpclib's server Stream that handlers use.

    The constructor raises ValueError, TypeError or KeyError.
    """

    def __init__(
        self, verbs: ForwardedVerbs, frames: Frames, number: int, payload: bytes, clients: ClientsOfFront
    ) -> None:
        self._verbs = verbs
        self._frames = frames
        self._number = number
        self._clients = clients
        self._room = Room()
        self._scope = trio.CancelScope()
        self._inbox: deque[bytes | None] = deque()
        self._news = trio.Event()
        self._handler: Any = None
        self._request: Any = None
        self._outcome: list[tuple[bytes, bytes]] | None = None
        told = json.loads(payload)
        self._path = str(told["path"])
        self._headers = pairs(told["metadata"])
        self._client = str(told["client"])
        self._certificate = certificate_of(told["certificate"])
        self.metadata: Any = None
        self.caller: Account | None = None  # whose the last message is, where clients are known
        left = told["deadline"]
        self.deadline = None if left is None else Deadline.from_timeout(float(left))
        self.peer = Peer(str(told["peer"]))
        self.user_agent = dict(self._headers).get(b"user-agent", b"").decode("latin-1")

    def came(self, kind: int, payload: bytes) -> None:
        """A frame of the front end."""
        if kind == Kind.NEXT:
            self._room.more()
        elif kind == Kind.GONE:
            self.end()
        elif kind in (Kind.MESSAGE, Kind.HALF_CLOSE):
            self._inbox.append(payload if kind == Kind.MESSAGE else None)
            self._news.set()

    def end(self) -> None:
        """The client, or the front end, has gone."""
        self._scope.cancel()

    async def recv_message(self) -> Any:
        """Waits for the next request message; None at the end of the input. Raises GRPCError and TritonError."""
        while not self._inbox:
            self._news = trio.Event()
            await self._news.wait()
        if self._inbox[0] is None:
            return None
        raw = self._inbox.popleft()
        assert raw is not None
        self._frames.send(Kind.NEXT, self._number)
        message = [raw]
        del raw
        path = self._path.encode("latin-1")
        found = await parsed(path, self._handler, message, self._verbs.services.workers, self)
        self._request = found
        policy = self._verbs.policy
        if policy is not None and policy.reads_messages:
            self.caller = policy.message(self._path, self._headers, found, self._certificate)
        if self._verbs.admin_elsewhere:
            admin_only.check_call(self._path, found)
        return found

    async def send_initial_metadata(self, *, metadata: Any = None) -> None:
        """Sends the headers of the reply."""
        self._frames.send_json(Kind.HEADERS, self._number, texts([*OK_HEADERS, *encoded(metadata)]))

    async def send_message(self, message: Any) -> None:
        """Sends a reply message; waits while the client is too far behind."""
        await self._room.take()
        self._frames.send(Kind.MESSAGE, self._number, bytes(message))

    async def send_trailing_metadata(
        self,
        *,
        status: Status = Status.OK,
        status_message: str | None = None,
        status_details: Any = None,
        metadata: Any = None,
    ) -> None:
        """Sets the status and metadata that the call ends with when the handler returns."""
        self._outcome = [*status_trailers(status, status_message or ""), *encoded(metadata)]

    async def cancel(self) -> None:
        """Ends the call."""
        self._scope.cancel()

    def __aiter__(self) -> GrpcCall:
        return self

    async def __anext__(self) -> Any:
        message = await self.recv_message()
        if message is None:
            raise StopAsyncIteration
        return message

    def _limited(self) -> bool:
        """Whether limits of client addresses hold for the call."""
        if not self._verbs.services.request_limits.on or self._path.encode("latin-1") in PROBES:
            return False
        policy = self._verbs.policy
        return policy is None or not policy.controls_call(self._path, self._headers, self._certificate)

    async def run(self) -> None:
        """Has the handler answer."""
        trailers = OK_TRAILERS
        failure: TritonError | None = None
        counted: Counted | None = None
        with self._scope:
            try:
                self.metadata = decode_metadata(self._headers)
                if self._limited():
                    self._clients.enter((self._client, 0))
                    counted = self._client, 0
                if self._verbs.policy is not None:
                    self._verbs.policy.check_call(self._path, self._headers, self._certificate)
                if self._verbs.admin_elsewhere:
                    admin_only.check_call(self._path)
                await self._verbs.loaded.wait()
                self._handler = self._verbs.handlers.get(self._path.encode("latin-1"))
                if self._handler is None:
                    self._frames.send_json(
                        Kind.TRAILERS, self._number, texts(status_trailers(Status.UNIMPLEMENTED))
                    )
                    return
                await self._handler.func(self)
            except Exception as error:
                trailers, failure = failed(error)
            finally:
                if counted is not None:
                    self._clients.leave(counted)
        if self._scope.cancelled_caught:
            failure = TritonError("the call was cancelled", Code.CANCELLED)
        services = self._verbs.services
        if services.audit is not None:
            audit_call(
                services.audit,
                self._verbs.policy,
                self._path,
                self._headers,
                self._client,
                self._certificate,
                self._request,
                failure,
            )
        del failure  # its traceback holds this call, which would hold it
        if trailers is OK_TRAILERS and self._outcome is not None:
            trailers = self._outcome
        services.loop.loop_pass.end()
        self._frames.send_json(Kind.TRAILERS, self._number, texts(trailers))
