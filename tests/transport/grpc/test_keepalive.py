"""PING, keep-alive, the age of connections, and the drain: how a connection ends."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from hyperframe.frame import PingFrame

from neptrio.transport.http2 import connection as http2_connection
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.infer_messages import identity, response, stream_response
from tests.support.raw_http2 import STREAM_INFER, RawClient, message
from tests.support.server import ServerProcess
from tests.transport.conftest import SESSIONS

WATCH = "/grpc.health.v1.Health/Watch"
NO_ERROR, ENHANCE_YOUR_CALM = 0, 11


# ---------------------------------------------------------------- ping, keep-alive, age


def test_ping_is_answered(raw: RawClient) -> None:
    raw.ping(b"abcdefgh")
    raw.until(lambda: any(isinstance(f, PingFrame) for f in raw.frames), "its echo")
    (echo,) = (f for f in raw.frames if isinstance(f, PingFrame))
    assert "ACK" in echo.flags and echo.opaque_data == b"abcdefgh"


def test_too_many_pings_without_calls(server: EmbeddedServer) -> None:
    with RawClient(server.grpc) as client:
        for _ in range(4):  # the first, then two strikes, then out
            client.ping()
        client.until_closed()
        assert client.goaway is not None and client.goaway.error_code == ENHANCE_YOUR_CALM
        assert client.goaway.additional_data == b"too_many_pings", "clients slow down on that text only"


def test_pings_of_a_busy_client_are_welcome(raw: RawClient) -> None:
    for i in range(20):
        raw.ping()
        assert raw.call(2 * i + 1, identity()).status == 0
    assert raw.goaway is None


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS)
def test_a_peer_that_answers_no_ping_is_dropped(grpc_repository: Path, session: str) -> None:
    with EmbeddedServer(
        grpc_repository,
        session,
        grpc_keepalive_time_ms=30,
        grpc_keepalive_timeout_ms=50,
        grpc_keepalive_permit_without_calls=True,
    ) as server:
        with RawClient(server.grpc) as client:
            client.handle = lambda frame: None  # type: ignore[method-assign]
            client.until_closed()
    with EmbeddedServer(
        grpc_repository,
        session,
        grpc_keepalive_time_ms=30,
        grpc_keepalive_timeout_ms=60_000,
        grpc_keepalive_permit_without_calls=True,
    ) as server:
        with RawClient(server.grpc) as client:  # one that answers stays
            seen = 0
            while seen < 3:
                seen += sum(type(f).__name__ == "PingFrame" for f in client.read())
                assert not client.closed
            assert not client.closed and client.call(1, identity()).status == 0


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS)
def test_connection_age(grpc_repository: Path, gate: Gate, session: str) -> None:
    def grow_old(server: EmbeddedServer) -> None:
        (connection,) = server.grpc_server.open
        server.ask(connection._too_old)

    with EmbeddedServer(grpc_repository, session, grpc_max_connection_age_ms=50) as server:
        with RawClient(server.grpc) as client:
            client.until_closed()
            assert client.goaway is not None and client.goaway.error_code == NO_ERROR
    hour = 3_600_000
    with EmbeddedServer(grpc_repository, session, grpc_max_connection_age_ms=hour) as server:
        with RawClient(server.grpc) as client:
            client.start(1, identity(model="gate"))
            client.sync()
            grow_old(server)
            client.until(lambda: client.goaway is not None, "GOAWAY")
            gate.go()
            assert client.finish(1).status == 0
            client.until_closed()
            assert client.goaway is not None and client.goaway.error_code == NO_ERROR
    with EmbeddedServer(
        grpc_repository, session, grpc_max_connection_age_ms=hour, grpc_max_connection_age_grace_ms=20
    ) as server:
        with RawClient(server.grpc) as client:
            client.start(1, identity(model="stuck"))
            client.sync()
            grow_old(server)
            client.until_closed()
            assert not client.replies[1].headers
        server.until_idle()


# ---------------------------------------------------------------- drain


@pytest.mark.slow
@pytest.mark.parametrize("session", SESSIONS)
def test_sigterm_answers_what_is_in_flight(grpc_repository: Path, session: str) -> None:
    """Unary, stream with open requests, idle stream, Watch, idle connection: each its right end."""
    process = ServerProcess(grpc_repository, env={**os.environ, "NEPTRIO_HTTP2_SESSION": session})
    with RawClient(process.grpc) as client, RawClient(process.grpc) as idle, RawClient(process.grpc) as mute:
        mute.handle = lambda frame: None  # type: ignore[method-assign]  # does not answer PING either
        for i in (1, 3, 5):
            client.start(i, identity(f"u{i}", "slow"))
        two = message(identity("s0", "slow")) + message(identity("s1"))
        client.send(client.headers(7, STREAM_INFER) + client.data(7, two, end=False))
        client.send(client.headers(9, STREAM_INFER) + client.data(9, b"", end=False))
        client.send(client.headers(11, WATCH) + client.data(11, message(b"")))
        client.until(lambda: client.replies[11].messages, "Watch answers")
        stopped = threading.Thread(target=lambda: statuses.append(process.stop()))
        statuses: list[int] = []
        stopped.start()
        client.until(lambda: client.goaway is not None, "GOAWAY")
        for i in (1, 3, 5):
            reply = client.finish(i)
            assert reply.status == 0 and response(*reply.messages).id == f"u{i}"
        reply = client.finish(7)
        assert [stream_response(m).infer_response.id for m in reply.messages] == ["s0", "s1"]
        shutting_down = "GRPC server is shutting down and has stopped accepting new requests."
        for i in (7, 9, 11):
            assert client.finish(i).status == 14 and client.replies[i].text == shutting_down
        client.until_closed()
        assert client.goaway is not None and client.goaway.error_code == NO_ERROR
        idle.until_closed()
        assert idle.goaway is not None and idle.goaway.error_code == NO_ERROR
        mute.until_closed()
        stopped.join(60)
    assert statuses == [0]


@pytest.mark.slow
def test_calls_that_cross_the_goaway_are_answered(
    grpc_repository: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "DRAIN_ROUND_TRIP_NS", 3600 * 10**9)  # however long it takes
    for session in SESSIONS:
        with EmbeddedServer(grpc_repository, session) as server:
            with RawClient(server.grpc) as client:
                client.start(1, identity("before", "gate"))
                client.sync()
                connection = next(iter(server.grpc_server.open))
                server.ask(connection.start_drain)
                client.start(3, identity("crossed"))  # sent before the GOAWAY was read
                assert client.finish(3).status == 0
                gate.go()
                assert client.finish(1).status == 0
                client.until_closed()
