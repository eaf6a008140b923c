"""What a connection's tasks raise ends that connection, not its neighbours, and not the server."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio.transport.grpc.compression import FrameDeflater
from neptrio.transport.grpc.connection import GrpcConnection
from neptrio.transport.http1.connection import Http1Connection
from neptrio.transport.rest.app_call import AppCalls
from tests.support.embedded import EmbeddedServer
from tests.support.http import Http1
from tests.support.infer_messages import identity, request
from tests.support.raw_http2 import STREAM_INFER, RawClient, message

ACCEPTS = [("grpc-accept-encoding", "gzip")]
LARGE = np.zeros(1 << 20, np.uint8)


class Defect(Exception):
    """What no code expects."""


def fails(*_: Any) -> Any:
    raise Defect("on purpose")


async def fails_later(*_: Any) -> Any:
    raise Defect("on purpose")


@pytest.fixture(scope="module")
def server(grpc_repository: Path) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(grpc_repository, grpc_infer_response_compression_level="low") as running:
        yield running


@pytest.fixture(autouse=True)
def neighbours(server: EmbeddedServer) -> Iterator[None]:
    """Connections that are there before a failure are served after it, and new ones, too."""
    rest = Http1(server.http)
    with RawClient(server.grpc) as grpc:
        assert grpc.call(1, identity()).status == 0
        assert rest.request("GET", "/v2/health/live").status == 200
        yield
        assert grpc.call(3, identity()).status == 0
        assert rest.request("GET", "/v2/health/live").status == 200
    rest.close()
    with RawClient(server.grpc) as newcomer:
        assert newcomer.call(1, identity()).status == 0


def test_compressing_an_answer_of_a_stream(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with RawClient(server.grpc) as client:
        monkeypatch.setattr(FrameDeflater, "step", fails)
        body = message(request("big", LARGE))
        client.send(client.headers(1, STREAM_INFER, ACCEPTS) + client.data(1, body, end=False))
        client.until_closed()
    assert "a connection is ended: what it does has failed" in caplog.text and "on purpose" in caplog.text


def test_compressing_the_answer_of_a_call(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its task can tell the client."""
    with RawClient(server.grpc) as client:
        monkeypatch.setattr(FrameDeflater, "step", fails)
        client.start(1, request("big", LARGE), extra=ACCEPTS)
        reply = client.finish(1)
        assert (reply.status, reply.text) == (13, "internal error: Defect: on purpose")
        assert client.call(3, identity()).status == 0


def test_a_call_of_the_app(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(AppCalls, "run", fails_later)
        with socket.create_connection(server.http.split(":"), timeout=60) as client:
            client.sendall(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert client.recv(1 << 16) == b""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [GrpcConnection, Http1Connection])
def test_looking_at_a_connection(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, kind: type[Any]
) -> None:
    """Which the port does each second."""
    address = server.grpc if kind is GrpcConnection else server.http
    with socket.create_connection(address.split(":"), timeout=60) as client:
        port = client.getsockname()[1]
        check = kind.check

        def looked(self: Any, *args: Any) -> None:
            if self.wire.peer[1] == port:
                fails()
            check(self, *args)

        monkeypatch.setattr(kind, "check", looked)
        assert b"" in iter(lambda: client.recv(1 << 16), None)
