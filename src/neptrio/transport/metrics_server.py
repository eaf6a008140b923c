"""The metrics port: answers GET /metrics; any other path gets an empty 200, as from a Triton server.

It uses the HTTP/1.1 connections of the REST port with an app of its own, so that both ports read, refuse and time out
alike, with TLS and without. It depends on no other port, so metrics can be read while those drain.

Rules:
 1. A connection is closed after IDLE_SECONDS without a request. If there are MAX_CONNECTIONS and a new one comes, the
    one whose last request is oldest is closed.
 2. A body of more than MAX_BODY bytes is refused, because no request for metrics needs one.
 3. A request must have one Host header, and transport.origin_policy must accept it as a name of this server. Only
    HTTP/1.1 is spoken; a plain connection that begins as HTTP/2 is closed.
 4. With --auth-config, reading metrics needs a token, or a certificate, with the scope `read` that is for all models.
 5. Where the console is on (transport.console), /console is served, too, and the REST verbs that it needs below it: the
    bodies of those may be as large as REST's, and are taken from the same budget. A shutdown does not wait for them.
 6. When the server stops, it does not wait for this port.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any

import trio

from neptrio.addresses import is_loopback
from neptrio.errors import TritonError
from neptrio.loop import open_files, periodic, threads
from neptrio.observe.machine import HostSample, HostSampler
from neptrio.observe.metrics import Metrics
from neptrio.service import Services, Verbs
from neptrio.service.auth_config import READ
from neptrio.transport.console import Console, Ports
from neptrio.transport.header_policy import CERTIFICATE, HeaderPolicy, bearer, http_policy
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.open_connections import OpenConnections
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.port_server import PortServer
from neptrio.transport.rest.asgi import respond
from neptrio.transport.rest.guards import refuse
from neptrio.transport.rest.infer import not_allowed
from neptrio.transport.rest.large_body import send_in_pieces
from neptrio.transport.rest.port import Port
from neptrio.transport.tls import metrics_tls
from neptrio.transport.wire import Wire

IDLE_SECONDS = 60
MAX_CONNECTIONS = 256
MAX_BODY = 64 << 10
PATHS = (b"/metrics", b"/metrics/")
TEXT = (b"content-type", b"text/plain; charset=utf-8")
CONSOLE_PATHS = (b"/console", b"/console/")
REST_ELSEWHERE = "this is the metrics port, REST is on another port, --http-port (8000)"
# a comment, as a page of metrics without any has it: a Triton server's answer is 200 and empty
ELSEWHERE = b"# metrics are at /metrics; %s\n" % REST_ELSEWHERE.encode()
CONSOLE_OFF = (
    b"The console is off here. It is on by default on loopback addresses (--http-address=127.0.0.1), and elsewhere with\n"
    b"--allow-console=true, for whoever can reach this port.\n"
)


class MetricsServer(PortServer):
    """Serves the metrics port, and samples the machine's gauges (CPU, memory, GPU) at an interval in seconds."""

    name = "metrics"
    watch_seconds = 5.0

    def __init__(
        self,
        services: Services,
        verbs: Verbs,
        metrics: Metrics,
        listener: socket.socket,
        sampler: HostSampler,
        interval: float,
        ports: Ports | None = None,
    ) -> None:
        """`ports`: where the console says that clients reach the server."""
        super().__init__(services, listener, metrics_tls(services.settings), MAX_CONNECTIONS)
        address = str(listener.getsockname()[0])
        self._origins = OriginPolicy(hosts=services.settings.allowed_host, loopback=is_loopback(address))
        self.metrics = metrics
        self._sampler = sampler
        self._interval = interval
        policy: HeaderPolicy | None = None
        self.console: Console | None = None
        if services.settings.console_at(address):
            policy = http_policy(services.settings, services.tokens)
            self.console = Console(services, verbs.at(address), self._origins, policy, ports, metrics)
        self._port = Port(
            services,
            self._app,
            policy,
            self._origins,
            only_app=True,
            counted=self.console is not None,
            max_body=MAX_BODY if self.console is None else 0,
            body_limit=None if self.console is None else self._body_limit,
            on_call=self._places.take,
            logged=False,  # whoever collects metrics asks all the time
        )
        self._connections = OpenConnections[Http1Connection](None)
        if self.console is not None:
            services.held.add(self._connections.held_bytes)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled."""
        await self._sample()
        await super().run(task_status)

    def tasks(self) -> list[Callable[[], Awaitable[None]]]:
        return [self._sample_for_ever, self._port.calls.load, self._give_up_at_the_end]

    async def _give_up_at_the_end(self) -> None:
        try:
            await trio.sleep_forever()
        finally:
            for connection in self._connections:
                connection.writer.give_up()  # a scraper that does not read holds up no shutdown

    @property
    def connections(self) -> int:
        """How many connections a shutdown must wait for: none (rule 5)."""
        return 0

    async def drain(self) -> None:
        """Does nothing: metrics can be read until the other ports have drained."""

    async def _sample_for_ever(self) -> None:
        await periodic.for_ever(self._interval, self._sample, "sampling the machine", self._log)

    async def _sample(self) -> None:
        """Takes one sample. A failure is only logged, because the next sample may work (descriptors may be used up)."""
        try:
            self.metrics.host = await threads.run(self._take_sample, abandon_on_cancel=True)
        except (OSError, threads.NoThread) as error:
            self._log.warning("sampling the machine failed, its gauges stay as they are: %s", error)
        except Exception:
            self._log.exception("sampling the machine failed, its gauges stay as they are")

    def _take_sample(self) -> HostSample:
        with open_files.taking:
            return self._sampler.sample()

    def check(self, now_ns: int, pressed: bool) -> None:
        limit = IDLE_SECONDS * 10**9
        self._connections.check(now_ns, limit, limit)

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            if self.console is not None and self.console.serves(scope["raw_path"]):
                await self.console(scope, receive, send)
            else:
                await self.answer(scope, self._origins, send)

    async def serve(self, wire: Wire, turned_away: str) -> None:
        if await self._connections.serve(Http1Connection(wire, self._port)):
            wire.close()  # it begins as HTTP/2

    def _body_limit(self, url: bytes) -> int:
        """Where the console is on: bytes that the body of a request for `url` may have (rules 2 and 5)."""
        of_api = self.console is not None and self.console.serves_api(url)
        return self._services.settings.http_max_input_size if of_api else MAX_BODY

    async def answer(self, scope: Any, origins: OriginPolicy, send: Any) -> None:
        """Answers a request, given and sent as ASGI does; `origins` decides about its Host."""
        method, headers, path = scope["method"], scope["headers"], scope["raw_path"]
        tokens = self._services.tokens
        try:
            origins.check("GET", headers)
            if tokens is not None:
                tokens.check(bearer(headers), (READ,), "", scope.get(CERTIFICATE))
        except TritonError as error:
            await refuse(error, send, method)
            return
        if method != "GET":
            here = path.partition(b"?")[0] in (*PATHS, *CONSOLE_PATHS)
            status, start, body = not_allowed(("GET",), "" if here else REST_ELSEWHERE)
            await respond(send, status, start, body, method)
        elif path.partition(b"?")[0] in PATHS:
            whole = b"".join(await self.metrics.document())
            start = [TEXT, (b"content-length", b"%d" % len(whole))]
            await send({"type": "http.response.start", "status": 200, "headers": start})
            await send_in_pieces(send, [whole])
        elif path in CONSOLE_PATHS:  # it is off: an empty page would be a riddle
            await respond(send, 404, [TEXT], [CONSOLE_OFF])
        else:
            await respond(send, 200, [TEXT], [ELSEWHERE])
