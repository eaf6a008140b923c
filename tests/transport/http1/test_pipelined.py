"""Answers that are ready before an earlier request on their connection is answered: what they hold, and for how long."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.backends.python.models import config, isolated
from tests.support.gate import Gate
from tests.support.http import Http1
from tests.support.infer_messages import IDENTITY_JSON, binary_head
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.rest.conftest import accepted, in_flight

# each response has 64 KiB; asked for no responses, it answers how many it has sent of the last request
PARTS = """
import threading
import numpy as np

def response(text):
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([text], dtype=object))])

class TritonPythonModel:
    sent = 0

    def execute(self, requests):
        for request in requests:
            count = int(pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()[0])
            threading.Thread(target=self.run, args=(count, request.get_response_sender())).start()

    def run(self, count, sender):
        try:
            if not count:
                sender.send(response(str(TritonPythonModel.sent)))
            for number in range(count):
                sender.send(response("x" * (64 << 10)))
                TritonPythonModel.sent = number + 1
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"told: {error}")
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
FIRST = json.dumps(
    {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [1]}]}
).encode()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "models", tmp_path / "pipes", size=1)
    isolated(
        tmp_path / "models",
        "parts",
        PARTS,
        config("IN:TYPE_INT32:1", "OUT:TYPE_STRING:1", extra=DECOUPLED),
        "none",
    )
    yield made
    made.go("k" * 8)
    made.close()


class Pipelined(Http1):
    """A connection whose first request the gate holds up."""

    def __init__(self, server: ServerProcess, gate: Gate) -> None:
        super().__init__(server.http)
        self.start("POST", "/v2/models/gate/infer", FIRST)
        gate.started()

    def stream(self, count: int) -> None:
        self.start("POST", "/v2/models/parts/generate_stream", json.dumps({"IN": count}).encode())


def standing(asking: Http1) -> int:
    """How many parts the model has sent when it does not get further: 200 questions in a row are answered alike."""
    alike, last = 0, -1
    while alike < 200:
        reply = asking.request("POST", "/v2/models/parts/generate", b'{"IN":0}')
        now = int(json.loads(reply.body)["OUT"])
        alike, last = (alike + 1 if now == last and now else 0), now
    return last


@pytest.mark.slow
def test_a_stream_behind_a_request_that_takes_long_waits(gate: Gate, tmp_path: Path) -> None:
    with (
        ServerProcess(tmp_path / "models", "--http-request-timeout-secs=600") as server,
        Http1(server.http) as asking,
    ):
        with Pipelined(server, gate) as client:
            client.stream(400)
            assert standing(asking) < 40
            gate.go()
            assert client.read().status == 200
            assert client.read().body.count(b"data: ") == 400
            client.start("POST", "/v2/models/gate/infer", FIRST)
            client.stream(400)
            assert standing(asking) < 40
        server.until_logged("told: ")
        until(lambda: in_flight(server) == 1, "the stream of a client that has left is over")
        gate.go()


@pytest.mark.slow
def test_a_client_that_leaves_is_noticed_while_there_is_no_room(gate: Gate, tmp_path: Path) -> None:
    """Behind a body that inflates to the limit no request is read until it is answered."""
    most = 100_000
    size = most // 4 * 4 - 400
    head = binary_head([1, size // 4], "INT32", size)
    head += b" " * (most - size - len(head))
    ahead = 3  # one executes, one is prepared
    with (
        ServerProcess(tmp_path / "models", f"--http-max-input-size={most}") as server,
        Pipelined(server, gate) as other,
    ):
        for _ in range(ahead - 1):
            other.start("POST", "/v2/models/gate/infer", FIRST)
        until(lambda: accepted(server, "gate") == ahead, "the model has enough to do")
        with Http1(server.http) as client:
            headers = {"Inference-Header-Content-Length": str(len(head)), "Content-Encoding": "gzip"}
            client.start("POST", "/v2/models/gate/infer", gzip.compress(head + bytes(size)), headers)
            until(lambda: accepted(server, "gate") == ahead + 1, "the large one waits")
        until(lambda: in_flight(server) == ahead, "it is cancelled")
        gate.go("k" * ahead)
        assert [other.read().status for _ in range(ahead)] == [200] * ahead


@pytest.mark.slow
def test_a_stream_that_waits_too_long_is_broken_off(gate: Gate, tmp_path: Path) -> None:
    """The request in front of it may wait for what it occupies."""
    with (
        ServerProcess(tmp_path / "models", "--http-request-timeout-secs=1") as server,
        Pipelined(server, gate) as client,
    ):
        client.stream(400)
        server.until_logged("told: ")
        until(lambda: in_flight(server) == 1, "the stream is over")
        gate.go()
        assert client.read().status == 200
        assert client.head().status == 200
        with pytest.raises((ConnectionError, ValueError)):  # its last chunk is missing
            while client.chunk():
                pass


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 100_000])  # received by the parser, and past it
def test_a_100_comes_behind_the_answers_of_earlier_requests(gate: Gate, tmp_path: Path, size: int) -> None:
    """RFC 9110, 15.2: a client takes it for the first request that is not answered."""
    body = IDENTITY_JSON + b" " * size
    head = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n"
    head += b"Content-Length: %d\r\n\r\n" % len(body)
    wrong = b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"
    write_model(tmp_path / "models", "simple", identity_config())
    with ServerProcess(tmp_path / "models") as server, Pipelined(server, gate) as client:
        client.send(head)
        until(lambda: in_flight(server) == 1, "the first is under way")
        gate.go()
        first = client.read()
        assert (first.status, first.interim) == (200, [])
        assert client.head().status == 100
        client.send(body)
        assert client.read().status == 200
        client.send(wrong + head)  # whose first is answered while the second is read
        first = client.read()
        assert (first.status, first.interim) == (400, [])
        assert client.head().status == 100
        client.send(body)
        assert client.read().status == 200
