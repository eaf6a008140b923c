"""Headers that mean something to the operator: restricted endpoints, and headers forwarded to models.

The problem: a front in front of this server may want some endpoints for itself, and models may want
to see headers (a tenant, a trace) that are not part of the protocol. The choice: both are decided
from the command line once, at the start; a front without either setting holds None and looks at
no header.

Rules:
 1. A restricted endpoint answers only requests that carry its header with its value; it is looked
    at before the method, the model and the body (a Triton server's order, observed).
 2. Names match without regard to case, values exactly and in constant time.
 3. Every header whose name the pattern finds becomes a string parameter of the request, named as
    it came; it wins over a parameter of that name in the body, the last of repeated ones over the
    first (a Triton server hands all of them on as JSON, where readers keep the last).
 4. A parameter of the body whose name the pattern finds is refused unless a header takes its place: models
    must be able to believe that what is named like a header was one.
 5. Names that mean something in a request's parameters are refused, not forwarded: a header must
    not start a sequence by accident.
Source: docs/protocol/features.md A6, A8 and B4; texts and order as observed on a real server.
"""

from __future__ import annotations

import binascii
import hmac
from collections.abc import Iterable
from typing import Any

from neptrio.errors import Code, InvalidArgument, TritonError, Unauthenticated
from neptrio.flags import RESTRICTED_CATEGORIES, Restriction, compile_pattern
from neptrio.request.infer_request import InferRequest
from neptrio.service.tokens import ADMIN, INFER, OPERATE, READ, Tokens
from neptrio.settings import Settings

Pairs = Iterable[tuple[bytes, bytes]]

# REST verb (transport.rest.routes) -> category
VERB_CATEGORIES = {
    "live": "health",
    "ready": "health",
    "model_ready": "health",
    "server_metadata": "metadata",
    "model_metadata": "metadata",
    "infer": "inference",
    "generate": "inference",
    "generate_stream": "inference",
    "sequences": "statistics",
    "sequence_end": "model-repository",
    "system_shm_status": "shared-memory",
    "system_shm_register": "shared-memory",
    "system_shm_unregister": "shared-memory",
    "cuda_shm_status": "shared-memory",
    "cuda_shm_register": "shared-memory",
    "cuda_shm_unregister": "shared-memory",
    "model_config": "model-config",
    "repository_index": "model-repository",
    "repository_load": "model-repository",
    "repository_unload": "model-repository",
    "repository_model": "model-repository",
    "repository_check": "model-repository",
    "statistics": "statistics",
    "trace_setting": "trace",
    "trace_recent": "trace",
    "logging": "logging",
}

_SERVICE = "/inference.GRPCInferenceService/"
# gRPC method path -> category; reflection is not restricted
METHOD_CATEGORIES = {
    "/grpc.health.v1.Health/Check": "health",
    "/grpc.health.v1.Health/Watch": "health",
    **{
        _SERVICE + method: category
        for category, methods in {
            "health": "ServerLive ServerReady ModelReady",
            "metadata": "ServerMetadata ModelMetadata",
            "inference": "ModelInfer ModelStreamInfer",
            "shared-memory": "SystemSharedMemoryStatus SystemSharedMemoryRegister SystemSharedMemoryUnregister "
            "CudaSharedMemoryStatus CudaSharedMemoryRegister CudaSharedMemoryUnregister",
            "model-config": "ModelConfig",
            "model-repository": "RepositoryIndex RepositoryModelLoad RepositoryModelUnload",
            "statistics": "ModelStatistics",
            "trace": "TraceSetting",
            "logging": "LogSettings",
        }.items()
        for method in methods.split()
    },
}
assert set(VERB_CATEGORIES.values()) == set(METHOD_CATEGORIES.values()) == set(RESTRICTED_CATEGORIES)

# REST verb -> what a token must be allowed; see service.tokens. A method other than GET needs the second, if any
VERB_SCOPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("infer", "generate", "generate_stream"), (INFER,)),
    **dict.fromkeys(("repository_load", "repository_unload", "repository_check"), (ADMIN,)),
    **dict.fromkeys(("system_shm_register", "system_shm_unregister"), (OPERATE,)),
    **dict.fromkeys(("cuda_shm_register", "cuda_shm_unregister"), (OPERATE,)),
    **dict.fromkeys(("sequence_end", "trace_recent"), (OPERATE,)),
    **dict.fromkeys(("trace_setting", "logging"), (READ, OPERATE)),
}
METHOD_SCOPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), (INFER,)),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), (ADMIN,)),
    **dict.fromkeys(("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"), (OPERATE,)),
    **dict.fromkeys(("CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"), (OPERATE,)),
    **dict.fromkeys(("TraceSetting", "LogSettings"), (READ, OPERATE)),
}
OF_ALL = ("server_metadata",)  # verbs that concern no model
# gRPC method -> the field of its request with the model's name; what is not here concerns all models
MODEL_FIELDS = {
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"), "name"),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting"), "model_name"),
}
OF_NO_MODEL = ("ServerMetadata", "ServerLive", "ServerReady", "ServerReflectionInfo", "Check", "Watch")

