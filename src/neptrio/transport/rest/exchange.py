"""One HTTP request and its answer, whatever carries them: its way to the scheduler or the app, and back.

The problem: what happens to a request between its last byte and its answer's first (limits, origin, tokens, inflating,
decoding, the app's task, encoding, compressing) does not depend on whether it came over HTTP/1.1 or HTTP/2, over TLS or
not; written for each, it differed. The choice: this class does it; how an answer becomes bytes, the subclasses of
transport/http1/exchange.py and transport/rest/http2_connection.py say.

Rules:
 1. A request is answered once: by reply(), refuse() or finish(), whichever comes first.
 2. What takes long is done by workers (rest/infer.py says what); the connection is paused meanwhile.
 3. When the peer leaves, disconnect() cancels what is under way; what is answered nevertheless is dropped. An app that asks
    only afterwards is told so, too: its connection may still be sending what was answered before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import numpy as np
import trio

from neptrio.errors import Cancelled, Internal, TritonError, raise_it
from neptrio.limits import CONTROL_BYTES, body_bytes
from neptrio.loop.loop_pass_core import LoopPassCore
from neptrio.request.infer_request import InferRequest, InferResponse, Responder, monotonic_ns
from neptrio.service import Services
from neptrio.service.access_log import AccessRecord
from neptrio.service.audit import REFUSED
from neptrio.transport.host_header import host_problem
from neptrio.transport.rest import routes
from neptrio.transport.rest.body import SplitBody
from neptrio.transport.rest.head import RequestHead
from neptrio.transport.rest.infer import JSON, Headers, HttpInfer, error_body, print_later
from neptrio.transport.rest.port import Port
from neptrio.transport.rest.routes import Route
from neptrio.transport.wire import Wire

log = logging.getLogger("neptrio.rest")

HIGH_WATER = (
    64 << 10
)  # bytes of an answer that wait for their turn or for the client; its app waits above that


class Plain(Protocol):
    """A request that the compiled code of a connection answers, when a worker has to print its answer."""

    encoding: trio.CancelScope | None  # while a worker does

    def encoded(self, request: InferRequest, encoded: tuple[bytes, list[Any] | None, int], /) -> None: ...

    def refuse(self, error: TritonError, request: InferRequest | None = None, /) -> None: ...


class Carrier:
    """What connections whose requests are HTTP exchanges have in common."""

    port: Port
    services: Services
    loop_pass: LoopPassCore
    wire: Wire

    def accepts_host(self, host: bytes) -> bool:
        """Whether requests to this host are answered here."""
        return host_problem(host, 1, "1.1") is None and self.port.origins.accepts_host(host)

    def pause(self) -> None:
        """A worker does something for a request, until resume()."""

    def resume(self) -> None:
        """It has done it."""

    def encode_later(
        self,
        plain: Plain,
        request: InferRequest,
        response: InferResponse,
        binary_default: bool,
        selecting: bool,
    ) -> None:
        """Has the answer of a request that has no exchange printed by a worker, for as long as there is a peer."""
        self.pause()
        if request.trace is not None:
            request.trace.hold()
        plain.encoding = trio.CancelScope()
        printed = partial(print_later, self.services, request, response, binary_default, selecting, self)
        self.wire.start(self._encode_later, plain, plain.encoding, request, printed)

    async def _encode_later(
        self, plain: Plain, scope: trio.CancelScope, request: InferRequest, printed: Callable[[], Any]
    ) -> None:
        gone = True
        try:
            with scope:
                encoded = await printed()
            gone = scope.cancelled_caught
            if gone:
                raise Cancelled
            plain.encoded(request, encoded)
        except TritonError as error:
            gone = scope.cancelled_caught
            plain.refuse(error, request)
        except Exception as error:
            gone = False
            log.exception("encoding a response of model '%s' failed", request.model_name)
            plain.refuse(Internal(f"internal error: {type(error).__name__}: {error}"), request)
        finally:
            plain.encoding = None
            self.resume()
            go_on(request, gone)
        self.loop_pass.end()


def always_answered(connection: Carrier, head: RequestHead, method: str, route: Route | None) -> bool:
    """routes.always_answered() for a request with this head."""
    certificate = connection.wire.certificate
    return routes.always_answered(route, method, head.headers, connection.port.policy, certificate)


def most_body(most: int, method: str, path: str, length: int) -> int:
    """Bytes that the body of a request may have. `most`: those of any body; `length`: those announced, -1 for none."""
    if 0 <= length <= CONTROL_BYTES:
        return most
    route = routes.match(method, path)
    return most if route is None else body_bytes(route.verb, most)


class HttpExchange(Responder):
    """A request and its answer; subclasses carry them."""

    connection: Any  # a Carrier
    complete: bool  # it is answered
    access: AccessRecord | None  # its line of the access log

    def __init__(self, connection: Any, method: str, path: str, version: str) -> None:
        self.connection = connection
        self.method = method
        self.path = path
        self.version = version
        self.infer: HttpInfer | None = None
        self.extra: Headers = []  # headers of the answer in addition to the usual ones
        self._working: trio.CancelScope | None = None
        self._left = False  # disconnect() was called
        self._disconnected: trio.Event | None = None

    # ------------------------------------------------------------ subclasses say

    @property
    def gone(self) -> bool:
        """The peer has ended its side."""
        raise NotImplementedError

    @property
    def unread(self) -> bool:
        """Nobody will read an answer any more."""
        raise NotImplementedError

    def reply(self, status: int, headers: Headers, body: list[Any]) -> None:
        """Sends a whole answer."""
        raise NotImplementedError

    def start(self, status: int, headers: Headers) -> None:
        """Begins an answer that comes in parts."""
        raise NotImplementedError

    def write(self, data: Any) -> None:
        """Sends a part of its body."""
        raise NotImplementedError

    def finish(self) -> None:
        """The answer is complete, or there will be none."""
        raise NotImplementedError

    def break_off(self) -> None:
        """The answer will not be completed: the peer is told so."""
        raise NotImplementedError

    async def writable(self) -> None:
        """Waits while the peer does not read, or earlier answers are to be sent first."""
        raise NotImplementedError

    def hold(self, size: int) -> None:
        """So many more bytes are held for the request until it is answered."""
        raise NotImplementedError

    # ------------------------------------------------------------ what happens to it

    def requests(self) -> tuple[InferRequest, ...]:
        """The inference requests that are not answered yet."""
        return () if self.infer is None else (self.infer.request,)

    def refuse(self, error: TritonError, status: int = 0) -> None:
        """Answers with an error."""
        infer, self.infer = self.infer, None  # breaks their cycle, so that both are freed at once
        if infer is not None:
            if self.access is not None:
                self.access.asks(infer.request)
            infer.give_back()
        self.reply(status or error.code.http, [*JSON, *error.headers], error_body(error))

    def dispatch(self, head: RequestHead, body: Any) -> None:
        """The request is whole: answers it, or has it answered."""
        connection = self.connection
        services = connection.services
        port: Port = connection.port
        route = None if port.only_app else routes.match(self.method, self.path)
        over = services.held.full and port.counted
        limits = port.limits
        if (over or limits is not None) and not always_answered(connection, head, self.method, route):
            problem = services.held.problem(0) if over else None
            if problem is None and limits is not None:
                problem = limits.problem(self.client, monotonic_ns())
            if problem is not None:
                self.refuse(problem)
                return
        if route is not None and route.verb == "infer" and route.allowed:
            admission = services.admission
            if not admission.forwards or admission.reads(route.model, route.version):
                self.submit(head, route, body)
                return
        if isinstance(body, SplitBody):  # its model has changed, and this process does not read it any more
            body = body.whole()
        elif isinstance(body, np.ndarray):
            body = memoryview(body)  # type: ignore[arg-type]
        received = head.receive_start, monotonic_ns()
        if port.on_call is not None:
            port.on_call(connection.wire.sock)
        connection.wire.start(port.calls.run, port, self, head.as_sent(), body, received)

    @property
    def disconnected(self) -> trio.Event:
        """Set once the peer is gone."""
        if self._disconnected is None:
            self._disconnected = trio.Event()
            if self._left or self.gone:
                self._disconnected.set()
        return self._disconnected

    @property
    def client(self) -> str:
        """The client's address."""
        return self.connection.wire.client

    def disconnect(self, services: Services) -> None:
        """The peer is gone: cancels the request and tells the app."""
        self._left = True
        if self._disconnected is not None:
            self._disconnected.set()
        if self._working is not None:
            self._working.cancel()
        elif self.infer is not None and not self.complete:
            services.admission.cancel(self.infer.request)

    def submit(self, head: RequestHead, route: Route, body: Any) -> None:
        """Submits a complete infer request to admission, or refuses it."""
        connection = self.connection
        certificate = connection.wire.certificate
        policy = connection.port.policy
        try:
            origins = connection.port.origins
            if origins.cors:
                self.extra = origins.answer_headers(head.get(b"origin"))
            origin, site = head.get(b"origin"), head.get(b"sec-fetch-site")
            raise_it(origins.problem(self.method, head.get(b"host"), origin, site))
            owner = forwarded = None
            if policy is not None:
                owner = policy.check("infer", head.headers, route.model, certificate=certificate)
                forwarded = policy.forwarded(head.as_sent())
            infer = HttpInfer(connection.services, route, head.headers, head.get, whose=connection)
            infer.request.owner = owner
            infer.forwarded = forwarded
            self.infer = infer
            infer.hold = self.hold
            infer.receive_start = head.receive_start
            if infer.take(body):
                infer.submit(self)
            else:
                self._working = trio.CancelScope()
                connection.pause()
                connection.wire.start(self._submit_later, infer)
        except TritonError as error:
            audit = connection.services.audit
            if audit is not None and error.code in REFUSED:
                who = "" if policy is None else policy.who(head.headers, certificate)
                shown = "" if certificate is None else certificate.subject
                audit.record(
                    "infer", "http", self.client, who, certificate=shown, model=route.model, error=error
                )
            self.refuse(error)
        except Exception as error:
            self._fail(error)

    async def _submit_later(self, infer: HttpInfer) -> None:
        """submit() with the slow part on worker threads.

        Later requests of the connection wait meanwhile: they must not overtake this one, and a client may use only one
        worker per connection. When the peer leaves, the work ends.
        """
        connection = self.connection
        assert self._working is not None
        try:
            with self._working:
                await infer.take_later()
            if self._working.cancelled_caught:
                raise Cancelled
            self._working = None
            infer.submit(self)
            if self.gone:
                self.disconnect(connection.services)
        except TritonError as error:
            self.refuse(error)
        except Exception as error:
            self._fail(error)
        finally:
            connection.resume()
        connection.loop_pass.end()

    def _fail(self, error: Exception) -> None:
        """Answers a request that failed with an unexpected exception; called in its except block."""
        log.exception("%s %s failed", self.method, self.path)
        self.refuse(Internal(f"internal error: {type(error).__name__}"))

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if not final:
            log.error("model '%s' sent more than one response to an HTTP request", request.model_name)
            return
        infer = self.infer
        assert infer is not None
        self.infer = None  # breaks the cycle of request and exchange, so that both are freed at once
        infer.give_back()
        if self.access is not None:
            self.access.answered(request, response)
        answer = infer.encode(response, later=True)
        if answer is not None:
            self._reply_with(infer, *answer)
            return
        self._working = trio.CancelScope()
        self.connection.pause()
        if request.trace is not None:
            request.trace.hold()
        self.connection.wire.start(self._encode_later, infer, response)

    async def _encode_later(self, infer: HttpInfer, response: InferResponse) -> None:
        """Answers with JSON that a worker prints, for as long as there is a peer."""
        connection = self.connection
        assert self._working is not None
        gone = True
        try:
            with self._working:
                answer = await infer.encode_later(response)
            if self._working.cancelled_caught:
                self.finish()
            else:
                gone = False
                self._reply_with(infer, *answer)
        finally:
            connection.resume()
            go_on(infer.request, gone)
        connection.loop_pass.end()

    def _reply_with(self, infer: HttpInfer, status: int, headers: Headers, body: list[Any]) -> None:
        if infer.encoding:
            self._reply_later(infer, headers, body)
        else:
            self.reply(status, headers, body)

    def _reply_later(self, infer: HttpInfer, headers: Headers, body: list[Any]) -> None:
        """Answers with a body that worker threads compress; gives up when the peer leaves."""
        connection = self.connection

        async def task() -> None:
            small = None
            try:
                small = await infer.compress_later(body, lambda: self.unread)
                if small is None:
                    self.finish()
                else:
                    self.reply(200, headers, small)
            except TritonError as error:
                self.refuse(error)
            except Exception as error:
                self._fail(error)
            finally:
                go_on(infer.request, small is None)
            connection.loop_pass.end()

        if self.unread:
            self.finish()
        else:
            if infer.request.trace is not None:
                infer.request.trace.hold()
            connection.wire.start(task)


def go_on(request: InferRequest, gone: bool) -> None:
    """Ends what hold() of the request's trace began; `gone`: nobody waits for the answer any more."""
    if request.trace is not None:
        if gone:
            request.trace.abandon()
        request.trace.release()
