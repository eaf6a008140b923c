"""What request headers decide: restricted endpoints, tokens, and headers that are forwarded to models.

The problem: an operator may want to restrict some endpoints to a proxy that adds a secret header, clients may need
tokens (--auth-config), and models may need headers (a tenant, a trace) that are not part of the protocol. The choice:
the settings are read once at the start. A port that uses none of the three has no policy and reads no such headers.

Rules:
 1. A restricted endpoint answers only requests that have its header with its value. This is checked before the method,
    the model and the body, in the order observed on a Triton server.
 2. Header names match in any case; values must be equal, and are compared in constant time.
 3. Every header whose name the forward pattern finds becomes a string parameter of the request, with the header's name
    as the client wrote it. It replaces a parameter of the body with that name. Of repeated headers the last counts (a
    Triton server passes all of them on as JSON, whose readers keep the last).
 4. A parameter of the body whose name the pattern finds is refused unless a header replaces it, so that models can rely
    on such a parameter being a header.
 5. A header whose name has a meaning as a request parameter (RESERVED) is refused and not forwarded: it must not start
    a sequence by accident.
Source: docs/protocol/features.md A6, A8 and B4; texts and order as observed on a real server.
"""

from __future__ import annotations

import binascii
import hmac
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from neptrio.errors import Code, InvalidArgument, TritonError, Unauthenticated
from neptrio.flags import RESTRICTED_CATEGORIES, Restriction, compile_pattern
from neptrio.limits import remember, shown
from neptrio.request.infer_request import InferRequest, monotonic_ns
from neptrio.service.auth_config import ADMIN, INFER, OPERATE, READ
from neptrio.service.certificates import Certificate
from neptrio.service.tokens import Account, Clients
from neptrio.settings import Settings

Pairs = Iterable[tuple[bytes, bytes]]


def _by_name(categories: dict[str, str], prefix: str = "") -> dict[str, str]:
    return {prefix + name: category for category, names in categories.items() for name in names.split()}


# REST verb (transport.rest.routes) -> category
VERB_CATEGORIES = _by_name(
    {
        "health": "live ready model_ready",
        "metadata": "server_metadata model_metadata openapi openai_models reference home",
        "inference": "infer infer_stream generate generate_stream "
        "openai_completions openai_chat openai_embeddings",
        "shared-memory": "system_shm_status system_shm_register system_shm_unregister "
        "cuda_shm_status cuda_shm_register cuda_shm_unregister",
        "model-config": "model_config",
        "model-repository": "repository_index repository_load repository_unload repository_model "
        "repository_check label_setting sequence_end",
        "statistics": "statistics errors sequences",
        "trace": "trace_setting trace_recent",
        "logging": "logging logging_recent",
    }
)
# gRPC method path -> category; reflection is not restricted
METHOD_CATEGORIES = {
    **_by_name({"health": "Check Watch"}, "/grpc.health.v1.Health/"),
    **_by_name(
        {
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
        },
        "/inference.GRPCInferenceService/",
    ),
}
assert set(VERB_CATEGORIES.values()) == set(METHOD_CATEGORIES.values()) == set(RESTRICTED_CATEGORIES)

# their model is in the body, and checked there
OPENAI = ("openai_completions", "openai_chat", "openai_embeddings")

# REST verb -> the scope that a token needs (service.tokens). Of two, the first is for GET, the second for other
# methods. Verbs that are not listed need `read`.
VERB_SCOPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("infer", "infer_stream", "generate", "generate_stream", *OPENAI), (INFER,)),
    **dict.fromkeys(("repository_load", "repository_unload", "repository_check"), (ADMIN,)),
    **dict.fromkeys(("system_shm_register", "system_shm_unregister"), (OPERATE,)),
    **dict.fromkeys(("cuda_shm_register", "cuda_shm_unregister"), (OPERATE,)),
    **dict.fromkeys(("sequence_end", "trace_recent", "errors", "logging_recent"), (OPERATE,)),
    **dict.fromkeys(("trace_setting", "logging"), (READ, OPERATE)),
    "label_setting": (READ, ADMIN),
}
METHOD_SCOPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("ModelInfer", "ModelStreamInfer"), (INFER,)),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload"), (ADMIN,)),
    **dict.fromkeys(("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister"), (OPERATE,)),
    **dict.fromkeys(("CudaSharedMemoryRegister", "CudaSharedMemoryUnregister"), (OPERATE,)),
    **dict.fromkeys(("TraceSetting", "LogSettings"), (READ, OPERATE)),
}
# verbs that concern no model
OF_ALL = ("server_metadata", "openapi", "reference", "home", "openai_models", *OPENAI)
# gRPC method -> the field of its request that has the model's name; methods that are not listed concern all models
MODEL_FIELDS = {
    **dict.fromkeys(("ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"), "name"),
    **dict.fromkeys(("RepositoryModelLoad", "RepositoryModelUnload", "TraceSetting"), "model_name"),
}
OF_NO_MODEL = ("ServerMetadata", "ServerLive", "ServerReady", "ServerReflectionInfo", "Check", "Watch")