RAW_HEADERS = "neptrio.raw_headers"  # key of an ASGI scope: the headers, names in their case
GRPC_PREFIX = "triton-grpc-protocol-"
RESERVED = frozenset(
    (
        "sequence_id",
        "sequence_start",
        "sequence_end",
        "priority",
        "timeout",
        "headers",
        "binary_data_output",
    )
)
RESERVED_PREFIX = "triton_"
OWN_METADATA = "triton_grpc_error"  # addressed to the server itself
KNOWN_NAMES = 1024  # clients use few header names; what others try must not grow memory


class HeaderForward:
    """Picks the headers that models are to see."""

    def __init__(self, pattern: str) -> None:
        self._pattern = compile_pattern(pattern)
        self._bodies: dict[str, bool] = {}
        self._known: dict[bytes, str | None] = {}

    def _parameter(self, raw: bytes) -> str | None:
        """The parameter's name, None when the header is not forwarded. Raises InvalidArgument."""
        try:
            return self._known[raw]
        except KeyError:
            pass
        name: str | None = raw.decode("latin-1")
        assert name is not None
        if self._pattern.search(name) is None:
            name = None
        elif name.lower() in RESERVED or name.lower().startswith(RESERVED_PREFIX):
            raise InvalidArgument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
        if len(self._known) >= KNOWN_NAMES:
            self._known.clear()
        self._known[raw] = name
        return name

    def into(self, request: InferRequest, found: dict[str, str]) -> None:
        """Makes `found`, of headers() or metadata(), parameters of the request.

        Raises InvalidArgument for a parameter of the body that could be taken for a header (rule 4).
        """
        given = request.parameters
        if not given:
            request.parameters = found or None
            return
        for name in given:
            if name not in found and self._named_like_a_header(name):
                raise InvalidArgument(
                    f"parameter '{name}' has the name of a header that this server forwards to models, and must come as "
                    "one"
                )
        request.parameters = {**given, **found}

    def _named_like_a_header(self, name: str) -> bool:
        known = self._bodies.get(name)
        if known is None:
            lower = name.lower()
            known = (
                self._pattern.search(name) is not None
                and lower not in RESERVED
                and not lower.startswith(RESERVED_PREFIX)
            )
            if len(self._bodies) >= KNOWN_NAMES:
                self._bodies.clear()
            self._bodies[name] = known
        return known

    def headers(self, headers: Pairs) -> dict[str, str]:
        """Parameters from HTTP headers. Raises InvalidArgument for a reserved name."""
        found = {}
        for raw, value in headers:
            if not raw.startswith(b":"):
                name = self._parameter(raw)
                if name is not None:
                    found[name] = _text(value)
        return found

    def metadata(self, metadata: Pairs) -> dict[str, str]:
        """Parameters from a gRPC call's metadata; values of -bin keys are decoded first.

        Raises InvalidArgument for a reserved name and for a -bin value that is not base64.
        """
        found = {}
        for raw, value in metadata:
            if raw.startswith((b":", b"grpc-")) or raw in (b"te", b"content-type", OWN_METADATA.encode()):
                continue
            name = self._parameter(raw)
            if name is None:
                continue
            if raw.endswith(b"-bin"):
                try:
                    value = binascii.a2b_base64(value + b"=" * (-len(value) % 4))
                except binascii.Error:
                    raise InvalidArgument(f"the value of metadata '{name}' is not base64") from None
            found[name] = _text(value)
        return found


class Forwarded:
    """Parameters made of one request's headers."""

    __slots__ = ("_forward", "_found")

    def __init__(self, forward: HeaderForward, found: dict[str, str]) -> None:
        self._forward = forward
        self._found = found

    def into(self, request: InferRequest) -> None:
        """Makes them parameters of the request, once it is decoded. Raises InvalidArgument."""
        self._forward.into(request, self._found)


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class _Gate:
    """One restriction: the header that opens an endpoint."""

    def __init__(self, restriction: Restriction, prefix: str, what: str) -> None:
        # gRPC metadata is lower-case: a key in another case could never be sent
        header = prefix + restriction.header.lower() if prefix else restriction.header
        self._name = header.lower().encode()
        self._value = restriction.value.encode()
        self._text = f"This {what} is restricted, expecting header '{header}'"

    def check(self, headers: Pairs) -> None:
        """Raises TritonError (403 / UNAVAILABLE) when the header is not there or has another value."""
        for name, value in headers:
            if name.lower() == self._name and hmac.compare_digest(value, self._value):
                return
        raise TritonError(self._text, Code.FORBIDDEN)


