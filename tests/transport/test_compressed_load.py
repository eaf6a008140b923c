"""Compressed requests that mean harm: what they inflate to is bounded, and nobody else waits for them."""

from __future__ import annotations

import gzip
import json
import select
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neptrio.codec.inflate import STEP_BYTES, Inflater
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.http import Http1, Http2
from tests.support.infer_messages import binary_head, request
from tests.support.memory import resident
from tests.support.raw_http2 import STREAM_INFER, RawClient, message
from tests.support.repository import identity_config, write_model
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.http1.test_http1 import GOOD, post
from tests.transport.rest.test_http2_attacks import PLAIN

GZIP = b"Content-Encoding: gzip"
EMPTY = gzip.compress(b"", mtime=0)
INFER = "/v2/models/simple/infer"
MIB = 1 << 20


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path / "models", "simple", identity_config())
    write_model(tmp_path / "models", "big", identity_config("TYPE_UINT8", "-1", 0, 1))
    return tmp_path / "models"


class Held(Inflater):
    """Its steps wait until they may go on."""

    go_on = threading.Event()
    begun = 0

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        Held.begun += 1

    def step(self, most: int = STEP_BYTES, calls: int = 1024) -> bool:
        assert Held.go_on.wait(60)
        return super().step(most, calls)


@pytest.mark.slow
def test_control_verbs_do_not_wait_for_bodies(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty-four bodies of empty members, none of which comes to its end: the index, which wants a thread, has one."""
    body = EMPTY * (512 * 1024 // len(EMPTY)) + gzip.compress(GOOD)
    monkeypatch.setattr("neptrio.codec.compression.Inflater", Held)
    monkeypatch.setattr(Held, "begun", 0)
    Held.go_on.clear()
    with EmbeddedServer(repository) as server, ExitStack() as stack:
        stack.callback(Held.go_on.set)
        clients = [stack.enter_context(Http1(server.http)) for _ in range(64)]
        for client in clients:
            client.send(post("simple", body, GZIP))
        server.until(lambda: Held.begun == len(clients), "all are there")
        with Http1(server.http) as other:
            assert other.request("POST", "/v2/repository/index").status == 200
        assert select.select([client.sock for client in clients], [], [], 0)[0] == []
        Held.go_on.set()
        assert [client.read().status for client in clients] == [200] * len(clients)


def binary_bomb(mib: int) -> tuple[bytes, bytes]:
    """A request of zeros for the model `gate`, compressed; and its Inference-Header-Content-Length."""
    head = binary_head([1, mib * MIB // 4], "INT32", mib * MIB)
    return gzip.compress(head + bytes(mib * MIB), 9), b"Inference-Header-Content-Length: %d" % len(head)


@pytest.mark.slow
@no_memory_figures
def test_pipelined_bombs_share_one_budget(tmp_path: Path) -> None:
    """Twenty-four of 60 MiB each in 60 KiB: their contents would be 1.4 GiB."""
    gate = Gate(tmp_path / "models", tmp_path / "gate", extra="", size=1)
    body, header = binary_bomb(60)
    with ServerProcess(tmp_path / "models", failures="the whole batch fails") as server:
        with Http1(server.http) as client:
            assert client.request("GET", "/v2/health/live").status == 200
            before = resident(server.process.pid)
            client.send(post("gate", body, GZIP, header) * 24)
            for _ in range(24):
                gate.started()
                gate.go("f")  # fails: the answers are small
            statuses = [client.read().status for _ in range(24)]
        assert statuses == [500] * 24
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        peak = int(status.split("VmHWM:")[1].split()[0]) * 1024
        assert peak - before < (512 + 60 + 200) * MIB
    gate.close()


class Endless(Inflater):
    """Makes a mebibyte a step, for ever; its steps can be held and are counted."""

    steps = 0
    held = threading.Event()

    def step(self, most: int = STEP_BYTES, calls: int = 1) -> bool:
        if calls > 1 and most < STEP_BYTES:
            return False  # the first look, on the loop
        Endless.steps += 1
        assert Endless.held.wait(60)
        return False


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every body that is to be inflated is endless."""
    monkeypatch.setattr("neptrio.codec.compression.Inflater", Endless)
    monkeypatch.setattr("neptrio.transport.grpc.compression.Inflater", Endless)
    monkeypatch.setattr(Endless, "steps", 0)
    Endless.held.clear()
    yield Endless
    Endless.held.set()


def begin(server: EmbeddedServer, kind: str) -> Any:
    """Sends a compressed request; returns its connection."""
    compressed = gzip.compress(GOOD)
    client: Any
    if kind == "http1":
        client = Http1(server.http)
        client.send(post("simple", compressed, GZIP))
    elif kind == "http2":
        client = RawClient(server.http)
        head = client.headers(1, INFER, [("content-encoding", "gzip")], override=PLAIN)
        client.send(head + client.data(1, compressed))
    else:
        client = RawClient(server.grpc)
        path = STREAM_INFER if kind == "stream" else "/inference.GRPCInferenceService/ModelInfer"
        frame = message(gzip.compress(request("big", np.zeros(8, np.uint8))), 1)
        client.send(client.headers(1, path, [("grpc-encoding", "gzip")]) + client.data(1, frame, end=False))
        if kind == "unary":
            client.send(client.data(1, b""))
    return client


@pytest.mark.parametrize("kind", ["http1", "http2", "unary", "stream"])
def test_a_client_that_leaves_ends_the_work(repository: Path, endless: Any, kind: str) -> None:
    with EmbeddedServer(repository) as server:
        inflating, workers = server.server.services.inflating, server.server.services.workers
        client = begin(server, kind)
        until(lambda: endless.steps == 1, "it is inflated")
        client.close()
        server.until(lambda: inflating.held == 0, "what it held is given back")
        endless.held.set()
        server.until(lambda: workers.statistics().busy == 0, "the thread has ended its step")
        assert endless.steps == 1
        server.until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http1", "http2", "unary", "stream"])
def test_the_end_of_the_server_ends_the_work(repository: Path, endless: Any, kind: str) -> None:
    """With an answer that says so, and long before the exit timeout."""
    with EmbeddedServer(repository, exit_timeout_secs=600.0, exit_grace_secs=0.1) as server:
        client = begin(server, kind)
        endless.held.set()
        until(lambda: endless.steps > 3, "it is inflated, and inflated")
        server.ask(server.server.stop)
        if kind == "http1":
            reply = client.read()
            assert (reply.status, reply.headers["connection"]) == (503, "close")
            assert "shutting down" in json.loads(reply.body)["error"]
        elif kind == "http2":
            reply = client.finish(1)
            assert reply.headers[0][":status"] == "503"
            assert "shutting down" in json.loads(bytes(reply.data))["error"]
        else:
            answer = client.finish(1)
            assert answer.status == 14 and "shutting down" in answer.text
        client.close()


@pytest.mark.slow
def test_bodies_of_empty_members_over_both_fronts(repository: Path) -> None:
    """On the loop as far as they are small, else by the workers: the content is the same."""
    with ServerProcess(repository) as server:
        for count in (1, 20, 100, 5000):
            body = EMPTY * count + gzip.compress(GOOD) + EMPTY
            headers = {"Content-Encoding": "gzip"}
            with Http1(server.http) as client:
                assert client.request("POST", INFER, body, headers).status == 200
            with Http2(server.http) as client2:
                assert client2.request("POST", INFER, body, headers).status == 200


@pytest.mark.slow
def test_a_small_body_that_inflates_to_much_leaves_the_loop(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop inflates a little of it; the rest is for a thread."""
    threads: list[str] = []
    step = Inflater.step

    def watched(self: Inflater, most: int = STEP_BYTES, calls: int = 1024) -> bool:
        threads.append(threading.current_thread().name)
        return step(self, most, calls)

    monkeypatch.setattr(Inflater, "step", watched)
    body = gzip.compress(GOOD + b" " * (8 * MIB))
    assert len(body) < 64 << 10
    with EmbeddedServer(repository) as server:
        with Http1(server.http) as client:
            assert client.request("POST", INFER, body, {"Content-Encoding": "gzip"}).status == 200
        assert len(threads) >= 9 and threads[0] == "embedded-server"
        assert "embedded-server" not in threads[1:]
        server.until_idle()
