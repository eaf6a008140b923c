"""A server that stops while its clients go on: each is answered and told, and nobody sees a reset."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hyperframe.frame import GoAwayFrame

from neptrio.transport.http2 import connection
from neptrio.transport.rest_server import RestServer
from tests.support.certificates import Certificates
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.infer_messages import identity
from tests.support.raw_http2 import RawClient
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.http1.test_http1 import GOOD, post
from tests.transport.rest.test_http2_attacks import PLAIN

CLIENTS = 16
# the time that clients have for one more request is never what a test waits for
PATIENT = ("--exit-grace-secs=100", "--exit-timeout-secs=600")
INFER = "/v2/models/simple/infer"


class Front:
    """A server's REST port, in one of the ways it can be served."""

    def __init__(self, folder: Path, name: str) -> None:
        self._repository = folder / "models"
        write_model(self._repository, "simple", identity_config())
        self._flags: tuple[str, ...] = ()
        self.context: ssl.SSLContext | None = None
        if name == "tls":
            certificates = Certificates(folder)
            certificates.issue("server")
            self.context = certificates.client(alpn="")
            self._flags = certificates.flags("server")

    def start(self, *flags: str) -> ServerProcess:
        return ServerProcess(self._repository, *self._flags, *flags)

    def connect(self, server: ServerProcess) -> Http1:
        return Http1(server.http, self.context)


@pytest.fixture(params=["lean", "tls"])
def front(request: pytest.FixtureRequest, tmp_path: Path) -> Front:
    return Front(tmp_path, request.param)


@pytest.fixture
def lean(tmp_path: Path) -> Front:
    return Front(tmp_path, "lean")


def listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0


def begin_stop(server: ServerProcess) -> None:
    """SIGTERM; returns once the server takes no new connections: what is open is being told."""
    server.process.send_signal(signal.SIGTERM)
    until(lambda: not listening(server.http), "it refuses connections")


def ends(client: Http1) -> bool:
    """The server ends the connection. A reset is an error."""
    found: bool = client.file.read(1) == b""
    return found


