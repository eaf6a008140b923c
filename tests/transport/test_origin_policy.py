"""Requests that web pages cause, and names of other servers: the decision, every front, real clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tritonclient.http as triton_http

from neptrio.addresses import is_loopback
from neptrio.errors import Code
from neptrio.transport.origin_policy import OriginPolicy
from tests.support.http import Http1, Http2, Reply
from tests.support.infer_messages import identity_inputs
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.test_tokens import BODY, INFER, KINDS

PAGE = "https://evil.example"
UI = "https://ui.example"
Ask = Callable[..., Reply]

# ---------------------------------------------------------------- the decision


def refused(policy: OriginPolicy, method: str = "POST", **headers: str) -> bool:
    """Whether the policy refuses a request with these headers."""
    problem = policy.problem(
        method, *(headers[name].encode() if name in headers else None for name in ("host", "origin", "site"))
    )
    assert problem is None or problem.code is Code.FORBIDDEN
    return problem is not None


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({"host": "h:8000"}, False),
        ({"host": "h:8000", "origin": PAGE}, True),
        ({"host": "h:8000", "origin": "null"}, True),
        ({"host": "h:8000", "origin": ""}, True),
        ({"host": "h:8000", "site": "cross-site"}, True),
        ({"host": "h:8000", "site": "same-site"}, True),
        ({"host": "h:8000", "site": "something-new"}, True),
        ({"host": "h:8000", "site": "none"}, False),
        ({"host": "h:8000", "site": "same-origin"}, False),
        # a page beside the server behind one proxy, by a name that nobody can rebind
        ({"host": "h:8000", "origin": "http://h:8000"}, False),
        ({"host": "H:8000", "origin": "http://h:8000", "site": "same-origin"}, False),
        ({"host": "10.0.0.1", "origin": "http://10.0.0.1"}, False),
        ({"host": "h:8000", "origin": "http://h:8000", "site": "cross-site"}, True),
        ({"host": "h:8000", "origin": "http://h:9000"}, True),
        # what a page does whose name was pointed to this machine after it was loaded
        ({"host": "evil.example:8000", "origin": "http://evil.example:8000", "site": "same-origin"}, True),
    ],
)
def test_only_pages_of_other_origins_are_refused(headers: dict[str, str], expected: bool) -> None:
    policy = OriginPolicy()
    assert refused(policy, **headers) is expected
    assert not refused(policy, "GET", **headers)


def test_allowed_origins_may_post_and_others_still_not() -> None:
    policy = OriginPolicy([UI])
    assert not refused(policy, host="h", origin=UI, site="cross-site")
    assert refused(policy, host="h", origin=UI + ":8443", site="cross-site")
    assert refused(policy, host="h", origin=PAGE, site="cross-site")
    every = OriginPolicy(["*"])
    assert not refused(every, host="h", origin=PAGE, site="cross-site")
    assert not refused(every, host="h", site="cross-site")


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_on_loopback_a_name_of_somebody_else_is_refused(method: str) -> None:
    policy = OriginPolicy(loopback=True)
    for host in (
        "localhost",
        "localhost:8000",
        "a.localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "triton:8000",
        "",
    ):
        assert not refused(policy, method, host=host), host
    for host in (
        "evil.example",
        "evil.example:8000",
        "evil.example.",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
    ):
        assert refused(policy, method, host=host), host
    assert not refused(policy, method)  # HTTP/1.0


def test_hosts_are_held_against_those_that_were_given() -> None:
    policy = OriginPolicy(hosts=["api.example", "*.svc.example"])
    for host in (
        "api.example:8000",
        "API.example",
        "a.svc.example",
        "a.b.svc.example",
        "10.0.0.1",
        "localhost",
    ):
        assert not refused(policy, host=host), host
    for host in ("svc.example", "xsvc.example", "evil.example", "api.example.evil.example"):
        assert refused(policy, host=host), host
    assert not refused(policy, host="api.example", origin="https://api.example")
    assert not refused(OriginPolicy(hosts=["*"], loopback=True), host="evil.example")
    assert not refused(OriginPolicy(), host="evil.example")


def test_what_hosts_are_tried_does_not_grow_memory() -> None:
    policy = OriginPolicy(loopback=True)
    for i in range(10_000):
        assert refused(policy, host=f"h{i}.example")
    assert len(policy._known) <= 256


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.0.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("", False),
    ],
)
def test_loopback_addresses(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


def test_a_preflight_is_answered_by_what_is_allowed() -> None:
    policy = OriginPolicy([UI])
    asked = [
        (b"origin", UI.encode()),
        (b"access-control-request-method", b"POST"),
        (b"access-control-request-headers", b"content-type,inference-header-content-length"),
        (b"access-control-request-private-network", b"true"),
    ]
    answer = dict(policy.preflight("OPTIONS", asked) or [])
    assert answer[b"access-control-allow-methods"] == b"GET, POST"
    assert answer[b"access-control-allow-headers"] == b"content-type,inference-header-content-length"
    assert answer[b"access-control-allow-private-network"] == b"true"
    assert policy.preflight("POST", asked) is None
    assert policy.preflight("OPTIONS", asked[:1]) is None
    assert policy.preflight("OPTIONS", [(b"origin", PAGE.encode()), *asked[1:]]) is None
    assert OriginPolicy().preflight("OPTIONS", asked) is None


# ---------------------------------------------------------------- the fronts


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder, "simple", identity_config())
    return folder


def asking(server: ServerProcess, kind: str) -> Iterator[Ask]:
    with (Http2 if kind == "http2" else Http1)(server.http) as client:
        yield client.request


def serve(repository: Path, kind: str, *flags: str) -> Iterator[ServerProcess]:
    lean = ["--http-lean=false"] if kind == "hypercorn" else []
    with ServerProcess(
        repository, "--model-control-mode=explicit", "--load-model=simple", *lean, *flags
    ) as server:
        yield server


@pytest.fixture(scope="module", params=KINDS)
def server(request: pytest.FixtureRequest, repository: Path) -> Iterator[ServerProcess]:
    yield from serve(repository, request.param)


@pytest.fixture
def ask(server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from asking(server, request.node.callspec.params["server"])


@pytest.fixture(scope="module", params=KINDS)
def open_server(request: pytest.FixtureRequest, repository: Path) -> Iterator[ServerProcess]:
    """One that UI may use, under a name of its own."""
    yield from serve(repository, request.param, f"--cors-allow-origin={UI}", "--allowed-host=api.example")


@pytest.fixture
def ask_open(open_server: ServerProcess, request: pytest.FixtureRequest) -> Iterator[Ask]:
    yield from asking(open_server, request.node.callspec.params["open_server"])


TEXT = {"Content-Type": "text/plain"}  # what a page may send without asking first
CHANGES = [
    (INFER, BODY),
    ("/v2/models/simple/generate", b"{}"),
    ("/v2/logging", b'{"log_verbose_level": 1}'),
    ("/v2/trace/setting", b'{"trace_level": ["TENSORS"]}'),
    ("/v2/repository/models/simple/load", b"{}"),
    ("/v2/repository/models/simple/unload", b""),
    ("/v2/repository/models/simple/check", b"{}"),
    ("/v2/systemsharedmemory/region/a/register", b'{"key": "/a", "byte_size": 1}'),
]


@pytest.mark.parametrize(("path", "body"), CHANGES, ids=[path for path, _ in CHANGES])
@pytest.mark.parametrize(
    "headers", [{"Origin": PAGE}, {"Sec-Fetch-Site": "cross-site"}, {"origin": "null"}], ids=str
)
def test_a_page_changes_and_infers_nothing(ask: Ask, path: str, body: bytes, headers: dict[str, str]) -> None:
    reply = ask("POST", path, body, {**TEXT, **headers})
    assert reply.status == 403
    assert "page" in json.loads(reply.body)["error"]
    assert "access-control-allow-origin" not in reply.headers
    assert ask("GET", "/v2/models/simple/ready").status == 200
    assert json.loads(ask("GET", "/v2/logging").body)["log_verbose_level"] == 0


def test_the_name_of_another_server_is_refused_on_loopback_but_for_probes(ask: Ask) -> None:
    foreign = {"Host": "rebound.example:8000"}
    for method, path, body in (("GET", "/v2", b""), ("POST", INFER, BODY), ("GET", "/nowhere", b"")):
        reply = ask(method, path, body, foreign)
        assert reply.status == 403
        assert "rebound.example" in json.loads(reply.body)["error"]
    assert ask("GET", "/v2/health/live", b"", foreign).status == 200
    assert ask("GET", "/v2/models/simple/ready", b"", foreign).status == 200
    assert ask("POST", INFER, BODY, {"Host": "127.0.0.1:1"}).status == 200


def test_clients_that_are_no_browsers_notice_nothing(server: ServerProcess) -> None:
    client = triton_http.InferenceServerClient(server.http)
    assert client.infer("simple", identity_inputs(triton_http)).as_numpy("OUTPUT0") is not None
    client.load_model("simple")
    client.update_log_settings({"log_verbose_level": 0})
    client.close()


@pytest.mark.slow
def test_an_allowed_page_is_answered_and_told_so(ask_open: Ask) -> None:
    asked = {
        "Origin": UI,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    reply = ask_open("OPTIONS", INFER, b"", asked)
    assert reply.status == 200
    assert reply.headers["access-control-allow-origin"] == UI
    assert "POST" in reply.headers["access-control-allow-methods"]
    assert reply.headers["access-control-allow-headers"] == "content-type"
    page = {"Origin": UI, "Sec-Fetch-Site": "cross-site"}
    for method, path, body, status in (
        ("POST", INFER, BODY, 200),
        ("POST", INFER, b"{}", 400),
        ("GET", "/v2", b"", 200),
        ("POST", "/v2/logging", b"{}", 200),
    ):
        reply = ask_open(method, path, body, page)
        assert reply.status == status
        assert reply.headers["access-control-allow-origin"] == UI
        assert reply.headers["vary"] == "Origin"
        assert "Inference-Header-Content-Length" in reply.headers["access-control-expose-headers"]


def test_another_page_is_still_refused(ask_open: Ask) -> None:
    asked = {"Origin": PAGE, "Access-Control-Request-Method": "POST"}
    reply = ask_open("OPTIONS", INFER, b"", asked)
    assert reply.status == 405
    assert "access-control-allow-origin" not in reply.headers
    assert ask_open("POST", INFER, BODY, {"Origin": PAGE}).status == 403
    assert ask_open("POST", INFER, BODY, {"Host": "other.example"}).status == 403
    assert ask_open("POST", INFER, BODY, {"Host": "api.example"}).status == 200


def test_the_metrics_port_knows_its_names(server: ServerProcess, open_server: ServerProcess) -> None:
    for address, host, status in (
        (server.metrics, "rebound.example", 403),
        (server.metrics, "localhost:8002", 200),
        (open_server.metrics, "api.example", 200),
        (open_server.metrics, "rebound.example", 403),
    ):
        with Http1(address) as client:
            assert client.request("GET", "/metrics", b"", {"Host": host}).status == status


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--cors-allow-origin=ui.example", "SCHEME://HOST"),
        ("--cors-allow-origin=https://ui.example/", "SCHEME://HOST"),
        ("--allowed-host=api.example:8000", "without a port"),
        ("--allowed-host=*example", "without a port"),
    ],
)
def test_wrong_flags_are_refused(flag: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    from neptrio.cli import settings_of

    with pytest.raises(SystemExit):
        settings_of(["--model-repository=m", flag])
    assert expected in capsys.readouterr().err