# keys of an ASGI scope
CERTIFICATE = "neptrio.certificate"  # the certificate that the connection's client has shown
RAW_HEADERS = "neptrio.raw_headers"  # the headers, with names as the client wrote them
GRPC_PREFIX = "triton-grpc-protocol-"
RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
RESERVED_PREFIX = "triton_"
OWN_METADATA = "triton_grpc_error"  # metadata for the server itself (stream_infer.py), not forwarded
KNOWN_NAMES = 1024  # clients use few names; the bound keeps one that tries many from filling the memory


# Adds the parameters that headers of one request became to it; it must be decoded. Raises InvalidArgument (rule 4).
Forwarded = Callable[[InferRequest], None]


def scope_of(scopes: tuple[str, ...], changes: bool) -> str:
    """The scope that a request needs, of those in VERB_SCOPES or METHOD_SCOPES."""
    return scopes[-1] if changes else scopes[0]


class HeaderForward:
    """Picks the headers that the pattern forwards to models."""

    def __init__(self, pattern: str) -> None:
        self._pattern = compile_pattern(pattern)
        self._bodies: dict[str, bool] = {}
        self._known: dict[bytes, str | None] = {}

    def _parameter(self, raw: bytes) -> str | None:
        """The name of a header's parameter; None if it is not forwarded. Raises InvalidArgument if it is reserved."""
        try:
            return self._known[raw]
        except KeyError:
            pass
        name: str | None = raw.decode("latin-1")
        assert name is not None
        if self._pattern.search(name) is None:
            name = None
        elif name.lower() in RESERVED or name.lower().startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"Header '{shown(name)}' is reserved for Triton usage and cannot be forwarded."
            )
        remember(self._known, raw, name, KNOWN_NAMES)
        return name

    def into(self, request: InferRequest, found: dict[str, str]) -> None:
        """Adds `found`, which headers() or metadata() returned, to the parameters of the request.

        Raises InvalidArgument if the body has a parameter that could be taken for a header (rule 4).
        """
        given = request.parameters
        if not given:
            request.parameters = found or None
            return
        for name in given:
            if name not in found and self._named_like_a_header(name):
                raise InvalidArgument(
                    f"parameter '{shown(name)}' has the name of a header that this server forwards to models, and must come as "
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
            remember(self._bodies, name, known, KNOWN_NAMES)
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
                    raise InvalidArgument(f"the value of metadata '{shown(name)}' is not base64") from None
            found[name] = _text(value)
        return found


def _text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


class _Gate:
    """One restriction: the header, with its value, that requests to an endpoint must have."""

    def __init__(self, restriction: Restriction, prefix: str, what: str) -> None:
        # gRPC metadata is lower-case: a key in another case could never be sent
        header = prefix + restriction.header.lower() if prefix else restriction.header
        self._name = header.lower().encode()
        self._value = restriction.value.encode()
        self._text = f"This {what} is restricted, expecting header '{header}'"

    def check(self, headers: Pairs) -> None:
        """Raises TritonError (Code.FORBIDDEN) if the header is missing or has another value."""
        for name, value in headers:
            if name.lower() == self._name and hmac.compare_digest(value, self._value):
                return
        raise TritonError(self._text, Code.FORBIDDEN)


def bearer(headers: Pairs) -> bytes | None:
    """The token in the Authorization header, None if there is no such header.

    Raises Unauthenticated if the header is not `Bearer TOKEN`, and if there are several, of which a proxy in front may
    have checked another one.
    """
    found = None
    for name, value in headers:
        if name.lower() == b"authorization":
            if found is not None:
                raise Unauthenticated("expected one Authorization header")
            scheme, _, token = value.strip().partition(b" ")
            found = token.strip()
            if scheme.lower() != b"bearer" or not found:
                raise Unauthenticated("expected Authorization: Bearer TOKEN")
    return found


class HeaderPolicy:
    """The restrictions, tokens and forwarded headers of one port (REST or gRPC)."""

    def __init__(self, gates: dict[str, _Gate], pattern: str, tokens: Clients | None = None) -> None:
        self._gates = gates
        self._tokens = tokens
        self.forward = HeaderForward(pattern) if pattern else None

    @property
    def reads_messages(self) -> bool:
        """Whether gRPC calls must pass their decoded messages to message() or request()."""
        return self.forward is not None or self._tokens is not None

    def infers_by_token_alone(self) -> bool:
        """Whether nothing but tokens decides about inference, and no header is forwarded to models."""
        return self._tokens is not None and self.forward is None and "infer" not in self._gates

    def who(self, headers: Pairs, certificate: Certificate | None = None) -> str:
        """The name of the request's client (of its token or certificate), "" if it is not known."""
        try:
            return "" if self._tokens is None else self._tokens.find(bearer(headers), certificate).name
        except Unauthenticated:
            return ""

    def controls(
        self, verb: str, headers: Pairs, model: str, method: str, certificate: Certificate | None = None
    ) -> bool:
        """Whether a REST request is a control verb that its client may use: limits on clients do not hold for it."""
        scope = scope_of(VERB_SCOPES.get(verb, (READ,)), method != "GET")
        return self._controls(scope, headers, model, certificate)

    def controls_call(self, path: str, headers: Pairs, certificate: Certificate | None) -> bool:
        """The same for a gRPC call, whose message, and so whose model, is not known yet."""
        scope = scope_of(METHOD_SCOPES.get(path.rpartition("/")[2], (READ,)), True)
        return self._controls(scope, headers, None, certificate)

    def _controls(
        self, scope: str, headers: Pairs, model: str | None, certificate: Certificate | None
    ) -> bool:
        if self._tokens is None or scope not in (OPERATE, ADMIN):
            return False
        try:
            self._tokens.check(bearer(headers), (scope,), model, certificate)
        except TritonError:
            return False
        return True

    def _gate(self, endpoint: str, headers: Pairs) -> None:
        gate = self._gates.get(endpoint)
        if gate is not None:
            gate.check(headers)

    def check(
        self,
        verb: str,
        headers: Pairs,
        model: str = "",
        method: str = "POST",
        certificate: Certificate | None = None,
    ) -> Account | None:
        """The client, if it may use a REST verb for `model`; "" means all models. None where nobody is asked who they
        are. Raises TritonError."""
        self._gate(verb, headers)
        tokens = self._tokens
        if tokens is None or (tokens.open_health and VERB_CATEGORIES[verb] == "health"):
            return None
        scopes = (scope_of(VERB_SCOPES.get(verb, (READ,)), method != "GET"),)
        account = tokens.check(bearer(headers), scopes, None if verb in OF_ALL else model, certificate)
        if VERB_CATEGORIES[verb] != "health":
            tokens.count(account, scopes, monotonic_ns())
        return account

    def check_call(self, path: str, headers: Pairs, certificate: Certificate | None = None) -> None:
        """Checks a gRPC call before its message has come, so without its model; message() or request() checks that.

        Raises TritonError.
        """
        self._gate(path, headers)
        tokens = self._tokens
        if tokens is None or (tokens.open_health and METHOD_CATEGORIES.get(path) == "health"):
            return
        method = path.rpartition("/")[2]
        tokens.check(bearer(headers), METHOD_SCOPES.get(method, (READ,)), None, certificate)

    def message(
        self, path: str, headers: Pairs, message: Any, certificate: Certificate | None = None
    ) -> Account | None:
        """Checks the request message of a gRPC call other than inference; the client, None where nobody is asked who they
        are. Raises TritonError."""
        tokens = self._tokens
        if tokens is None or (tokens.open_health and METHOD_CATEGORIES.get(path) == "health"):
            return None
        method = path.rpartition("/")[2]
        scopes = METHOD_SCOPES.get(method, (READ,))
        if len(scopes) > 1:
            scopes = (scope_of(scopes, bool(message.settings)),)
        field = MODEL_FIELDS.get(method)
        model = None if method in OF_NO_MODEL else getattr(message, field) if field else ""
        account = tokens.check(bearer(headers), scopes, model, certificate)
        if METHOD_CATEGORIES.get(path) != "health":
            tokens.count(account, scopes, monotonic_ns())
        return account

    def request(self, headers: Pairs, request: InferRequest, certificate: Certificate | None = None) -> None:
        """For a decoded inference request over gRPC: checks that the client may use its model, makes the request the
        client's, and adds the forwarded metadata to its parameters. Raises TritonError."""
        tokens = self._tokens
        if tokens is not None:
            account = tokens.check(bearer(headers), (INFER,), request.model_name, certificate)
            tokens.count(account, (INFER,), monotonic_ns())
            request.owner = account
        if self.forward is not None:
            self.forward.into(request, self.forward.metadata(headers))

    def forwarded(self, headers: Pairs) -> Forwarded | None:
        """The parameters that HTTP headers become, None if nothing is forwarded. Raises InvalidArgument."""
        if self.forward is None:
            return None
        return partial(self.forward.into, found=self.forward.headers(headers))


def _policy(
    restrictions: tuple[Restriction, ...],
    endpoints: dict[str, str],
    prefix: str,
    what: str,
    pattern: str,
    tokens: Clients | None,
) -> HeaderPolicy | None:
    if not (restrictions or pattern or tokens is not None):
        return None
    gates = {category: _Gate(one, prefix, what) for one in restrictions for category in one.categories}
    found = {endpoint: gates[category] for endpoint, category in endpoints.items() if category in gates}
    return HeaderPolicy(found, pattern, tokens)


def http_policy(settings: Settings, tokens: Clients | None = None) -> HeaderPolicy | None:
    """The policy of the REST port, None if no setting asks for one."""
    pattern = settings.http_header_forward_pattern
    return _policy(settings.http_restricted_api, VERB_CATEGORIES, "", "API", pattern, tokens)


def grpc_policy(settings: Settings, tokens: Clients | None = None) -> HeaderPolicy | None:
    """The policy of the gRPC port, None if no setting asks for one."""
    given, pattern = settings.grpc_restricted_protocol, settings.grpc_header_forward_pattern
    return _policy(given, METHOD_CATEGORIES, GRPC_PREFIX, "protocol", pattern, tokens)
