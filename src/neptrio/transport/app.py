"""The ASGI app: every REST route, served by hypercorn and called by the lean HTTP/1.1 connection."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from neptrio._cext.request import InferRequest, InferResponse, Responder
from neptrio.codec import json_infer
from neptrio.codec.json_infer import dump_json, load_json
from neptrio.errors import InvalidArgument, TritonError
from neptrio.service import Services
from neptrio.service.statistics import Detail
from neptrio.transport import routes
from neptrio.transport.http_infer import HttpInfer, error_body

log = logging.getLogger("neptrio.rest")

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Headers = list[tuple[bytes, bytes]]
JSON: Headers = [(b"content-type", b"application/json")]
TEXT: Headers = [(b"content-type", b"text/plain")]


class _Waiter(Responder):
    """Lets a task wait for a single response."""

    def __init__(self) -> None:
        self.event = trio.Event()
        self.response: InferResponse | None = None

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.response = response
        if final:
            self.event.set()


class RestApp:
    """ASGI callable over the services."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._max_input = services.settings.http_max_input_size

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            status, headers, body = await self._answer(scope, receive)
        except TritonError as error:
            status, headers, body = error.code.http, JSON, error_body(error)
        except Exception as error:
            log.exception("%s %s failed", scope["method"], scope["raw_path"])
            status, headers, body = (
                500,
                JSON,
                error_body(TritonError(f"internal error: {type(error).__name__}")),
            )
        length = sum(len(memoryview(part)) for part in body)
        await send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"content-length", str(length).encode())],
            }
        )
        if scope["method"] == "HEAD":
            body = []
        await send({"type": "http.response.body", "body": b"".join(bytes(part) for part in body)})

    async def _answer(self, scope: dict[str, Any], receive: Receive) -> tuple[int, Headers, list[Any]]:
        method = scope["method"]
        path = scope["raw_path"].decode("latin-1")
        route = routes.match(method, path)
        if route is None:
            return 404, JSON, [b'{"error":"Not Found"}']
        if not route.allowed:
            return 405, JSON, [b'{"error":"Method Not Allowed"}']
        if route.verb == "infer":
            return await self._infer(route, scope, receive)
        handler = getattr(self, f"_{route.verb}")
        return await handler(route, scope, receive)

    async def _body(self, scope: dict[str, Any], receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            event = await receive()
            if event["type"] == "http.disconnect":
                raise TritonError("client disconnected")
            part = event.get("body", b"")
            size += len(part)
            if size > self._max_input:
                raise InvalidArgument(
                    f"request body exceeds the limit of {self._max_input} bytes (--http-max-input-size)"
                )
            parts.append(part)
            if not event.get("more_body", False):
                return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _infer(self, route: routes.Route, scope: dict[str, Any], receive: Receive) -> Any:
        infer = HttpInfer(self._services, route, scope["headers"])
        body = await self._body(scope, receive)
        waiter = _Waiter()
        infer.submit(body, waiter)
        self._services.loop.turn.end()
        try:
            await waiter.event.wait()
        except trio.Cancelled:
            self._services.inference.cancel(infer.request)
            raise
        assert waiter.response is not None
        return infer.encode(waiter.response)

    # ------------------------------------------------------------ control routes

    async def _live(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        return (200 if self._services.metadata.live() else 400), TEXT, []

    async def _ready(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        return (200 if self._services.metadata.ready() else 400), TEXT, []

    async def _model_ready(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        if self._services.metadata.model_ready(route.model, route.version):
            return 200, TEXT, []
        return 400, JSON, [b'{"error":"Model version not ready"}']

    async def _server_metadata(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        return 200, JSON, [dump_json(self._services.metadata.server())]

    async def _model_metadata(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        return 200, JSON, [dump_json(self._services.metadata.model(route.model, route.version))]

    async def _model_config(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        return 200, JSON, [dump_json(self._services.metadata.config(route.model, route.version))]

    async def _statistics(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        detail = Detail.parse(scope["query_string"].decode("latin-1"))
        statistics = self._services.statistics.model_statistics(route.model, route.version, detail)
        return 200, JSON, [dump_json(statistics)]

    async def _repository_index(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        body = await self._body(scope, receive)
        document = load_json(body) if body else {}
        ready = document.get("ready", False) if isinstance(document, dict) else False
        if not isinstance(ready, bool):
            raise InvalidArgument("Unable to parse 'ready': attempt to access JSON non-boolean as boolean")
        return 200, JSON, [dump_json(self._services.repository.index(ready))]

    async def _repository_load(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        body = await self._body(scope, receive)
        document = load_json(body) if body else {}
        parameters = document.get("parameters", {}) if isinstance(document, dict) else {}
        if not isinstance(parameters, dict):
            raise InvalidArgument("attempt to get members for non-object")
        await self._services.repository.load(route.model, parameters, route.repository)
        return 200, JSON, []

    async def _repository_unload(self, route: routes.Route, scope: Any, receive: Receive) -> Any:
        body = await self._body(scope, receive)
        try:
            dependents = bool(load_json(body)["parameters"]["unload_dependents"])
        except (TritonError, KeyError, TypeError):
            dependents = False
        await self._services.repository.unload(route.model, dependents, route.repository)
        return 200, JSON, []


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": event["type"] + ".complete"})
        if event["type"] == "lifespan.shutdown":
            return


__all__ = ["RestApp", "json_infer"]
