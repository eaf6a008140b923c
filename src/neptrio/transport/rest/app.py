"""The ASGI app that answers every REST route. Hypercorn calls it, and so does our own HTTP/1.1 connection."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import trio
from grpclib.const import Status

from neptrio.codec.http_json import dump_json, load_json
from neptrio.codec.json_reader import too_long
from neptrio.codec.openai import error_object
from neptrio.errors import Internal, TritonError
from neptrio.limits import LONGEST_NAME
from neptrio.request.infer_request import InferRequest, InferResponse, Protocol, Responder
from neptrio.service import Services, Verbs
from neptrio.service.audit import AuditLog
from neptrio.transport import admin_only
from neptrio.transport.header_policy import CERTIFICATE, OPENAI, RAW_HEADERS, Forwarded, HeaderPolicy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.reservation import Kept
from neptrio.transport.rest import routes
from neptrio.transport.rest.asgi import Receive, Send, client_of
from neptrio.transport.rest.control_routes import CLIENT, KEPT, ControlRoutes, TooSlow, members
from neptrio.transport.rest.disconnect import (
    Disconnected,
    submitted,
    unless_gone,
    wait_or_cancel,
    when_loaded,
)
from neptrio.transport.rest.generate import HttpGenerate
from neptrio.transport.rest.infer import JSON, Answer, Headers, HttpInfer, error_body, not_allowed
from neptrio.transport.rest.infer_stream import HttpInferStream
from neptrio.transport.rest.large_body import PIECE, send_in_pieces
from neptrio.transport.rest.openai import PREFIX as OPENAI_PREFIX
from neptrio.transport.rest.openai import HttpOpenAi
from neptrio.transport.rest.times import RECEIVED, TIMES, CallTimes

log = logging.getLogger("neptrio.rest")

GRPC = b"application/grpc"
# What a gRPC client that has this port in the place of the other one understands: no other answer shows it a text. Only our own
# connections send it in one frame that ends the stream, as a status without messages must be.
NO_GRPC: Headers = [
    (b"content-type", GRPC),
    (b"grpc-status", b"%d" % Status.UNIMPLEMENTED.value),
    (b"grpc-message", b"This port speaks REST. gRPC is on another port, --grpc-port (8001)"),
]
FORWARDING = ("infer", "infer_stream", "generate", "generate_stream", *OPENAI)
C = TypeVar("C", HttpInfer, HttpInferStream, HttpGenerate)


class _Waiter(Responder):
    """Lets a task wait for a request's only response."""

    def __init__(self, scope: dict[str, Any]) -> None:
        self.protocol = Protocol.HTTP_PROTOCOL
        self._scope = scope
        self.event = trio.Event()
        self.response: InferResponse | None = None

    @property
    def client(self) -> str:
        """The client's address."""
        return client_of(self._scope)

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if request.trace is not None and not request.cancelled:
            request.trace.defer()  # the waiting task encodes and sends the answer, and records when
        if not response.null:
            self.response = response
        if final:
            self.event.set()


