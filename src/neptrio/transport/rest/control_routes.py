"""The routes of the REST app other than inference: how each is read, which service answers it, and in which form.

Method `_VERB` answers the routes of that verb (routes.py).
"""

from __future__ import annotations

from typing import Any

import trio

from neptrio.codec.compression import too_large
from neptrio.codec.http_json import dump_json, load_json
from neptrio.codec.shared_memory import cuda_registration, system_registration
from neptrio.codec.text import bytes_text
from neptrio.config.version_labels import LABELS
from neptrio.errors import InvalidArgument
from neptrio.limits import MIN_BYTES_PER_SECOND, body_bytes, shown
from neptrio.loop.slices import Slices, gathered, in_slices
from neptrio.repository.override import FILE
from neptrio.service import Services, Verbs
from neptrio.service.sequences import parse_id, parse_owner
from neptrio.service.statistics import NOTHING, Detail
from neptrio.transport.reservation import Reservation
from neptrio.transport.rest import openai, openapi, routes
from neptrio.transport.rest.asgi import Receive
from neptrio.transport.rest.disconnect import Disconnected, when_loaded
from neptrio.transport.rest.infer import DECODED_LATER, JSON, Answer, Headers
from neptrio.transport.rest.large_body import IncomingBody
from neptrio.transport.rest.openapi.page import HEADERS as PAGE
from neptrio.transport.rest.times import TIMES

TEXT: Headers = [(b"content-type", b"text/plain")]
LOAD_PARAMETERS = ("config", "async", LABELS, "unload_dependents")
# keys of an ASGI scope
CLIENT = "neptrio.client"  # who has sent the request, None where nobody is asked
KEPT = "neptrio.kept"  # what the call holds of the server's budget


class TooSlow(Exception):
    """The request's body does not arrive in time."""


class ControlRoutes:
    """The control verbs."""

    def __init__(self, services: Services, verbs: Verbs, admin: bool) -> None:
        """`admin`: those of the admin listener."""
        self._services = services
        self._verbs = verbs
        self._admin = admin
        self._max_input = services.settings.http_max_input_size

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
        await when_loaded(receive, self._verbs.metadata.absent, route.model, route.version)

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
        async with self._verbs.changes.changed():
            settings = self._verbs.logging.update(changes)
        return 200, JSON, [dump_json(settings)]

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
        if route.verb == "cuda_shm_register":
            await regions.register(route.region, *cuda_registration(document))
        else:
            regions.register(route.region, *system_registration(document))
        return 200, JSON, []

    _cuda_shm_register = _system_shm_register

    async def _trace_setting(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        trace = self._verbs.trace
        if scope["method"] == "GET":
            return 200, JSON, [dump_json(trace.settings(route.model))]
        given = members(await self._document(scope, await self._body(scope, receive)))
        async with self._verbs.changes.changed():
            settings = await trace.update(given, route.model)
        return 200, JSON, [dump_json(settings)]

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
        parameters = _well_placed(*await self._load_parameters(scope, receive))
        async with self._verbs.changes.changed():
            await self._verbs.repository.load(route.model, parameters, route.repository, scope.get(CLIENT))
        return 200, JSON, []

    async def _repository_model(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        return 200, JSON, [dump_json(await self._verbs.repository.progress(route.model))]

    async def _label_setting(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        repository = self._verbs.repository
        if scope["method"] == "GET":
            return 200, JSON, [dump_json(await repository.names(route.model))]
        given = members(await self._document(scope, await self._body(scope, receive)))
        async with self._verbs.changes.changed():
            names = await repository.set_names(route.model, given, scope.get(CLIENT))
        return 200, JSON, [dump_json(names)]

    async def _repository_unload(self, route: routes.Route, scope: Any, receive: Receive) -> Answer:
        parameters = _well_placed(*await self._load_parameters(scope, receive))
        dependents = parameters.get("unload_dependents", False)
        if not isinstance(dependents, bool):
            raise InvalidArgument(
                "Unable to parse 'unload_dependents': attempt to access JSON non-boolean as boolean"
            )
        async with self._verbs.changes.changed():
            await self._verbs.repository.unload(route.model, dependents, route.repository)
        return 200, JSON, []


def _well_placed(parameters: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a load or unload. Raises InvalidArgument where one stands beside them: a call that goes on without it
    does something else than was asked for."""
    for key in document:
        if key in LOAD_PARAMETERS or key.startswith(FILE):
            raise InvalidArgument(f"'{shown(key)}' is a parameter: expected it in the object 'parameters'")
    return parameters


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