def bearer(headers: Pairs) -> bytes | None:
    """The token of an Authorization header, None when there is none. Raises Unauthenticated for another scheme."""
    for name, value in headers:
        if name.lower() == b"authorization":
            scheme, _, token = value.strip().partition(b" ")
            if scheme.lower() != b"bearer" or not token.strip():
                raise Unauthenticated("expected Authorization: Bearer TOKEN")
            return token.strip()
    return None


class HeaderPolicy:
    """The restrictions, the tokens and the forwarding of one front."""

    def __init__(self, gates: dict[str, _Gate], pattern: str, tokens: Tokens | None = None) -> None:
        self._gates = gates
        self._tokens = tokens
        self.forward = HeaderForward(pattern) if pattern else None

    @property
    def reads_messages(self) -> bool:
        """Whether a gRPC message must be looked at by message() before it is acted on."""
        return self.forward is not None or self._tokens is not None

    def who(self, headers: Pairs) -> str:
        """The name of the token that a request came with, "" when it is nobody's."""
        try:
            return "" if self._tokens is None else self._tokens.find(bearer(headers)).name
        except Unauthenticated:
            return ""

    def _gate(self, endpoint: str, headers: Pairs) -> None:
        gate = self._gates.get(endpoint)
        if gate is not None:
            gate.check(headers)

    def check(self, verb: str, headers: Pairs, model: str = "", method: str = "POST") -> None:
        """Raises TritonError when a REST verb is closed to this request, which concerns `model` ("": all)."""
        self._gate(verb, headers)
        tokens = self._tokens
        if tokens is None or (tokens.open_health and VERB_CATEGORIES[verb] == "health"):
            return
        scopes = VERB_SCOPES.get(verb, (READ,))
        if len(scopes) > 1 and method != "GET":
            scopes = scopes[1:]
        tokens.check(bearer(headers), scopes[:1], None if verb in OF_ALL else model)

    def check_call(self, path: str, headers: Pairs) -> None:
        """The same for a gRPC call whose message has not come; message() follows."""
        self._gate(path, headers)
        tokens = self._tokens
        if tokens is None or (tokens.open_health and METHOD_CATEGORIES.get(path) == "health"):
            return
        method = path.rpartition("/")[2]
        tokens.check(bearer(headers), METHOD_SCOPES.get(method, (READ,)), None)

    def message(self, path: str, headers: Pairs, message: Any) -> None:
        """The same for the request message of a control call. Raises TritonError."""
        tokens = self._tokens
        if tokens is None or (tokens.open_health and METHOD_CATEGORIES.get(path) == "health"):
            return
        method = path.rpartition("/")[2]
        scopes = METHOD_SCOPES.get(method, (READ,))
        if len(scopes) > 1:
            scopes = scopes[1:] if message.settings else scopes[:1]
        field = MODEL_FIELDS.get(method)
        model = None if method in OF_NO_MODEL else getattr(message, field) if field else ""
        tokens.check(bearer(headers), scopes, model)

    def request(self, headers: Pairs, request: InferRequest) -> None:
        """For a decoded request of a gRPC call: whether its model may be used, and metadata that models
        are to see. Raises TritonError."""
        if self._tokens is not None:
            self._tokens.check(bearer(headers), (INFER,), request.model_name)
        if self.forward is not None:
            self.forward.into(request, self.forward.metadata(headers))

    def infer(self, headers: Pairs, model: str) -> Forwarded | None:
        """For an HTTP inference: checks, and returns the parameters made of headers. Raises TritonError."""
        self.check("infer", headers, model)
        return self.forwarded(headers)

    def forwarded(self, headers: Pairs) -> Forwarded | None:
        """The parameters made of HTTP headers, None where none are. Raises InvalidArgument."""
        return None if self.forward is None else Forwarded(self.forward, self.forward.headers(headers))


def _gates(
    restrictions: tuple[Restriction, ...], endpoints: dict[str, str], prefix: str, what: str
) -> dict[str, _Gate]:
    by_category = {
        category: _Gate(restriction, prefix, what)
        for restriction in restrictions
        for category in restriction.categories
    }
    return {
        endpoint: by_category[category] for endpoint, category in endpoints.items() if category in by_category
    }


def http_policy(settings: Settings, tokens: Tokens | None = None) -> HeaderPolicy | None:
    """The REST front's, None when there is nothing to look at."""
    if not (settings.http_restricted_api or settings.http_header_forward_pattern or tokens is not None):
        return None
    gates = _gates(settings.http_restricted_api, VERB_CATEGORIES, "", "API")
    return HeaderPolicy(gates, settings.http_header_forward_pattern, tokens)


def grpc_policy(settings: Settings, tokens: Tokens | None = None) -> HeaderPolicy | None:
    """The gRPC front's, None when there is nothing to look at."""
    if not (settings.grpc_restricted_protocol or settings.grpc_header_forward_pattern or tokens is not None):
        return None
    gates = _gates(settings.grpc_restricted_protocol, METHOD_CATEGORIES, GRPC_PREFIX, "protocol")
    return HeaderPolicy(gates, settings.grpc_header_forward_pattern, tokens)