class RestApp(ControlRoutes):
    """The ASGI callable: finds the route, checks who asks, and calls the services."""

    def __init__(
        self,
        services: Services,
        verbs: Verbs,
        policy: HeaderPolicy | None = None,
        origins: OriginPolicy | None = None,
        admin: bool = False,
    ) -> None:
        """`admin`: the app of the admin listener."""
        super().__init__(services, verbs, admin)
        self._admin_elsewhere = services.settings.admin_address is not None and not admin
        self._policy = policy
        self._origins = origins or OriginPolicy()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if self._origins.cors:
            send = _with_headers(send, self._origins.answer_headers(_origin(scope["headers"])))
        times = scope[TIMES] = CallTimes(scope)
        kept = scope[KEPT] = Kept(self._services.held)
        try:
            await self._call(scope, receive, send, times)
        finally:
            kept.over()
            times.over()

    async def _call(self, scope: dict[str, Any], receive: Receive, send: Send, times: CallTimes) -> None:
        refusal: TritonError | None = None
        try:
            answer = await self._answer(scope, receive, send)
        except Disconnected:
            return
        except TooSlow:
            answer = 408, JSON, [b'{"error":"the request did not arrive in time"}']
        except TritonError as error:
            answer = error.code.http, [*JSON, *error.headers], error_body(error)
            refusal = error
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["raw_path"])
            refusal = Internal(f"internal error: {type(error).__name__}")
            answer = 500, JSON, error_body(refusal)
        if answer is not None and answer[0] >= 400 and scope["raw_path"].startswith(OPENAI_PREFIX.encode()):
            answer = _in_the_shape_of_openai(answer, refusal)
        if self._services.audit is not None:
            self._record(self._services.audit, scope, refusal)
        refusal = (
            None  # its traceback holds this call, which would hold it: the body would stay until a collection
        )
        if answer is None:
            return
        status, headers, body = answer
        length = sum(memoryview(part).nbytes for part in body)
        start = [*headers, (b"content-length", b"%d" % length)]
        with times.answering():
            await send({"type": "http.response.start", "status": status, "headers": start})
            if scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b""})
            elif length > PIECE:
                await send_in_pieces(send, body)
            else:
                whole = b"".join(body)
                # a slow client would otherwise keep the model's outputs in memory beside `whole`
                del answer, body
                await send({"type": "http.response.body", "body": whole})

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> Answer | None:
        route = routes.match(scope["method"], scope["raw_path"].decode("latin-1"))
        if route is None or route.verb not in routes.PROBES:
            self._origins.check(scope["method"], scope["headers"])
            preflight = self._origins.preflight(scope["method"], scope["headers"])
            if preflight is not None:
                return 200, preflight, []
        if route is None:
            if RECEIVED in scope and scope["http_version"] == "2" and _calls_grpc(scope["headers"]):
                return 200, NO_GRPC, []
            return 404, JSON, [dump_json({"error": routes.not_found(scope["raw_path"].decode("latin-1"))})]
        forwarded: Forwarded | None = None
        if self._policy is not None:
            scope[CLIENT] = self._policy.check(
                route.verb, scope["headers"], route.model, scope["method"], scope.get(CERTIFICATE)
            )
            if self._policy.forward is not None and route.verb in FORWARDING and route.allowed:
                forwarded = self._policy.forwarded(scope.get(RAW_HEADERS) or scope["headers"])
        for what, name in (("model", route.model), ("version", route.version), ("region", route.region)):
            if len(name) > LONGEST_NAME:
                raise too_long(what, name)
        if not route.allowed:
            return not_allowed(route.methods)
        if self._admin_elsewhere:
            admin_only.check_verb(route.verb, scope["method"])
        if route.verb == "infer":
            return await self._infer(route, scope, receive, forwarded)
        if route.verb in ("generate", "generate_stream"):
            present = self._services.admission.present
            if present(route.model, route.version) is not None:  # its inputs are only known when it is loaded
                body = await self._body(scope, receive)
                await when_loaded(receive, present, route.model, route.version)
                generate = self._inference(HttpGenerate, route, scope, forwarded)
                return await generate.run(body, receive, send)
            generate = self._inference(HttpGenerate, route, scope, forwarded)
            return await generate.run(await self._body(scope, receive), receive, send)
        if route.verb == "infer_stream":
            stream = self._inference(HttpInferStream, route, scope, forwarded)
            return await stream.run(await self._body(scope, receive), receive, send)
        if route.verb in OPENAI:
            document = members(await self._document(scope, await self._body(scope, receive)))
            client = "" if self._admin else client_of(scope)
            asked = HttpOpenAi(self._services, scope.get(CLIENT), forwarded, scope[TIMES], client)
            if route.verb == "openai_embeddings":
                return await asked.embeddings(document, receive)
            return await asked.completions(document, route.verb == "openai_chat", receive, send)
        answer: Answer = await getattr(self, f"_{route.verb}")(route, scope, receive)
        return answer

    def _record(self, audit: AuditLog, scope: dict[str, Any], error: TritonError | None) -> None:
        """Tells the audit log about a request that changed something or was refused."""
        route = routes.match(scope["method"], scope["raw_path"].decode("latin-1"))
        verb = "unknown" if route is None else route.verb
        if error is None and (route is None or not route.allowed or scope["method"] == "GET"):
            return
        certificate = scope.get(CERTIFICATE)
        audit.record(
            verb,
            "http",
            client_of(scope),
            "" if self._policy is None else self._policy.who(scope["headers"], certificate),
            certificate="" if certificate is None else certificate.subject,
            model="" if route is None else route.model,
            target="" if route is None else route.region or route.sequence,
            error=error,
        )

    def _inference(
        self, kind: type[C], route: routes.Route, scope: dict[str, Any], forwarded: Forwarded | None
    ) -> C:
        """The inference call of a request. Raises TritonError for a model that does not serve."""
        made = kind(self._services, route, scope["headers"])
        made.forwarded = forwarded
        made.times = scope[TIMES]
        made.request.owner = scope.get(CLIENT)
        return made

    async def _infer(
        self, route: routes.Route, scope: dict[str, Any], receive: Receive, forwarded: Forwarded | None
    ) -> Answer:
        infer = self._inference(HttpInfer, route, scope, forwarded)
        body = await self._body(scope, receive)
        try:
            return await self._answered(infer, body, scope, receive)
        finally:
            infer.give_back()

    async def _answered(self, infer: HttpInfer, body: Any, scope: dict[str, Any], receive: Receive) -> Answer:
        waiter = _Waiter(scope)
        times = scope[TIMES]
        try:
            await submitted(infer, times, body, receive, waiter)
            await wait_or_cancel(self._services, infer.request, waiter.event, receive)
        except TritonError as error:
            return error.code.http, [*JSON, *error.headers], error_body(error)
        times.answers(infer.request)
        response = waiter.response
        if response is None:
            response = InferResponse(None, Internal("the model ended the request without a response"))
        answer = infer.encode(response, later=True)
        if answer is None:
            answer = await unless_gone(receive, infer.encode_later, response)
            assert answer is not None
        status, headers, parts = answer
        if infer.encoding:
            return status, headers, await unless_gone(receive, infer.compress_later, parts) or []
        return status, headers, parts


def _in_the_shape_of_openai(answer: Answer, error: TritonError | None) -> Answer:
    """A refusal with the body that OpenAI's clients read; `error` is None where the route or the time refused."""
    status, headers, body = answer
    if error is None:
        error = TritonError(load_json(b"".join(body))["error"])
    return status, headers, [dump_json(error_object(error))]


def _calls_grpc(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(GRPC) for name, value in headers)


def _origin(headers: Headers) -> bytes | None:
    return next((value for name, value in headers if name == b"origin"), None)


def _with_headers(send: Send, extra: Headers) -> Send:
    """A send() that adds headers to the answer."""

    async def wrapped(event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event["headers"], *extra]}
        await send(event)

    return wrapped
