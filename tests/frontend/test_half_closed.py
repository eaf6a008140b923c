"""Clients that close their sending side behind a request, and read on: what is computed on the loop is answered."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.http import Http1
from tests.support.infer_messages import IDENTITY_JSON, identity, stream_response
from tests.support.raw_http2 import STREAM_INFER, RawClient, message
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

TRIES = 40
INFER = "/v2/models/identity/infer"
BODY = IDENTITY_JSON


@pytest.fixture(scope="module", params=[0, 1])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("models")
    write_model(folder, "identity", identity_config())
    with ServerProcess(folder, f"--frontends={request.param}") as process:
        warm(process)
        yield process


def warm(server: ServerProcess) -> None:
    """Until the model is known to take microseconds."""
    with Http1(server.http) as client:
        for _ in range(100):
            assert client.request("POST", INFER, BODY).status == 200


def http(server: ServerProcess) -> bool:
    with Http1(server.http) as client:
        client.start("POST", INFER, BODY)
        client.sock.shutdown(socket.SHUT_WR)
        return client.read().status == 200


def unary(server: ServerProcess) -> bool:
    with RawClient(server.grpc) as client:
        client.start(1, identity("a"))
        client.sock.shutdown(socket.SHUT_WR)
        client.until_closed()
        return client.replies[1].ended and client.replies[1].status == 0


def stream(server: ServerProcess) -> bool:
    with RawClient(server.grpc) as client:
        client.send(client.headers(1, STREAM_INFER) + client.data(1, message(identity("a"))))
        client.sock.shutdown(socket.SHUT_WR)
        client.until_closed()
        reply = client.replies[1]
        answers = [stream_response(each) for each in reply.messages]
        return reply.ended and reply.status == 0 and [each.error_message for each in answers] == [""]


@pytest.mark.parametrize("way", [http, unary, stream])
def test_the_answer_comes(server: ServerProcess, way: Callable[[ServerProcess], bool]) -> None:
    """Where an execution happens to be interrupted, the next ones are not the loop's, and may be cancelled: not most."""
    answered = 0
    for _ in range(TRIES):
        if way(server):
            answered += 1
        else:
            warm(server)
    assert answered > TRIES // 2
