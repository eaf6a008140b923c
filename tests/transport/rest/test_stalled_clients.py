"""Clients that do not take their answers: cut off after the request timeout, with an explicit clock."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from neptrio.transport.rest_server import RestServer
from tests.support.embedded import EmbeddedServer
from tests.support.repository import identity_config, write_model

LIMIT_NS = 60_000_000_000
ELEMENTS = 4 << 20  # of INT32: more than the kernel keeps for a connection
REQUEST = (
    b'{"inputs":[{"name":"INPUT0","shape":[1,%d],"datatype":"INT32",'
    b'"parameters":{"binary_data_size":%d}}],"parameters":{"binary_data_output":true}}'
) % (ELEMENTS, 4 * ELEMENTS)


async def nobody_watches(_front: RestServer) -> None:
    await trio.sleep_forever()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmbeddedServer]:
    monkeypatch.setattr(RestServer, "_watch", nobody_watches)  # its clock is the real one
    write_model(tmp_path, "large", identity_config(dims="-1", pairs=1))
    with EmbeddedServer(tmp_path) as started:
        yield started


def connections(server: EmbeddedServer) -> list[Any]:
    front: Any = next(f for f in server.server.fronts if isinstance(f, RestServer))
    return list(front.http1)


@pytest.fixture
def stalled(server: EmbeddedServer) -> Iterator[tuple[socket.socket, Any]]:
    """A client that is owed 16 MiB and reads nothing, and the server's end of it."""
    assert server.server.http_listener is not None
    address = server.server.http_listener.getsockname()
    with socket.create_connection(address, timeout=60) as client:
        client.sendall(
            b"POST /v2/models/large/infer HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
            b"Inference-Header-Content-Length: %d\r\n\r\n" % (len(REQUEST) + 4 * ELEMENTS, len(REQUEST))
        )
        client.sendall(REQUEST)
        client.sendall(bytes(4 * ELEMENTS))
        server.until(lambda: any(c.writer.pending for c in connections(server)), "the answer waits")
        (connection,) = server.ask(connections, server)
        yield client, connection


def test_a_client_that_takes_nothing_is_cut_off(
    server: EmbeddedServer, stalled: tuple[socket.socket, Any]
) -> None:
    client, connection = stalled
    start = 1 << 60

    def a_limit_passes() -> list[bool]:
        """Whether it was cut off after each check; in one loop pass, in which the kernel takes no more of the answer."""
        cut_off = []
        for now_ns in (start, start + LIMIT_NS, start + LIMIT_NS + 1):
            connection.check(now_ns, LIMIT_NS, 0)
            cut_off.append(connection.writer.broken)
        return cut_off

    assert server.ask(a_limit_passes) == [False, False, True]
    server.until(lambda: not connections(server), "the connection is gone")
    assert connection.writer.pending == 0
    taken = 0
    try:
        while part := client.recv(1 << 20):
            taken += len(part)
    except ConnectionResetError:
        pass
    assert taken < 4 * ELEMENTS, "the answer was not complete"
    server.until_idle()


def test_a_client_that_takes_a_little_keeps_its_connection(
    server: EmbeddedServer, stalled: tuple[socket.socket, Any]
) -> None:
    client, connection = stalled
    now = 1 << 60
    taken = 0
    while connection.writer.pending:
        server.ask(connection.check, now, LIMIT_NS, 0)
        before = connection.writer.pending  # read after the check; the kernel takes more at any moment
        while before and connection.writer.pending == before:
            # the server may have sent the last of it and not have counted that yet
            if select.select([client], [], [], 0.01)[0]:
                taken += len(client.recv(1 << 20))
        now += LIMIT_NS + 1
        server.ask(connection.check, now, LIMIT_NS, 0)
        assert not connection.writer.broken
    while taken < 4 * ELEMENTS:
        taken += len(client.recv(1 << 20))
    assert server.ask(connections, server) == [connection]
