"""The budget of bytes (--max-held-bytes) and what is small but comes by the thousand: messages that wait, and headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from neptrio.transport.grpc import handlers, stream_infer
from tests.support.embedded import EmbeddedServer
from tests.support.http2_attack import END_HEADERS, HEADERS
from tests.support.infer_messages import identity
from tests.support.raw_http2 import INFER, LIVE, STREAM_INFER, RawClient, Reply, frame, message
from tests.transport.conftest import SESSIONS

UNAVAILABLE = 14
LIMIT = 3_000_000
REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
EMPTY = 15_000  # messages without a byte; they come in 75 KB
METADATA = [("x", "a" * 50_000)]


@pytest.fixture(scope="module", params=SESSIONS)
def embedded(grpc_repository: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedServer]:
    with EmbeddedServer(grpc_repository, request.param, max_held_bytes=LIMIT) as server:
        yield server


@pytest.fixture
def server(embedded: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """It holds nothing after a test, and serves."""
    yield embedded
    embedded.until_idle()
    embedded.until(lambda: embedded.server.services.held.look() == 0, "nothing is held")
    with RawClient(embedded.grpc) as client:
        assert client.call(1, identity()).status == 0


def until_held(server: EmbeddedServer, size: int) -> None:
    """Waits until the server counts so many bytes, or up to half as many more."""
    held = server.server.services.held
    server.until(lambda: size <= held.count() <= size + size // 2, f"{size} bytes are held")


@pytest.mark.parametrize("path", [REFLECTION, STREAM_INFER])
def test_empty_messages_that_wait(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """For a handler that waits until its answers are read, or for room in a stream."""
    monkeypatch.setattr(handlers, "OUTPUT_BYTES", 0)
    monkeypatch.setattr(stream_infer, "STREAM_REQUESTS", 0)
    with RawClient(server.grpc, settings={4: 0}) as client:
        client.send(client.headers(1, path) + client.data(1, message(b"") * EMPTY, end=False))
        client.sync()
        until_held(server, 100 * EMPTY)
        client.send(client.data(1, message(b"") * 2 * EMPTY, end=False))
        client.sync()
        client.window(1, 1 << 20)
        reply = client.finish(1)
        assert reply.status == UNAVAILABLE and "--max-held-bytes" in reply.text


def test_headers_of_open_calls(server: EmbeddedServer) -> None:
    with RawClient(server.grpc) as client:
        client.encoder.header_table_size = 0  # so that a block means the same each time
        block = client.headers(1, INFER, METADATA)[9:]
        many = LIMIT // 50_000

        def call(*numbers: int) -> None:
            for number in numbers:
                client.replies[2 * number + 1] = Reply()
                client.send(frame(HEADERS, END_HEADERS, 2 * number + 1, block))
            client.sync()

        call(*range(many))
        until_held(server, many * 50_000)
        call(*range(many, many + 20))
        refused = [reply for reply in client.replies.values() if reply.done]
        assert 15 <= len(refused) <= 20
        assert all(reply.status == UNAVAILABLE and "--max-held-bytes" in reply.text for reply in refused)
        until_held(server, LIMIT)
        with RawClient(server.grpc) as other:
            assert other.call(1, identity()).status == UNAVAILABLE
            assert other.call(3, b"", LIVE).status == 0, "probes are answered"
            assert other.call(5, b"", LIVE, METADATA).status == UNAVAILABLE, "but not with such headers"
