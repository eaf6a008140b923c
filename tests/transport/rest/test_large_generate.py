"""Large bodies and answers of generate are worked on by workers, and what their tensors take is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.embedded import EmbeddedServer
from tests.support.gated_workers import WorkersGate, gate_workers
from tests.support.http import Http1
from tests.support.repository import write_model

N = 30_000
CONFIG = """backend: "identity"
input { name: "INPUT0" data_type: TYPE_FP64 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_FP64 dims: [ -1 ] }
"""
HELD = 2 << 20


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> WorkersGate:
    return gate_workers(monkeypatch)


@pytest.fixture(params=[True, False], ids=["lean", "hypercorn"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[EmbeddedServer]:
    write_model(tmp_path, "m", CONFIG)
    with EmbeddedServer(tmp_path, http_lean=request.param, max_held_bytes=HELD) as made:
        yield made


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_workers_read_and_print(server: EmbeddedServer, gate: WorkersGate, verb: str) -> None:
    values = [float(i % 7) for i in range(N)]
    with Http1(server.http) as large, Http1(server.http) as small:
        content = json.dumps({"INPUT0": values}).encode()
        large.start("POST", f"/v2/models/m/{verb}", content)
        server.until(lambda: gate.asked == 1, "a worker was asked to read")
        reply = small.request("POST", f"/v2/models/m/{verb}", b'{"INPUT0": [[1], 2]}')
        assert reply.status == 200 and b'"OUTPUT0":[1.0,2.0]' in reply.body
        assert gate.asked == 1
        server.ask(gate.open.set)
        answer = large.read("POST")
    assert answer.status == 200
    assert json.loads(answer.body.removeprefix(b"data: "))["OUTPUT0"] == values
    assert gate.done == 2  # one has read, one has printed


def test_nobody_reads_for_a_client_that_left(server: EmbeddedServer, gate: WorkersGate) -> None:
    content = json.dumps({"INPUT0": [1.0] * N}).encode()
    with Http1(server.http) as client:
        client.start("POST", "/v2/models/m/generate", content)
        server.until(lambda: gate.asked == 1, "a worker was asked to read")
    server.until(lambda: gate.left == 1, "its work was given up")
    server.until(lambda: server.server.services.held.look() == 0, "nothing is held")


@pytest.mark.parametrize("verb", ["infer", "generate"])
def test_what_tensors_take_beyond_their_text_is_counted(
    server: EmbeddedServer, gate: WorkersGate, verb: str
) -> None:
    """440,000 bytes of text and as many for a copy fit into 2 MiB; their tensor of 1.76 million does not."""
    server.ask(gate.open.set)
    count = 220_000
    numbers = b"[" + b",".join([b"0"] * count) + b"]"
    if verb == "infer":
        content = b'{"inputs":[{"name":"INPUT0","datatype":"FP64","shape":[%d],"data":%b}]}' % (
            count,
            numbers,
        )
    else:
        content = b'{"INPUT0":%b}' % numbers
    with Http1(server.http) as client:
        refused = client.request("POST", f"/v2/models/m/{verb}", content)
        assert refused.status == 503 and b"--max-held-bytes" in refused.body
    server.until(lambda: server.server.services.held.look() == 0, "nothing is held")
    with Http1(server.http) as client:
        few = content.replace(b"0," * 200_000, b"").replace(b"220000", b"20000")
        assert client.request("POST", f"/v2/models/m/{verb}", few).status == 200
    server.until(lambda: server.server.services.held.look() == 0, "nothing is held")
