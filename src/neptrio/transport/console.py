"""The console (docs/console.md) at the metrics port and the admin listener: its files, and the API that they call.

The problem: a page may call only the origin that it came from without everybody's pages being allowed to, and the
metrics port has no API. The choice: where the console is on, the port answers the REST verbs that the console needs
under /console/v2/, with the same app, so that tokens, restricted APIs, --read-only, the admin listener and the audit log
hold unchanged, and all that is not under /console stays as it was.

Rules:
 1. It is on by itself only where it adds no way in: on a loopback address, with REST on, and if REST asks clients for
    certificates only where this port asks for the same ones (Settings.console_at).
 2. Host and Origin are checked for every request, files included (transport.origin_policy). No page of another origin
    may use it, whatever --cors-allow-origin says.
 3. The files hold nothing of this server and need no token; about.json says only what to ask the user for.
 4. server.json shows all of the server, so its reader needs a token that may read all models.
 5. Shared memory is not served here: a browser has none to share.
 6. Browsers cannot send every name of a model as it is, and REST takes paths as they are sent. So a model's name is
    decoded here once, before anything looks at the path.
 7. The limits on the requests of a client's address hold here as for REST, and those here and there count together; not
    on the admin listener, which has none.
"""

from __future__ import annotations

import os
import re
import resource
import socket
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

from neptrio import __version__
from neptrio.codec.http_json import dump_json
from neptrio.console import pages
from neptrio.errors import NotFound, TritonError
from neptrio.request.infer_request import monotonic_ns
from neptrio.service import Services, Verbs
from neptrio.service.auth_config import READ
from neptrio.transport.header_policy import CERTIFICATE, GRPC_PREFIX, HeaderPolicy, bearer
from neptrio.transport.origin_policy import OriginPolicy
from neptrio.transport.rest import routes
from neptrio.transport.rest.app import RestApp
from neptrio.transport.rest.asgi import Receive, Send, client_of, respond
from neptrio.transport.rest.guards import always_answered, refuse
from neptrio.transport.rest.infer import JSON, error_body, not_allowed

if TYPE_CHECKING:
    from neptrio.observe.metrics import Metrics

ABOUT, SERVER = "/console/about.json", "/console/server.json"
NOT_SERVED = frozenset(
    f"{kind}_shm_{verb}" for kind in ("system", "cuda") for verb in ("status", "register", "unregister")
)
_MODEL = re.compile(rb"/v2/(?:repository/)?models/([^/?]+)")
PAGE = os.sysconf("SC_PAGE_SIZE")

Answer = tuple[int, pages.Headers, bytes]


@dataclass(frozen=True)
class Ports:
    """Where clients reach the server's protocols, for the examples that the pages show; None: nowhere."""

    rest: int | None = None
    grpc: int | None = None

    @classmethod
    def of(cls, rest: socket.socket | None, grpc: socket.socket | None) -> Ports:
        """Those of the listeners."""
        return cls(*(None if one is None else one.getsockname()[1] for one in (rest, grpc)))


