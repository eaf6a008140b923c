"""Where one HTTP/1.1 request ends and the next begins: upgrades that are offered, and the Host header.

What two readers of the same bytes take apart in two ways is how one client's request is slipped into
another's; each case runs on every front that reads HTTP/1.1.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator

import pytest

from tests.support.certificates import Certificates
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.transport.http1.test_http1 import GOOD

INFER = b"POST /v2/models/simple/infer HTTP/1.1\r\n"
HIDDEN = b"GET /v2/models/simple/config HTTP/1.1\r\nHost: x\r\n\r\n"
OFFERS = [
    b"Connection: Upgrade\r\nUpgrade: anything\r\n",
    b"connection: keep-alive, upgrade\r\nupgrade: websocket\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n",
]
Open = Callable[[], Http1]


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, tuple[ServerProcess, ssl.SSLContext | None]]]:
    """One without TLS, and one with it."""
    folder = tmp_path_factory.mktemp("framing")
    write_model(folder / "models", "simple", identity_config())
    certificates = Certificates(folder)
    certificates.issue("server")
    models = folder / "models"
    with (
        ServerProcess(models) as lean,
        ServerProcess(models, *certificates.flags("server")) as secure,
    ):
        yield {"lean": (lean, None), "tls": (secure, certificates.client(alpn=""))}


@pytest.fixture(params=["lean", "tls"])
def connect(
    servers: dict[str, tuple[ServerProcess, ssl.SSLContext | None]], request: pytest.FixtureRequest
) -> Iterator[Open]:
    """Opens connections to a front; they are closed behind the test."""
    server, context = servers[request.param]
    opened: list[Http1] = []

    def make() -> Http1:
        opened.append(Http1(server.http, context))
        return opened[-1]

    yield make
    for connection in opened:
        connection.close()


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


@pytest.mark.parametrize("offer", OFFERS, ids=["anything", "websocket", "h2c"])
@pytest.mark.parametrize("pieces", [1, 2])
def test_the_body_of_a_request_that_offers_an_upgrade_is_its_body(
    connect: Open, offer: bytes, pieces: int
) -> None:
    """A request hidden in the body is part of the body, whole or behind the head in a piece of its own."""
    head = b"Host: x\r\n" + offer
    for framed in (
        head + b"Content-Length: %d\r\n\r\n" % len(HIDDEN) + HIDDEN,
        head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(HIDDEN),
    ):
        client = connect()
        data = INFER + framed
        at = data.index(b"\r\n\r\n") + 4 if pieces == 2 else len(data)
        client.send(data[:at])
        client.send(data[at:])
        reply = client.read()
        assert reply.status == 400 and b"failed to parse the request JSON buffer" in reply.body
        # the next answer is that of the next request, and there is no other
        assert client.request("GET", "/v2/health/live").status == 200
        client.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert "extensions" in json.loads(client.read().body)
        assert client.closed()


@pytest.mark.parametrize("offer", OFFERS, ids=["anything", "websocket", "h2c"])
def test_a_request_that_offers_an_upgrade_is_answered_once(connect: Open, offer: bytes) -> None:
    client = connect()
    for _ in range(2):
        client.send(INFER + b"Host: x\r\n" + offer + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
        reply = client.read()
        assert (reply.version, reply.status) == ("HTTP/1.1", 200), reply
        assert "upgrade" not in reply.headers and reply.interim == []
        assert json.loads(reply.body)["model_name"] == "simple"
    client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n" + offer + b"\r\n")
    assert client.read().status == 200
    client.send(b"GET /v2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    assert client.read().status == 200
    assert client.closed()


def test_many_offers_in_one_piece(connect: Open) -> None:
    client = connect()
    one = INFER + b"Host: x\r\n" + OFFERS[0] + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD
    client.send(one * 20)
    for _ in range(20):
        assert client.read().status == 200
    assert client.request("GET", "/v2/health/live").status == 200


def test_an_offer_before_a_large_body(connect: Open) -> None:
    """Large enough to be received into a buffer of its own."""
    client = connect()
    body = GOOD + b" " * (1 << 20)
    client.send(INFER + b"Host: x\r\n" + OFFERS[0] + b"Content-Length: %d\r\n\r\n" % len(body))
    client.send(body)
    assert client.read().status == 200
    assert client.request("GET", "/v2/health/live").status == 200


@pytest.mark.parametrize(
    ("hosts", "problem"),
    [
        (b"", "Host"),
        (b"Host: a\r\nHost: a\r\n", "Host"),
        (b"Host: a\r\nhost: b\r\n", "Host"),
        (b"Host: a b\r\n", "Host"),
        (b"Host: a/b\r\n", "Host"),
        (b"Host: a@b\r\n", "Host"),
        (b"Host: a:x\r\n", "Host"),
        (b"Host: [::1\r\n", "Host"),
    ],
)
def test_a_request_names_one_host(connect: Open, hosts: bytes, problem: str) -> None:
    for request in (
        b"GET /v2/health/live HTTP/1.1\r\n" + hosts + b"\r\n",
        INFER + hosts + b"Content-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
        INFER + b"Content-Length: %d\r\n" % len(GOOD) + hosts + b"\r\n" + GOOD,
    ):
        client = connect()
        client.send(request + HIDDEN)
        reply = client.read()
        assert (reply.status, reply.headers["connection"]) == (400, "close")
        assert problem in json.loads(reply.body)["error"]
        assert client.closed()


@pytest.mark.parametrize(
    "host", [b"x", b"x:8000", b"127.0.0.1:8000", b"[::1]:8000", b"[fe80::1]", b"a_b.localhost", b""]
)
def test_hosts_that_are_taken(connect: Open, host: bytes) -> None:
    client = connect()
    for request in (
        b"GET /v2/health/live HTTP/1.1\r\nHost: " + host + b"\r\n\r\n",
        INFER + b"HOST:" + host + b"\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD,
    ):
        client.send(request)
        assert client.read().status == 200


def test_http_1_0_knows_no_host(connect: Open) -> None:
    client = connect()
    client.send(b"GET /v2/health/live HTTP/1.0\r\n\r\n")
    assert client.read().status == 200


def test_a_host_is_checked_on_every_request_of_a_connection(connect: Open) -> None:
    client = connect()
    for host in (b"a", b"a", b"b", b"a"):
        client.send(INFER + b"Host: " + host + b"\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
        assert client.read().status == 200
    client.send(INFER + b"Host: a,b\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
    client.send(INFER + b"Host: a b\r\nContent-Length: %d\r\n\r\n" % len(GOOD) + GOOD)
    assert client.read().status == 200  # a comma may be in a name
    assert client.read().status == 400
    assert client.closed()


@pytest.mark.parametrize("offer", OFFERS, ids=["anything", "websocket", "h2c"])
def test_the_metrics_port_reads_no_body_as_a_request(
    servers: dict[str, tuple[ServerProcess, ssl.SSLContext | None]], offer: bytes
) -> None:
    with Http1(servers["lean"][0].metrics) as client:
        hidden = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"
        head = b"GET /other HTTP/1.1\r\nHost: x\r\n" + offer + b"Content-Length: %d\r\n\r\n" % len(hidden)
        client.send(head + hidden)
        reply = client.read()
        assert reply.status == 200 and reply.body.startswith(b"# metrics are at /metrics")
        client.send(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        reply = client.read()
        assert (reply.status, reply.body[:6]) == (200, b"# HELP")
        assert client.closed(), "two requests, two answers"


@pytest.mark.parametrize("hosts", [b"", b"Host: a\r\nHost: b\r\n", b"Host: a b\r\n"])
def test_the_metrics_port_wants_one_host(
    servers: dict[str, tuple[ServerProcess, ssl.SSLContext | None]], hosts: bytes
) -> None:
    with Http1(servers["lean"][0].metrics) as client:
        client.send(b"GET /metrics HTTP/1.1\r\n" + hosts + b"\r\n")
        reply = client.read()
        assert (reply.status, reply.headers["connection"]) == (400, "close") and b"Host" in reply.body
        assert client.closed()
    with Http1(servers["lean"][0].metrics) as client:
        client.send(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert client.read().status == 200


@pytest.mark.parametrize("scheme", [b"http", b"HTTP", b"https"])
def test_a_request_line_in_absolute_form(connect: Open, scheme: bytes) -> None:
    """As proxies send it: it names the host, and the Host header does not count."""
    for path, status in (
        (b"/v2/models/simple/config", 200),
        (b"/v2/nothing", 404),
        (b"?x=1", 200),
        (b"", 200),
    ):
        client = connect()
        client.send(b"GET %b://anywhere:80%b HTTP/1.1\r\nHost: other\r\n\r\n" % (scheme, path))
        assert client.read().status == status, path
    client = connect()
    whole = b"POST %b://anywhere/v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
    for _ in range(2):  # the connection goes on
        client.send(whole % (scheme, len(GOOD), GOOD))
        assert client.read().status == 200
    client = connect()
    client.send(b"GET %b://no blank/v2 HTTP/1.1\r\nHost: x\r\n\r\n" % scheme)
    assert client.read().status == 400
    client = connect()
    client.send(b"GET %b://b@d/v2 HTTP/1.1\r\nHost: x\r\n\r\n" % scheme)
    assert client.read().status == 400
