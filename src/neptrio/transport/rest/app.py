"""The ASGI app that answers every REST route. Hypercorn calls it, and so does our own HTTP/1.1 connection."""

from __future__ import annotations

import logging
from typing import Any, TypeVar

import trio

from neptrio.codec.compression import too_large
from neptrio.codec.http_json import dump_json, load_json
from neptrio.codec.json_reader import too_long
from neptrio.codec.openai import error_object
from neptrio.codec.shared_memory import cuda_registration, system_registration
from neptrio.codec.text import bytes_text
from neptrio.errors import Cancelled, Internal, InvalidArgument, TritonError, raise_it
from neptrio.limits import LONGEST_NAME, MIN_BYTES_PER_SECOND, body_bytes
from neptrio.loop.slices import Slices, gathered, in_slices
from neptrio.request.infer_request import InferRequest, InferResponse, Protocol, Responder
from neptrio.service import Services, Verbs
from neptrio.service.audit import AuditLog
from neptrio.service.held_bytes import HeldBytes
from neptrio.service.sequences import parse_id, parse_owner
from neptrio.service.statistics import NOTHING, Detail
from neptrio.transport import admin_only
from neptrio.transport.header_policy import CERTIFICATE, OPENAI, RAW_HEADERS, Forwarded, HeaderPolicy
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.reservation import Reservation
from neptrio.transport.rest import openai, openapi, routes
from neptrio.transport.rest.asgi import Receive, Send
from neptrio.transport.rest.disconnect import Disconnected, unless_gone, wait_or_cancel
from neptrio.transport.rest.generate import HttpGenerate
from neptrio.transport.rest.infer import DECODED_LATER, JSON, Headers, HttpInfer, error_body
from neptrio.transport.rest.infer_stream import HttpInferStream
from neptrio.transport.rest.large_body import PIECE, IncomingBody, send_in_pieces
from neptrio.transport.rest.openai import PREFIX as OPENAI_PREFIX
from neptrio.transport.rest.openai import HttpOpenAi
from neptrio.transport.rest.openapi.page import HEADERS as PAGE
from neptrio.transport.rest.times import TIMES, CallTimes

log = logging.getLogger("neptrio.rest")

Answer = tuple[int, Headers, list[Any]]
TEXT: Headers = [(b"content-type", b"text/plain")]
FORWARDING = ("infer", "infer_stream", "generate", "generate_stream", *OPENAI)
C = TypeVar("C", HttpInfer, HttpInferStream, HttpGenerate)
CLIENT = "neptrio.client"  # key of an ASGI scope: who has sent the request, None where nobody is asked


KEPT = "neptrio.kept"  # key of an ASGI scope: what the call holds of the server's budget


class Kept:
    """The bytes that the objects of one call's JSON hold of the server's budget."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._size = 0
        self._over = False

    def keep(self, size: int) -> None:
        """Counts more bytes. Raises Overloaded, and Cancelled when the call is over: nobody would give them back."""
        if self._over:
            raise Cancelled
        self._held.keep(size)
        self._size += size

    def over(self) -> None:
        """The call is over, and with it its objects."""
        self._over = True
        self._held.let_go(self._size)


class TooSlow(Exception):
    """The request's body does not arrive in time."""


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
        client = self._scope.get("client")
        return str(client[0]) if client else ""

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if request.trace is not None and not request.cancelled:
            request.trace.defer()  # the waiting task encodes and sends the answer, and records when
        if not response.null:
            self.response = response
        if final:
            self.event.set()


