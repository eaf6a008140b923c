"""The REST routes: one table from method and path to a verb, for all HTTP connections.

Paths are matched as they were sent, like in a Triton server: without percent-decoding, without trailing slashes, and
without the query string (docs/protocol/observed.md 1). Only the name of a repository is percent-decoded: it may be a path.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import unquote

from neptrio.config.version_labels import LABEL
from neptrio.limits import remember
from neptrio.service.certificates import Certificate
from neptrio.transport.header_policy import HeaderPolicy, Pairs

_NAMED = "/models/(?P<model>[^/]+)"
_MODEL = rf"/v2{_NAMED}(?:/versions/(?P<version>[0-9]+|{LABEL}))?"
_SYSTEM_SHM, _CUDA_SHM = (
    f"/v2/{kind}sharedmemory(?:/region/(?P<region>[^/]+))?" for kind in ("system", "cuda")
)
_REPOSITORY = "/v2/repository(?:/(?P<repository>[^/]+))?"
# (verb, pattern, methods); the first pattern that matches wins
TABLE: tuple[tuple[str, re.Pattern[str], tuple[str, ...]], ...] = tuple(
    (verb, re.compile(pattern + r"\Z"), methods)
    for verb, pattern, methods in (
        ("infer", _MODEL + "/infer", ("POST",)),
        ("infer_stream", _MODEL + "/infer_stream", ("POST",)),
        ("generate", _MODEL + "/generate", ("POST",)),
        ("generate_stream", _MODEL + "/generate_stream", ("POST",)),
        ("sequences", _MODEL + "/sequences", ("GET",)),
        ("sequence_end", _MODEL + "/sequences/(?P<sequence>[^/]+)/end", ("POST",)),
        ("live", "/v2/health/live", ("GET",)),
        ("ready", "/v2/health/ready", ("GET",)),
        ("statistics", "/v2/models/stats", ("GET",)),
        ("statistics", _MODEL + "/stats", ("GET",)),
        ("errors", "/v2/errors", ("GET",)),
        ("errors", _MODEL + "/errors", ("GET",)),
        ("trace_setting", f"/v2(?:{_NAMED})?/trace/setting", ("GET", "POST")),
        ("trace_recent", "/v2/trace/recent", ("GET",)),
        ("logging", "/v2/logging", ("GET", "POST")),
        ("logging_recent", "/v2/logging/recent", ("GET",)),
        ("system_shm_status", _SYSTEM_SHM + "/status", ("GET",)),
        ("system_shm_register", _SYSTEM_SHM + "/register", ("POST",)),
        ("system_shm_unregister", _SYSTEM_SHM + "/unregister", ("POST",)),
        ("cuda_shm_status", _CUDA_SHM + "/status", ("GET",)),
        ("cuda_shm_register", _CUDA_SHM + "/register", ("POST",)),
        ("cuda_shm_unregister", _CUDA_SHM + "/unregister", ("POST",)),
        ("label_setting", f"/v2{_NAMED}/labels", ("GET", "POST")),
        ("model_ready", _MODEL + "/ready", ("GET",)),
        ("model_config", _MODEL + "/config", ("GET",)),
        ("repository_index", _REPOSITORY + "/index", ("POST",)),
        ("repository_load", f"{_REPOSITORY}{_NAMED}/load", ("POST",)),
        ("repository_unload", f"{_REPOSITORY}{_NAMED}/unload", ("POST",)),
        ("repository_check", f"/v2/repository{_NAMED}/check", ("POST",)),
        ("repository_model", f"/v2/repository{_NAMED}", ("GET",)),
        ("model_metadata", _MODEL, ("GET",)),
        ("server_metadata", "/v2/?", ("GET",)),
        ("openai_models", "/v1/models(?:/(?P<model>[^/]+))?", ("GET",)),
        ("openai_completions", "/v1/completions", ("POST",)),
        ("openai_chat", "/v1/chat/completions", ("POST",)),
        ("openai_embeddings", "/v1/embeddings", ("POST",)),
        ("openapi", r"/openapi\.json", ("GET",)),
        ("reference", "/docs", ("GET",)),
        ("home", "/", ("GET",)),
    )
)


PROBES = ("live", "ready", "model_ready")  # verbs that are answered even when limits are reached
_OF_METRICS_PORT = "that is on the port of --metrics-port (8002)"
_PROBES = "GET /v2/health/live and /v2/health/ready are the probes"
# paths that other servers have: what to ask here
_ELSEWHERE = {
    "/metrics": _OF_METRICS_PORT,
    "/console": _OF_METRICS_PORT,
    "/v2/models": "POST /v2/repository/index lists the models",
    **dict.fromkeys(("/v2/health", "/health", "/healthz", "/livez", "/readyz", "/ping"), _PROBES),
}


@dataclass(frozen=True)
class Route:
    """A matched path. `allowed` is False when only the method is wrong; `methods` are those that the path takes."""

    verb: str
    model: str = ""
    version: str = ""
    repository: str = ""
    region: str = ""
    allowed: bool = True
    sequence: str = ""
    methods: tuple[str, ...] = ()


def always_answered(
    route: Route | None,
    method: str,
    headers: Pairs,
    policy: HeaderPolicy | None,
    certificate: Certificate | None,
) -> bool:
    """Whether a request is answered beyond limits too: a probe, or a control verb of a client that may use it."""
    if route is None:
        return False
    return route.verb in PROBES or (
        policy is not None and policy.controls(route.verb, headers, route.model, method, certificate)
    )


def not_found(path: str) -> str:
    """The text for a path that no route has."""
    path = path.partition("?")[0].rstrip("/")
    return f"Not Found: {_ELSEWHERE.get(path, 'GET /docs lists what there is')}"


_cache: dict[tuple[str, str], Route | None] = {}
CACHED = 1024  # clients use few paths; the bound keeps one that tries many from filling the memory


def match(method: str, path: str) -> Route | None:
    """The route of a request, or None when no path fits."""
    key = (method, path)
    try:
        return _cache[key]
    except KeyError:
        route = _match(method, path)
        remember(_cache, key, route, CACHED, len(method) + len(path))
        return route


def _match(method: str, path: str) -> Route | None:
    path = path.partition("?")[0]
    for verb, pattern, methods in TABLE:
        found = pattern.match(path)
        if found:
            given = {name: part for name, part in found.groupdict().items() if part}
            if "repository" in given:
                given["repository"] = unquote(given["repository"], errors="surrogateescape")
            return Route(verb, allowed=method in methods, methods=methods, **given)
    return None