class Console:
    """The console of one port. An ASGI app for the paths that it serves()."""

    def __init__(
        self,
        services: Services,
        verbs: Verbs,
        origins: OriginPolicy,
        policy: HeaderPolicy | None,
        ports: Ports | None,
        metrics: Metrics | None = None,
        admin: bool = False,
    ) -> None:
        """`policy` is that of REST. `admin`: the console of the admin listener."""
        self._services = services
        self._verbs = verbs
        self._origins = origins
        self._policy = policy
        self._ports = ports or Ports()
        self._metrics = metrics
        self._admin = admin
        self._rest = RestApp(services, verbs, policy, origins, admin)
        self._pages = pages.read()
        self._started = time.time()

    def serves(self, path: bytes) -> bool:
        """Whether a request with this path, a query included, is for the console itself."""
        plain = path.partition(b"?")[0]
        return plain == b"/console" or plain.startswith(b"/console/")

    def serves_api(self, path: bytes) -> bool:
        """Whether a request with this path is for the REST verbs that the console calls."""
        return path.startswith(b"/console/v2/")

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if self.serves_api(scope["raw_path"]):
            path = rest_path(scope["raw_path"])
            route = routes.match(scope["method"], path.decode("latin-1"))
            if route is None or route.verb not in NOT_SERVED:
                await self._limited(
                    {**scope, "raw_path": path, "path": path.decode("latin-1")}, receive, send
                )
                return
        try:
            status, headers, body = self._answer(scope)
        except TritonError as error:
            status, headers = error.code.http, [*JSON, *error.headers]
            body = b"".join(error_body(error))
        await respond(send, status, headers, [body], scope["method"])

    async def _limited(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """A verb of REST, within the limits that REST has for the client's address (rule 7)."""
        limits = self._services.request_limits
        if self._admin or not limits.on:
            await self._rest(scope, receive, send)
            return
        address = client_of(scope)

        def one() -> int:
            return 1

        limits.join(address, one)
        try:
            problem = None
            if not always_answered(scope, self._policy):
                problem = limits.problem(address, monotonic_ns())
            if problem is not None:
                await refuse(problem, send)
            else:
                await self._rest(scope, receive, send)
        finally:
            limits.leave(address, one)

    def _answer(self, scope: dict[str, Any]) -> Answer:
        self._origins.check("GET", scope["headers"])
        if scope["method"] not in ("GET", "HEAD"):
            status, start, body = not_allowed(("GET", "HEAD"))
            return status, start, body[0]
        path = scope["raw_path"].partition(b"?")[0].decode("latin-1")
        if path == pages.ROOT:
            return 308, [(b"location", b"/console/")], b""
        page = self._pages.get(path)
        if page is not None:
            return page.answer(dict(scope["headers"]).get(b"if-none-match"))
        if path == ABOUT:
            return 200, self._json(), dump_json(self._about())
        if path == SERVER:
            self._may_read(scope)
            return 200, self._json(), dump_json(self._server())
        raise NotFound("the console has no such page")

    def _json(self) -> pages.Headers:
        return [*JSON, (b"cache-control", b"no-store"), *pages.SECURITY]

    def _may_read(self, scope: dict[str, Any]) -> None:
        """Raises TritonError if the client may not see what concerns the whole server."""
        if self._policy is not None:
            self._policy.check("statistics", scope["headers"], "", "GET", scope.get(CERTIFICATE))
        elif self._services.tokens is not None:
            self._services.tokens.check(bearer(scope["headers"]), (READ,), "", scope.get(CERTIFICATE))

    def _about(self) -> dict[str, Any]:
        """What the pages must know before anybody has said who they are."""
        settings = self._services.settings
        return {
            "tokens": self._services.tokens is not None,
            "restricted": {
                category: restriction.header
                for restriction in settings.http_restricted_api
                for category in restriction.categories
            },
            "read_only": settings.read_only,
            "model_control_mode": settings.model_control_mode,
            "admin_elsewhere": settings.admin_address is not None and not self._admin,
            "forced_trace": settings.forced_trace,
            "rest": None
            if self._ports.rest is None
            else {"port": self._ports.rest, "tls": settings.http_tls_cert is not None},
            "grpc": None if self._ports.grpc is None else self._grpc(self._ports.grpc),
        }

    def _grpc(self, port: int) -> dict[str, Any]:
        settings = self._services.settings
        wanted = [one.header for one in settings.grpc_restricted_protocol if "inference" in one.categories]
        return {
            "port": port,
            "tls": settings.grpc_use_ssl or settings.grpc_use_ssl_mutual,
            "header": GRPC_PREFIX + wanted[0] if wanted else None,
        }

    def _server(self) -> dict[str, Any]:
        """The server as a whole, now. Bytes and seconds."""
        services, verbs = self._services, self._verbs
        used = resource.getrusage(resource.RUSAGE_SELF)
        host = None if self._metrics is None else self._metrics.host
        return {
            "id": services.settings.id,
            "version": __version__,
            "ready": verbs.metadata.ready(),
            "started": self._started,
            "process": {
                "pid": os.getpid(),
                "resident_bytes": _resident(),
                "cpu_seconds": used.ru_utime + used.ru_stime,
            },
            "host": None if host is None else asdict(host),
            "connections": asdict(services.connections.statistics()),
            "held_bytes": services.held.count(),
            "held_bytes_limit": services.held.limit,
            "cache": None if verbs.cache is None else asdict(verbs.cache.statistics()),
            "traces": asdict(verbs.trace.statistics()),
        }


def rest_path(path: bytes) -> bytes:
    """The path of REST for one under /console, with the model's name decoded (rule 6)."""
    plain = path.removeprefix(b"/console")
    found = _MODEL.match(plain)
    if found is None:
        return plain
    name = unquote_to_bytes(found[1])
    if not name.isascii() or any(byte in name for byte in b"/?#") or min(name, default=0) < 32:
        return plain
    return plain[: found.start(1)] + name + plain[found.end(1) :]


def _resident() -> int:
    """The process's resident memory in bytes, 0 where the system does not tell."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * PAGE
    except (OSError, ValueError):
        return 0