class RestApp:
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
        self._services = services
        self._verbs = verbs
        self._admin = admin
        self._admin_elsewhere = services.settings.admin_address is not None and not admin
        self._policy = policy
        self._origins = origins or OriginPolicy()
        self._max_input = services.settings.http_max_input_size

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
            self._check_origin(scope)
            preflight = self._origins.preflight(scope["method"], scope["headers"])
            if preflight is not None:
                return 200, preflight, []
        if route is None:
            return 404, JSON, [b'{"error":"Not Found: GET /docs lists what there is"}']
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
            return 405, JSON, [b'{"error":"Method Not Allowed"}']
        if self._admin_elsewhere:
            admin_only.check_verb(route.verb, scope["method"])
        if route.verb == "infer":
            return await self._infer(route, scope, receive, forwarded)
        if route.verb in ("generate", "generate_stream"):
            waiting = self._services.admission.present(route.model, route.version)
            if waiting is not None:  # what its inputs are is only known when it is loaded
                body = await self._body(scope, receive)
                await unless_gone(receive, waiting)
                generate = self._inference(HttpGenerate, route, scope, forwarded)
                return await generate.run(body, receive, send)
            generate = self._inference(HttpGenerate, route, scope, forwarded)
            return await generate.run(await self._body(scope, receive), receive, send)
        if route.verb == "infer_stream":
            stream = self._inference(HttpInferStream, route, scope, forwarded)
            return await stream.run(await self._body(scope, receive), receive, send)
        if route.verb in OPENAI:
            document = members(await self._document(scope, await self._body(scope, receive)))
            client = "" if self._admin else (scope.get("client") or ("",))[0]
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
        client = scope.get("client")
        certificate = scope.get(CERTIFICATE)
        audit.record(
            verb,
            "http",
            str(client[0]) if client else "",
            "" if self._policy is None else self._policy.who(scope["headers"], certificate),
            certificate="" if certificate is None else certificate.subject,
            model="" if route is None else route.model,
            target="" if route is None else route.region or route.sequence,
            error=error,
        )

    def _check_origin(self, scope: dict[str, Any]) -> None:
        """Raises TritonError FORBIDDEN if a web page of another origin caused the request, or its Host is not ours."""
        found = dict(scope["headers"])
        raise_it(
            self._origins.problem(
                scope["method"], found.get(b"host"), found.get(b"origin"), found.get(b"sec-fetch-site")
            )
        )

    async def _body(self, scope: dict[str, Any], receive: Receive) -> Any:
        """The request's body.

        Raises TritonError (413) as soon as the body is known to be too large, TooSlow, and Disconnected.
        """
        route = routes.match(scope["method"], scope["raw_path"].decode("latin-1"))
        most = self._max_input if route is None else body_bytes(route.verb, self._max_input)
        length = -1
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit():
                length = max(length, int(value))
        if length > most:
            raise too_large(most, most == self._max_input)
        whole: Any = b""
        body: IncomingBody | None = None
        more = True
        # the same rule as on our own connection: each byte that arrives extends the time for the rest
        with trio.move_on_after(self._services.settings.http_request_timeout_secs) as limit:
            while more:
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise Disconnected
                more = event.get("more_body", False)
                part = event.get("body", b"")
                if (len(part) if body is None else body.size + len(part)) > most:
                    raise too_large(most, most == self._max_input)
                if body is None and not more:
                    whole = part
                    break
                body = body or IncomingBody(length)
                body.add(part)
                limit.deadline += len(part) / MIN_BYTES_PER_SECOND
        if more:
            raise TooSlow
        if body is not None:
            whole = await body.whole()
        scope[TIMES].came()
        return whole

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
            if not infer.take(body):
                await unless_gone(receive, infer.take_later)
            with times.submitting(infer.request):
                infer.submit(waiter)
            self._services.loop.loop_pass.end()
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

    # ------------------------------------------------------------ control routes

    async def _document(self, scope: dict[str, Any], body: Any) -> Any:
        """The JSON of a control request's body; a worker reads a large one, and counts what it becomes. Raises
        InvalidArgument, and Overloaded where there is no room for it."""
        if len(body) <= DECODED_LATER:
            return load_json(body, bounded=True)
        reserve = Reservation(scope[KEPT].keep, len(body)).reserve
        return await self._services.workers.run(
            lambda: load_json(body, large=True, reserve=reserve, bounded=True)
        )

    async def _live(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return (200 if self._verbs.metadata.live() else 400), TEXT, []

    async def _ready(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return (200 if self._verbs.metadata.ready() else 400), TEXT, []

    async def _model_ready(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        loaded = b"loaded=true" in scope["query_string"].split(b"&")
        if await self._verbs.metadata.model_ready(route.model, route.version, loaded):
            return 200, TEXT, []
        return 400, JSON, [b'{"error":"Model version not ready"}']

    async def _server_metadata(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return 200, JSON, [dump_json(self._verbs.metadata.server())]

    async def _openai_models(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return 200, JSON, await openai.models(self._verbs, scope.get(CLIENT), route.model)

    async def _openapi(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return 200, JSON, [dump_json(openapi.document())]

    async def _reference(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        """The page, with the models that the client may see."""
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost:8000")
        owner = scope.get(CLIENT)
        found: dict[str, Any] = {}  # the newest version counts
        slices = Slices()
        for model in self._verbs.metadata.serving():
            if owner is None or owner.client.covers(model.name):
                found[model.name] = model.config
                if len(found) > openapi.MOST_MODELS:
                    break
            await slices.rest()
        scheme = scope.get("scheme", "http")
        return 200, PAGE, [openapi.page(found.values(), f"{scheme}://{host.decode('latin-1')}")]

    _home = _reference

    async def _present(self, route: routes.Route, receive: Receive) -> None:
        """Has a model loaded that is loaded on demand. Raises Unavailable, Disconnected."""
        waiting = self._verbs.metadata.absent(route.model, route.version)
        if waiting is not None:
            await unless_gone(receive, waiting)

    async def _model_metadata(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        await self._present(route, receive)
        return 200, JSON, [dump_json(self._verbs.metadata.model(route.model, route.version))]

    async def _model_config(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        await self._present(route, receive)
        marked = b"defaulted=true" in scope["query_string"].split(b"&")
        return 200, JSON, [dump_json(self._verbs.metadata.config(route.model, route.version, marked))]

    async def _statistics(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        detail = Detail.parse(scope["query_string"].decode("latin-1"))
        statistics = self._verbs.statistics
        if detail == NOTHING:
            rows = await gathered(statistics.texts(route.model, route.version, "json", dump_json), b",")
        else:
            rows = await in_slices(statistics.rows(route.model, route.version, detail), dump_json, b",")
        others = dump_json(statistics.others(detail))[1:]
        made = [b'{"model_stats":[', rows, b"]"]
        totals, models = statistics.demand(route.model, detail)
        if totals:
            texts = await in_slices(models, dump_json, b",")
            made += [b',"on_demand":', dump_json(totals)[:-1], b',"models":[', texts, b"]}"]
        return 200, JSON, [*made, b"," if len(others) > 1 else b"", others]

    async def _sequences(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        found = await self._verbs.sequences.list(route.model, route.version, scope.get(CLIENT))
        return 200, JSON, [dump_json(found)]

    async def _sequence_end(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        query = scope["query_string"].decode("latin-1")
        sequence_id, owner = parse_id(route.sequence, query), parse_owner(query)
        ended = self._verbs.sequences.end(route.model, route.version, sequence_id, scope.get(CLIENT), owner)
        return 200, JSON, [dump_json(ended)]

    async def _logging(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        if scope["method"] == "GET":
            return 200, JSON, [dump_json(self._verbs.logging.settings())]
        changes = members(await self._document(scope, await self._body(scope, receive)))
        return 200, JSON, [dump_json(self._verbs.logging.update(changes))]

    def _regions(self, route: routes.Route, change: bool = False) -> Any:
        """The shared memory that a verb is about. Raises TritonError where it may not be used."""
        memory = self._services.shared_memory
        memory.check_allowed(change=change)
        return memory.cuda if route.verb.startswith("cuda") else memory.system

    async def _system_shm_status(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return 200, JSON, [dump_json(self._regions(route).status(route.region))]

    async def _system_shm_unregister(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        self._regions(route, change=True).unregister(route.region)
        return 200, JSON, []

    _cuda_shm_status, _cuda_shm_unregister = _system_shm_status, _system_shm_unregister

    async def _system_shm_register(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        regions = self._regions(route, change=True)
        regions.check_named(route.region)
        document = await self._document(scope, await self._body(scope, receive))
        regions.register(route.region, *system_registration(document))
        return 200, JSON, []

    async def _cuda_shm_register(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        regions = self._regions(route, change=True)
        regions.check_named(route.region)
        document = await self._document(scope, await self._body(scope, receive))
        raw_handle, device_id, byte_size = cuda_registration(document)
        await regions.register(route.region, raw_handle, device_id, byte_size)
        return 200, JSON, []

    async def _trace_setting(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        trace = self._verbs.trace
        if scope["method"] == "GET":
            return 200, JSON, [dump_json(trace.settings(route.model))]
        given = members(await self._document(scope, await self._body(scope, receive)))
        return 200, JSON, [dump_json(await trace.update(given, route.model))]

    async def _trace_recent(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        traces = self._verbs.trace.recent(scope["query_string"].decode("latin-1"))
        return 200, JSON, [b"[", await gathered(map(bytes, traces), b","), b"]"]

    async def _errors(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        rows = self._verbs.statistics.errors(route.model, route.version)
        return 200, JSON, [b'{"models":[', await in_slices(rows, dump_json, b","), b"]}"]

    async def _logging_recent(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        query = scope["query_string"].decode("latin-1")
        return 200, JSON, [dump_json(self._verbs.recent_log.lines(query, self._admin))]

    async def _repository_index(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        body = await self._body(scope, receive)
        document = members(await self._document(scope, body)) if body else {}
        asked = {"ready": False, "timings": b"timings=true" in scope["query_string"].split(b"&")}
        for name in asked:
            if not isinstance(document.get(name, False), bool):
                raise InvalidArgument(
                    f"Unable to parse '{name}': attempt to access JSON non-boolean as boolean"
                )
            asked[name] = document.get(name, asked[name])
        repository = self._verbs.repository
        if asked["timings"]:
            rows = await repository.index_rows(asked["ready"], timings=True, repository=route.repository)
            return 200, JSON, [b"[", await in_slices(rows, dump_json, b","), b"]"]
        texts = await repository.index_texts(asked["ready"], "json", dump_json, route.repository)
        return 200, JSON, [b"[", await gathered(texts, b","), b"]"]

    async def _load_parameters(self, scope: Any, receive: Receive) -> tuple[dict[str, Any], dict[str, Any]]:
        """The parameters of a load, unload or check, and the whole document they are in."""
        body = await self._body(scope, receive)
        document = members(await self._document(scope, body)) if body else {}
        parameters = document.get("parameters", {})
        if not isinstance(parameters, dict):
            raise InvalidArgument("attempt to get members for non-object")
        return parameters, document

    async def _repository_check(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        parameters, document = await self._load_parameters(scope, receive)
        config = document.get("config")
        if config is not None and "config" not in parameters:
            plain = (
                config
                if isinstance(config, str)
                else bytes_text(await self._services.workers.run(lambda: dump_json(config)))
            )
            parameters = {**parameters, "config": plain}
        return 200, JSON, [await self._verbs.repository.check(route.model, parameters)]

    async def _repository_load(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        parameters, _ = await self._load_parameters(scope, receive)
        await self._verbs.repository.load(route.model, parameters, route.repository, scope.get(CLIENT))
        return 200, JSON, []

    async def _repository_model(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return 200, JSON, [dump_json(await self._verbs.repository.progress(route.model))]

    async def _label_setting(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        repository = self._verbs.repository
        if scope["method"] == "GET":
            return 200, JSON, [dump_json(await repository.names(route.model))]
        given = members(await self._document(scope, await self._body(scope, receive)))
        return 200, JSON, [dump_json(await repository.set_names(route.model, given, scope.get(CLIENT)))]

    async def _repository_unload(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        parameters, _ = await self._load_parameters(scope, receive)
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument(
                "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
            )
        await self._verbs.repository.unload(route.model, dependents, route.repository)
        return 200, JSON, []


def _in_the_shape_of_openai(answer: Answer, error: TritonError | None) -> Answer:
    """A refusal with the body that OpenAI's clients read; `error` is None where the route or the time refused."""
    status, headers, body = answer
    if error is None:
        error = TritonError(load_json(b"".join(body))["error"])
    return status, headers, [dump_json(error_object(error))]


def _origin(headers: Headers) -> bytes | None:
    return next((value for name, value in headers if name == b"origin"), None)


def _with_headers(send: Send, extra: Headers) -> Send:
    """A send() that adds headers to the answer."""

    async def wrapped(event: dict[str, Any]) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event["headers"], *extra]}
        await send(event)

    return wrapped


def members(document: Any) -> dict[str, Any]:
    """The members of a control request's JSON body. `[]` and `null` count as an empty object, as a Triton server
    takes them (docs/protocol/observed.md 11, 14).

    Raises InvalidArgument for any other value that is not an object.
    """
    if isinstance(document, dict):
        return document
    if document is None or document == []:
        return {}
    got = bytes_text(dump_json(document))[:60]
    raise InvalidArgument(f"attempt to get members for non-object, got: {got}")
