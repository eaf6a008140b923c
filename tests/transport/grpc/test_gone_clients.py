"""Clients that close their side in the middle of their answers: the server outlives them.

What an HTTP/2 library was lent for an answer must not be used after the call is over. The server runs with the
allocator that overwrites what is freed, so that such a use ends it at once.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.support.infer_messages import identity, request
from tests.support.raw_http2 import INFER, STREAM_INFER, RawClient, message
from tests.support.server import ServerProcess
from tests.transport.conftest import SESSIONS

LARGE = 3 << 20
WIDE = 2**31 - 1


@pytest.fixture(scope="module", params=SESSIONS)
def process(grpc_repository: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    env = {**os.environ, "NEPTRIO_HTTP2_SESSION": request.param, "PYTHONMALLOC": "debug"}
    with ServerProcess(grpc_repository, env=env) as server:
        yield server


def asked_for_much(process: ServerProcess, large: bytes, path: str = INFER) -> RawClient:
    """Three answers of 3 MiB and twenty small ones are on their way, and the windows are open for all of them."""
    client = RawClient(process.grpc, settings={4: WIDE}, credit=False)
    client.window(0, WIDE - 65535)
    for i in (1, 3, 5):
        client.send(client.headers(i, path))
        if path == INFER:
            client.send(client.data(i, message(large)))
        else:  # the stream stays open: it has more answers than one
            client.send(client.data(i, message(large) + message(large), end=False))
    for i in range(7, 47, 2):
        client.start(i, identity(str(i)))
    return client


@pytest.mark.slow
@pytest.mark.parametrize("path", [INFER, STREAM_INFER])
def test_a_client_that_closes_its_side_before_it_reads(process: ServerProcess, path: str) -> None:
    """The calls are given up; what was said of them is whole, or its end is missing: never half an answer with OK."""
    large = request("big", np.zeros(LARGE, np.uint8))
    for _ in range(5):
        with asked_for_much(process, large, path) as client:
            client.sock.shutdown(socket.SHUT_WR)
            client.until_closed()
            for reply in client.replies.values():
                if reply.ended and reply.status == 0:
                    assert len(reply.messages) == 1
        with RawClient(process.grpc) as neighbour:
            assert neighbour.call(1, identity()).status == 0
    assert process.process.poll() is None


def test_a_client_that_is_gone_before_it_reads(process: ServerProcess) -> None:
    large = request("big", np.zeros(LARGE, np.uint8))
    for _ in range(5):
        with asked_for_much(process, large) as client:
            client.until(lambda: any(reply.data for reply in client.replies.values()), "an answer begins")
        with RawClient(process.grpc) as neighbour:
            assert neighbour.call(1, identity()).status == 0
    assert process.process.poll() is None
