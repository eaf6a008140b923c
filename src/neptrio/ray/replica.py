"""A replica of the deployment: an engine, and Ray's ways into it.

A replica is a process with an asyncio loop for this code and a thread with the engine's trio loop. REST calls go to the
engine's app (embedded/asgi.py), gRPC calls over a connection to its own port, so that deadlines, statuses and
flow control are those of the engine. Requests of another replica's sequence are passed on (forward.py).

When Ray ends a replica, it first stops sending requests and waits for those under way. Then the engine waits for live
sequences, whose requests keep coming from other replicas, and unloads; docs/ray.md says how long.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any

import ray
from grpc import StatusCode
from grpclib.exceptions import GRPCError
from ray import serve

from neptrio.embedded.asgi import call_app, relative
from neptrio.embedded.engine import Engine
from neptrio.embedded.server import Server
from neptrio.errors import Denied, TritonError, Unavailable
from neptrio.ray import directory, sequence_key
from neptrio.ray.autoscaling import depths
from neptrio.ray.directory import Address
from neptrio.ray.forward import Peers, Unreachable, passed_on, unless_gone
from neptrio.ray.grpc_proxy import Message, methods
from neptrio.ray.sequences import Sequences, live_ids
from neptrio.service.sequences import parse_id
from neptrio.transport.rest import routes
from neptrio.transport.rest.guards import refuse

log = logging.getLogger("neptrio.ray")

REPLICA_HEADER = b"neptrio-replica"  # of answers: which replica executed the request
CONTROL = ("repository_load", "repository_unload")
ONE_OF_SEVERAL = (
    "this would change one replica of the deployment only: change 'models' in its user_config instead, or set "
    "replica_control"
)
CODES = {code.value[0]: code for code in StatusCode}
ATTEMPTS = 3  # at finding a sequence's replica


def make_server(given: Any, settings: Mapping[str, Any]) -> Server:
    """The server of a replica: of a repository, of a function that makes one, or of the import path of either.

    Raises TypeError, and what importing and making raise.
    """
    if isinstance(given, str) and ":" in given and "/" not in given:
        module, _, name = given.partition(":")
        given = getattr(importlib.import_module(module), name)
    elif isinstance(given, (str, list, tuple)):
        given = Server(given)
    if not isinstance(given, Server) and callable(given):
        given = given()
    if not isinstance(given, Server):
        raise TypeError(f"expected a neptrio.Server, or a function that returns one, got {given!r}")
    given.preset(**settings)
    return given


class Replica:
    """The deployment's class; `neptrio.ray.app()` makes an application of it."""

    def __init__(
        self,
        server: Any,
        settings: Mapping[str, Any] | None = None,
        drain_seconds: float = 20.0,
        share_sequences: bool = True,
        replica_control: bool = False,
    ) -> None:
        """See neptrio.ray.app(). Called by Ray, in the replica's process."""
        host = ray.util.get_node_ip_address() if share_sequences else "127.0.0.1"
        ours = {
            "allow_http": share_sequences,
            "http_address": host,
            "http_port": 0,
            "allow_grpc": True,
            "grpc_address": host,
            "grpc_port": 0,
            "exit_timeout_secs": max(drain_seconds, 1.0),
        }
        context = serve.get_replica_context()
        self._id = context.replica_id.unique_id
        self._deployment = f"{context.app_name}#{context.deployment}"
        self._server = make_server(server, {**(settings or {}), **ours})
        # Ray's proxies pass on what comes from anywhere, also to a port on a loopback address
        self._server.suggest(allow_file_override=False)
        self._share = share_sequences
        self._control = replica_control
        self._peers = Peers()
        self._sequences: Sequences | None = None
        self._watching: asyncio.Task[None] | None = None
        self._engine: Engine | None = None
        self._changing = asyncio.Lock()
        self._applied: dict[str, Any] = {}  # configurations of the models that user_config named

    # ------------------------------------------------------------ what Ray calls

    def __serve_build_asgi_app__(self) -> Callable[..., Any]:
        """The ASGI application of the replica. Ray starts it with a lifespan, in which the engine runs."""

        async def application(
            scope: Any, receive: Any, send: Any
        ) -> None:  # uvicorn takes a method for ASGI 2
            await self._application(scope, receive, send)

        return application

    async def reconfigure(self, user_config: Mapping[str, Any] | None) -> None:
        """Loads and unloads models as `user_config` says; called at the start and for every change.

        `models`: a list of names, or a mapping of names to configurations (None: the model's own): all that shall be
        loaded. `log`, `trace`: settings. Raises TypeError, ValueError, TritonError: the deployment becomes unhealthy.
        """
        await self._start()
        config = dict(user_config or {})
        unknown = set(config) - {"models", "log", "trace"}
        if unknown:
            raise ValueError(f"user_config has 'models', 'log' and 'trace', got '{min(unknown)}'")
        async with self._changing:
            if "models" in config:
                await self._apply(config["models"])
            if config.get("log"):
                await self._server.log_settings(config["log"])
            if config.get("trace"):
                await self._server.trace_settings(config["trace"])

    async def _apply(self, models: Any) -> None:
        if not isinstance(models, (list, tuple, dict)):
            raise TypeError(f"models must be a list of names or a mapping, got {type(models).__name__}")
        wanted = dict(models) if isinstance(models, dict) else dict.fromkeys(models)
        functions = set(self._server.functions)
        index = {row["name"]: row.get("state") for row in await self._server.index()}
        for name, config in wanted.items():
            if index.get(name) != "READY" or (config or None) != self._applied.get(name):
                await self._server.load(name, config or None)
            self._applied[name] = config or None
        for name, state in index.items():
            if state == "READY" and name not in wanted and name not in functions:
                await self._server.unload(name)
                self._applied.pop(name, None)

    async def check_health(self) -> None:
        """Raises when the engine does not answer or is not ready: Ray then puts another replica in its place."""
        if self._changing.locked():
            return
        if not await self._running().reach(_ready):
            states = [row for row in await self._server.index() if row.get("state") == "UNAVAILABLE"]
            raise Unavailable(f"the engine is not ready: {states or 'it is shutting down'}")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the engine's queues hold; see autoscaling.py."""
        return await self._running().reach(depths)

    async def replicas(self) -> dict[str, Any]:
        """For handles: the replicas with their addresses and numbers of sequences. Empty without share_sequences."""
        if self._sequences is None:
            return {}
        return await self._sequences.replicas()

    # ------------------------------------------------------------ start and end

    async def _start(self) -> None:
        """Starts the engine. Harmless when it runs."""
        if self._engine is not None:
            return
        await self._server.__aenter__()
        engine = self._engine = self._server._running()
        addresses = engine.addresses
        self._grpc = addresses["grpc"]
        if self._share:
            address: Address = {"http": addresses["http"], "grpc": addresses["grpc"]}
            self._sequences = Sequences(
                self._id,
                address,
                lambda: directory.find(self._deployment),
                lambda: engine.reach(live_ids),
            )
            engine.soon(lambda: setattr(engine.asgi, "hold", True))
            await self._sequences.join()
            self._watching = asyncio.ensure_future(self._sequences.watch())

    def _running(self) -> Engine:
        if self._engine is None:
            raise Unavailable("the engine has not started")
        return self._engine

    async def _stop(self) -> None:
        """Waits for live sequences, unloads the models and ends the engine."""
        if self._engine is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        await self._server.__aexit__(None, None, None)
        if self._sequences is not None:
            try:
                await self._sequences.leave()
            except Exception as error:
                log.warning("the directory of sequences does not answer: %s", error)
        await self._peers.close()

    # ------------------------------------------------------------ REST

    async def _application(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            try:
                await self._http(relative(scope), receive, send)
            except TritonError as error:
                await refuse(error, send)

    async def _lifespan(self, receive: Any, send: Any) -> None:
        while True:
            event = await receive()
            try:
                if event["type"] == "lifespan.startup":
                    await self._start()
                else:
                    await self._stop()
            except Exception as error:
                log.exception("%s failed", event["type"])
                await send({"type": event["type"] + ".failed", "message": str(error)})
                raise
            await send({"type": event["type"] + ".complete"})
            if event["type"] == "lifespan.shutdown":
                return

    async def _http(self, scope: Any, receive: Any, send: Any) -> None:
        engine = self._running()
        route = routes.match(scope["method"], scope["raw_path"].decode("latin-1"))
        if route is not None and route.verb in CONTROL and not self._control:
            raise Denied(ONE_OF_SEVERAL)
        marked = marking(send, self._id)
        if self._sequences is None or route is None or not route.allowed:
            await call_app(engine, scope, receive, marked)
            return
        key, body, replayed = "", None, receive
        if route.verb in ("infer", "infer_stream"):
            body, replayed = await self._peeked(receive)
            if body is not None:
                key = self._key_of(route.model, scope, body)
        elif route.verb == "sequence_end":
            body, replayed = await self._peeked(receive)
            query = scope.get("query_string", b"").decode("latin-1")
            key = sequence_key.key(route.model, parse_id(route.sequence, query))
        if not key or body is None:
            await call_app(engine, scope, replayed, marked)
            return
        for _ in range(ATTEMPTS):
            claim = await self._sequences.owner(key)
            if claim is None or claim["address"] is None:
                break
            passing = partial(
                self._peers.http, claim["address"]["http"], scope, body, marking(send, claim["owner"])
            )
            try:
                await unless_gone(receive, passing)
                return
            except Unreachable:
                if not await self._sequences.lost(claim["owner"]):
                    raise Unavailable("the replica that has this sequence cannot be reached") from None
        with self._sequences.using(key):
            await call_app(engine, scope, replayed, marked)

    async def _peeked(self, receive: Any) -> tuple[bytes | None, Any]:
        """The whole body, and a receive() that gives it again; None if it is too large or the client has gone."""
        limit = self._running().core.settings.http_max_input_size
        events: deque[Any] = deque()
        size, more = 0, True
        while more and size <= limit:
            event = await receive()
            events.append(event)
            if event["type"] == "http.disconnect":
                break
            size += len(event.get("body", b""))
            more = event.get("more_body", False)
        body = None
        if not more:
            body = events[0]["body"] if len(events) == 1 else b"".join(e.get("body", b"") for e in events)
            events = deque([{"type": "http.request", "body": body, "more_body": False}])

        async def again() -> Any:
            return events.popleft() if events else await receive()

        return body, again

    def _key_of(self, model: str, scope: Any, body: bytes) -> str:
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding != "identity":
            limit = self._running().core.settings.http_max_input_size
            body = sequence_key.inflated(body, encoding, limit)
        length = headers.get(b"inference-header-content-length", b"")
        return sequence_key.of_json(model, body, int(length) if length.isdigit() else None)

    # ------------------------------------------------------------ gRPC

    async def _unary(self, name: str, path: str, message: bytes, context: Any) -> Message:
        if name.startswith("RepositoryModel") and not self._control:
            context.set_code(StatusCode.PERMISSION_DENIED)
            context.set_details(ONE_OF_SEVERAL)
            return Message(b"")
        key = sequence_key.of_message(message) if name == "ModelInfer" and self._sequences else ""
        metadata = passed_on(context.invocation_metadata())
        try:
            for _ in range(ATTEMPTS):
                claim = await self._owner_of(key)
                address = claim["address"]["grpc"] if claim else self._grpc
                try:
                    answer, trailing = await self._peers.unary(address, path, message, metadata)
                    break
                except Unreachable:
                    await self._gone(claim)
            else:
                raise Unavailable("the replica that has this sequence cannot be reached")
        except (GRPCError, TritonError) as error:
            _tell(context, error)
            return Message(b"")
        replica = claim["owner"] if claim else self._id
        context.set_trailing_metadata(
            [*context.trailing_metadata(), *trailing, (REPLICA_HEADER.decode(), replica)]
        )
        return Message(answer)

    async def _owner_of(self, key: str) -> Any:
        return await self._sequences.owner(key) if key and self._sequences is not None else None

    async def _gone(self, claim: Any) -> None:
        """A replica, None for this one, was not reachable. Raises Unavailable if it still exists."""
        if claim is None or self._sequences is None:
            raise Unavailable("the engine has stopped")
        if not await self._sequences.lost(claim["owner"]):
            raise Unavailable("the replica that has this sequence cannot be reached")

    async def _stream(
        self, path: str, messages: AsyncIterator[bytes], context: Any
    ) -> AsyncIterator[Message]:
        """ModelStreamInfer: the whole stream goes to where its first request belongs."""
        address = self._grpc
        try:
            first = await anext(messages, None)
            if first is not None and self._sequences is not None:
                claim = await self._owner_of(sequence_key.of_message(first))
                address = claim["address"]["grpc"] if claim else address
            given = self._claiming(first, messages)
            async for answer in self._peers.stream(
                address, path, given, passed_on(context.invocation_metadata())
            ):
                yield Message(answer)
        except Unreachable:
            _tell(context, Unavailable("the replica that has this sequence cannot be reached"))
        except (GRPCError, TritonError) as error:
            _tell(context, error)

    async def _claiming(self, first: bytes | None, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """The messages of a stream. The sequences that they begin are claimed for this replica."""
        if first is not None:
            yield first
        async for message in rest:
            await self._owner_of(sequence_key.of_message(message))
            yield message


def marking(send: Any, replica: str) -> Any:
    """A send() that puts into the answer's headers which replica it is from."""
    mark = (REPLICA_HEADER, replica.encode())

    async def marked(event: Any) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event["headers"], mark]}
        await send(event)

    return marked


async def _ready(core: Any) -> bool:
    return bool(core.verbs.metadata.ready())


def _tell(context: Any, error: GRPCError | TritonError) -> None:
    """Makes an error the status of a call."""
    number = error.status.value if isinstance(error, GRPCError) else error.code.grpc.value
    context.set_code(CODES[number])
    context.set_details(str(error.message if isinstance(error, GRPCError) else error))


def _rpc(name: str, path: str, streaming: bool) -> Callable[..., Any]:
    """The method that Ray calls for an RPC: messages are bytes."""
    if streaming:

        async def stream(self: Replica, request: Any, grpc_context: Any) -> AsyncIterator[Message]:
            async for answer in self._stream(path, request, grpc_context):
                yield answer

        return stream

    async def unary(self: Replica, request: bytes, grpc_context: Any) -> Message:
        return await self._unary(name, path, request, grpc_context)

    return unary


for _name, (_path, _client_streams, _server_streams) in methods().items():
    setattr(Replica, _name, _rpc(_name, _path, _server_streams))
