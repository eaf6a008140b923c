"""What a client sends once is not kept for ever: no cache keeps texts that are longer than LONGEST_KEPT."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.http import Http1
from tests.support.infer_messages import IDENTITY_JSON
from tests.support.memory import resident
from tests.support.raw_http2 import RawClient, Reply, frame
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess

FIRST = 20  # requests behind which whatever grows only once has grown
TEXTS = 400
LONG = 60_000  # bytes of each, so all have 24 MB, and the last 256 have 15
MOST = 8 << 20

pytestmark = [pytest.mark.slow, no_memory_figures]


def grows(server: ServerProcess, ask: Callable[[int], None]) -> int:
    """How many bytes the server grows by."""
    for number in range(FIRST):
        ask(number)
    before = resident(server.process.pid)
    for number in range(FIRST, FIRST + TEXTS):
        ask(number)
    return resident(server.process.pid) - before


def test_paths(lean_server: ServerProcess) -> None:
    with RawClient(lean_server.http) as client:

        def ask(number: int) -> None:
            path = f"/v2/models/{'a' * LONG}{number}/infer"
            fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "x")]
            block = client.encoder.encode([*fields, ("content-length", "2")], huffman=False)
            stream = 1 + 2 * number
            client.replies[stream] = Reply()
            client.send(frame(1, 0, stream, block[:16384]))
            for at in range(16384, len(block), 16384):
                client.send(frame(9, 4 if at + 16384 >= len(block) else 0, stream, block[at : at + 16384]))
            client.send(frame(0, 1, stream, b"{}"))
            reply = client.finish(stream)
            assert reply.headers[0][":status"] in ("400", "404")

        assert grows(lean_server, ask) < MOST


def test_accepted_encodings(lean_server: ServerProcess) -> None:
    with Http1(lean_server.http) as client:

        def ask(number: int) -> None:
            headers = {"Accept-Encoding": f"identity, {'a' * LONG}{number}"}
            assert client.request("POST", "/v2/models/simple/infer", IDENTITY_JSON, headers).status == 200

        assert grows(lean_server, ask) < MOST