REQUESTS = {
    "past the parser": post("simple"),
    "through the parser": post("simple", GOOD, b"Accept-Encoding: identity"),
    "chunked": b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    + b"%x\r\n%b\r\n0\r\n\r\n" % (len(GOOD), GOOD),
    "a control route": b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_connection_may_send_one_more_request(front: Front, kind: str) -> None:
    """It is answered, and the answer says that it was the last."""
    with ExitStack() as stack:
        server = stack.enter_context(front.start(*PATIENT))
        clients = [stack.enter_context(front.connect(server)) for _ in range(CLIENTS)]
        for client in clients:
            assert client.request("POST", INFER, GOOD).status == 200
        begin_stop(server)
        for client in clients:
            client.send(REQUESTS[kind])
        for client in clients:
            reply = client.read()
            assert (reply.status, reply.headers.get("connection")) == (200, "close"), reply
            assert ends(client)
        assert server.ended() == 0


def test_requests_behind_the_last_answer_cause_no_reset(front: Front) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(front.start(*PATIENT))
        client = stack.enter_context(front.connect(server))
        assert client.request("POST", INFER, GOOD).status == 200
        begin_stop(server)
        client.send(post("simple") * 3)
        reply = client.read()
        assert (reply.status, reply.headers.get("connection")) == (200, "close"), reply
        client.send(post("simple"))
        assert ends(client)
        client.close()
        assert server.ended() == 0


@pytest.mark.slow
def test_a_new_connection_may_send_a_request_too(front: Front) -> None:
    """One that was opened and never used when the server stops."""
    with ExitStack() as stack:
        server = stack.enter_context(front.start(*PATIENT))
        client = stack.enter_context(front.connect(server))
        other = stack.enter_context(front.connect(server))  # taken behind the first
        assert other.request("GET", "/v2/health/live").status == 200
        begin_stop(server)
        for connection in (client, other):
            reply = connection.request("POST", INFER, GOOD)
            assert (reply.status, reply.headers.get("connection")) == (200, "close"), reply
            assert ends(connection)
        assert server.ended() == 0


def stop_under(
    stop: Callable[[], None], load: Callable[[int, Any], None], clients: Sequence[Any], answered: list[int]
) -> None:
    """Calls `stop` when each of `clients`, on a thread of its own that runs `load`, has got ten answers."""
    threads = [threading.Thread(target=load, args=pair) for pair in enumerate(clients)]
    for thread in threads:
        thread.start()
    until(
        lambda: min(answered) >= 10 or not all(thread.is_alive() for thread in threads), "everybody is at it"
    )
    stop()
    for thread in threads:
        thread.join(120)


@pytest.mark.slow
def test_nobody_is_left_without_an_answer_under_load(front: Front) -> None:
    """Sixteen clients that never pause: every request is answered, until an answer says close."""
    answered = [0] * CLIENTS
    problems: list[str] = []

    def load(number: int, client: Http1) -> None:
        try:
            while True:
                reply = client.request("POST", INFER, GOOD)
                assert reply.status == 200, reply
                answered[number] += 1
                if reply.headers.get("connection") == "close":
                    assert ends(client)
                    return
        except Exception as error:
            problems.append(f"client {number} after {answered[number]} answers: {error!r}")

    with ExitStack() as stack:
        server = stack.enter_context(front.start(*PATIENT))
        clients = [stack.enter_context(front.connect(server)) for _ in range(CLIENTS)]
        stop_under(partial(server.process.send_signal, signal.SIGTERM), load, clients, answered)
        assert server.ended() == 0
        assert problems == []


def test_an_idle_connection_ends_with_the_grace(front: Front) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(front.start("--exit-grace-secs=0.2"))
        client = stack.enter_context(front.connect(server))
        assert client.request("GET", "/v2/health/live").status == 200
        server.process.send_signal(signal.SIGTERM)
        assert ends(client)
        client.close()
        assert server.ended() == 0


@pytest.mark.slow
def test_half_a_head_is_refused_when_the_grace_is_over(front: Front) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(front.start("--exit-grace-secs=0.2"))
        client = stack.enter_context(front.connect(server))
        assert client.request("GET", "/v2/health/live").status == 200
        client.send(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\nx-slow:")
        server.process.send_signal(signal.SIGTERM)
        reply = client.read()
        assert (reply.status, reply.headers.get("connection")) == (503, "close"), reply
        assert "shutting down" in json.loads(reply.body)["error"]
        assert ends(client)
        client.close()
        assert server.ended() == 0


def test_a_body_that_is_on_its_way_is_waited_for(front: Front) -> None:
    """Its head came before the grace was over (which is none here)."""
    with ExitStack() as stack:
        server = stack.enter_context(front.start("--exit-grace-secs=0", "--exit-timeout-secs=600"))
        client = stack.enter_context(front.connect(server))
        head = b"POST %b HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n" % INFER.encode()
        client.send(head + b"Content-Length: %d\r\n\r\n" % len(GOOD))
        assert client.file.readline().startswith(b"HTTP/1.1 100") and client.file.readline() == b"\r\n"
        begin_stop(server)
        client.send(GOOD)
        reply = client.read()
        assert (reply.status, reply.headers.get("connection")) == (200, "close"), reply
        assert ends(client)
        client.close()
        assert server.ended() == 0


def test_whoever_has_connected_is_served(tmp_path: Path) -> None:
    """Connections that wait in the listener's queue when the drain begins."""
    write_model(tmp_path, "simple", identity_config())
    with EmbeddedServer(tmp_path, exit_grace_secs=100.0, exit_timeout_secs=600.0) as server:
        front = next(front for front in server.server.fronts if isinstance(front, RestServer))
        waiting: list[Http1] = []

        async def connect_and_drain() -> None:
            waiting.extend(Http1(server.http) for _ in range(100))
            await front.drain()

        drained = threading.Thread(target=server.run, args=(connect_and_drain,))
        drained.start()
        until(lambda: len(waiting) == 100, "all have connected")
        for client in waiting:
            with client:
                reply = client.request("POST", INFER, GOOD)
                assert (reply.status, reply.headers.get("connection")) == (200, "close"), reply
                assert ends(client)
        drained.join(60)
        assert not drained.is_alive()


def goaways(client: RawClient) -> list[tuple[int, int]]:
    return [
        (frame.last_stream_id, frame.error_code) for frame in client.frames if isinstance(frame, GoAwayFrame)
    ]


@pytest.fixture
def raw(lean: Front) -> Iterator[tuple[ServerProcess, RawClient]]:
    """A server that is patient, and a client of its REST port's HTTP/2."""
    with lean.start(*PATIENT) as server, RawClient(server.http) as client:
        yield server, client


def send(client: RawClient, stream: int) -> None:
    head = client.headers(stream, INFER, override=PLAIN)
    client.send(head + client.data(stream, GOOD))


def test_a_stream_that_crosses_the_goaway_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GOAWAY twice: first with the highest stream there can be, then with the last one that is served."""
    # the second comes once the client has answered, however long that takes
    monkeypatch.setattr(connection, "DRAIN_ROUND_TRIP_NS", 3600 * 10**9)
    write_model(tmp_path, "simple", identity_config())
    with (
        EmbeddedServer(tmp_path, exit_grace_secs=100.0, exit_timeout_secs=600.0) as server,
        RawClient(server.http) as client,
    ):
        send(client, 1)
        assert client.finish(1).headers[0][":status"] == "200"
        server.ask(server.server.stop)
        until(lambda: not listening(server.http), "it refuses connections: what is open is being told")
        send(client, 3)  # nothing was read: for this client the server is as it was
        assert client.finish(3).headers[0][":status"] == "200"
        client.until_closed()
        assert goaways(client) == [(2**31 - 1, 0), (3, 0)]


def test_http2_ends_when_the_client_has_heard_of_it(raw: tuple[ServerProcess, RawClient]) -> None:
    """An idle connection waits for no grace: the answer to a PING says that the GOAWAY was seen."""
    server, client = raw
    send(client, 1)
    client.finish(1)
    server.process.send_signal(signal.SIGTERM)
    client.until_closed()
    assert goaways(client) == [(2**31 - 1, 0), (1, 0)]
    assert server.ended() == 0


@pytest.mark.slow
def test_http2_clients_that_never_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """REST and gRPC: what was sent before the GOAWAY was read is answered, and the end is no reset."""
    monkeypatch.setattr(connection, "DRAIN_ROUND_TRIP_NS", 3600 * 10**9)
    write_model(tmp_path, "simple", identity_config())
    problems: list[str] = []
    answered = [0] * 8

    def load(number: int, client: RawClient) -> None:
        stream = 1
        try:
            while client.goaway is None:
                if number % 2:
                    client.start(stream, identity(f"{stream}", "simple"))
                else:
                    send(client, stream)
                reply = client.finish(stream)
                assert reply.reset is None and reply.headers[0][":status"] == "200", reply.headers
                answered[number] += 1
                stream += 2
            client.until_closed()
            assert goaways(client)[-1] == (stream - 2, 0), goaways(client)
            assert goaways(client)[0] == (2**31 - 1, 0)
        except Exception as error:
            problems.append(f"client {number} after {answered[number]} answers: {error!r}")

    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedServer(tmp_path, exit_grace_secs=100.0, exit_timeout_secs=600.0))
        clients = [
            stack.enter_context(RawClient(server.grpc if i % 2 else server.http))
            for i in range(len(answered))
        ]
        stop_under(partial(server.ask, server.server.stop), load, clients, answered)
        assert problems == []


@pytest.mark.slow
def test_a_silent_grpc_connection_does_not_hold_up_the_end(lean: Front) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(lean.start("--exit-timeout-secs=600"))
        host, port = server.grpc.split(":")
        silent = stack.enter_context(socket.create_connection((host, int(port)), 60))
        with RawClient(server.grpc) as other:  # taken behind the silent one
            other.sync()
        server.process.send_signal(signal.SIGTERM)
        assert silent.recv(1) == b""
        silent.close()
        assert server.ended() == 0
