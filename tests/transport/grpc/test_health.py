"""Health over gRPC: Check, Watch, ServerLive."""

from __future__ import annotations

import pytest

from tests.support.embedded import EmbeddedServer
from tests.support.raw_http2 import LIVE, RawClient, message

CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"


@pytest.mark.parametrize("service", [b"", b"\x0a\x04nope"])
def test_health_check(raw: RawClient, service: bytes) -> None:
    assert raw.call(1, service, CHECK).messages == [b"\x08\x01"]


def test_health_watch_follows_readiness(server: EmbeddedServer) -> None:
    metadata = server.server.verbs.metadata
    with RawClient(server.grpc) as client:
        client.send(client.headers(1, WATCH) + client.data(1, message(b"")))
        reply = client.replies[1]
        client.until(lambda: reply.messages == [b"\x08\x01"], "SERVING")
        server.ask(setattr, metadata, "exiting", True)
        client.until(lambda: reply.messages == [b"\x08\x01", b"\x08\x02"], "NOT_SERVING")
        server.ask(setattr, metadata, "exiting", False)
        client.until(lambda: reply.messages[2:] == [b"\x08\x01"], "SERVING again")

        model = server.ask(server.server.repository.lookup, "identity")
        backend = model.pool.instances[0].backend
        for healthy, status in ((False, b"\x08\x02"), (True, b"\x08\x01")):
            server.ask(setattr, backend, "healthy", healthy)
            server.ask(backend.on_health)
            count = len(reply.messages) + 1
            client.until(lambda n=count: len(reply.messages) == n, "the model's health")  # type: ignore[misc]
            assert reply.messages[-1] == status
        client.reset(1)


def test_live(raw: RawClient) -> None:
    assert raw.call(1, b"", LIVE).messages == [b"\x08\x01"]
