"""generate and generate_stream of decoupled Python models: how many responses, errors, disconnects."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tests.backends.python.models import config, python_model
from tests.support.http import Http1, Http2, Reply
from tests.support.memory import resident
from tests.support.sanitizer import no_memory_figures
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.transport.rest.conftest import in_flight

DECOUPLED = "model_transaction_policy { decoupled: true }"
# `how` is a list of steps: a number is a response, an error text an error response
STEPS = """
import json, threading
import numpy as np

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

def response(value):
    if isinstance(value, str):
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(value))
    return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([value], np.float32))])

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            how = json.loads(request.parameters())["how"]
            threading.Thread(target=self.run, args=(how, request.get_response_sender())).start()

    def run(self, how, sender):
        try:
            if how == "endless":
                pb_utils.Logger.log_info("endless runs")
                while True:
                    sender.send(response(1.0))
            for step in json.loads(how):
                sender.send(response(step))
            sender.send(flags=FINAL)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"told: {error}")
"""
# sends `count` responses of 64 KiB; asked for "sent", it says how many it has sent so far
MANY = """
import json, threading
import numpy as np

class TritonPythonModel:
    sent = 0

    def execute(self, requests):
        for request in requests:
            how = json.loads(request.parameters())["how"]
            if how == "sent":
                threading.Thread(target=self.answer, args=(request.get_response_sender(),)).start()
            else:
                TritonPythonModel.sent = 0
                threading.Thread(target=self.run, args=(int(how), request.get_response_sender())).start()

    def answer(self, sender):
        out = pb_utils.Tensor("OUT", np.array([str(self.sent)], dtype=object))
        sender.send(pb_utils.InferenceResponse([out]), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def run(self, count, sender):
        try:
            for number in range(count):
                text = np.array([f"{number}:" + "x" * (64 << 10)], dtype=object)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
                TritonPythonModel.sent = number + 1
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException as error:
            pb_utils.Logger.log_info(f"told: {error}")
"""
FAILS = """
import json
class TritonPythonModel:
    def execute(self, requests):
        how = json.loads(requests[0].parameters())["how"]
        if how == "raise":
            raise RuntimeError("it broke")
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("generation failed")) for _ in requests]
"""
ECHO = """
import json
import numpy as np
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            seen = [request.request_id(), json.loads(request.parameters()), request.correlation_id()]
            text = np.array([json.dumps(seen).encode()], object)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
        return answers
"""
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that "
    "generates various number of responses"
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServerProcess]]:
    repository = tmp_path_factory.mktemp("generate-models")
    python_model(repository, "steps", STEPS, config(extra=DECOUPLED))
    python_model(repository, "fails", FAILS)
    python_model(repository, "many", MANY, config("IN:TYPE_FP32:-1", "OUT:TYPE_STRING:1", extra=DECOUPLED))
    python_model(repository, "echo", ECHO, config("IN:TYPE_FP32:1", "OUT:TYPE_STRING:1"))
    with ServerProcess(repository) as lean, ServerProcess(repository, "--http-lean=false") as hypercorn:
        yield {"lean": lean, "hypercorn": hypercorn, "http2": lean}


@pytest.fixture(params=["lean", "hypercorn", "http2"])
def client(request: pytest.FixtureRequest, servers: dict[str, ServerProcess]) -> Iterator[Http1 | Http2]:
    kind = Http2 if request.param == "http2" else Http1
    with kind(servers[request.param].http) as made:
        yield made


def ask(client: Http1 | Http2, model: str, verb: str, how: Any) -> Reply:
    text = how if isinstance(how, str) else json.dumps(how)
    body = json.dumps({"IN": [1], "how": text}).encode()
    return client.request("POST", f"/v2/models/{model}/{verb}", body)


def events(reply: Reply) -> list[Any]:
    """The outputs or error texts of a stream's events."""
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = reply.body.split(b"\n\n")
    assert parts.pop() == b""
    found = []
    for part in parts:
        assert part.startswith(b"data: ")
        event = json.loads(part[6:])
        found.append(event.get("error", event.get("OUT")))
    return found


@pytest.mark.parametrize(
    ("steps", "status"),
    [([], 200), ([1], 200), ([1, 2, 3], 200), (["bad"], 400), (["bad", 2], 400), ([1, "bad", 2], 200)],
)
def test_a_stream_of_any_number_of_responses(client: Http1 | Http2, steps: list[Any], status: int) -> None:
    reply = ask(client, "steps", "generate_stream", steps)
    assert reply.status == status
    assert events(reply) == steps


@pytest.mark.parametrize("steps", [[], [1, 2], [1, "bad"]])
def test_generate_wants_one_response(client: Http1 | Http2, steps: list[Any]) -> None:
    reply = ask(client, "steps", "generate", steps)
    assert (reply.status, json.loads(reply.body)) == (200, {"error": NOT_ONE})


def test_generate_with_one_response(client: Http1 | Http2) -> None:
    reply = ask(client, "steps", "generate", [4])
    assert reply.status == 200 and json.loads(reply.body)["OUT"] == 4
    reply = ask(client, "steps", "generate", ["bad"])
    assert (reply.status, json.loads(reply.body)) == (400, {"error": "bad"})


@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_keys_that_name_no_input_are_parameters(client: Http1 | Http2, verb: str) -> None:
    """The id is both; sequence_id and priority mean nothing here; `parameters` is flattened."""
    sent = {"id": "g", "sequence_id": 7, "priority": 2, "b": True, "s": "x", "parameters": {"a": 1, "f": 1.5}}
    reply = client.request("POST", f"/v2/models/echo/{verb}", json.dumps({"IN": 1, **sent}).encode())
    assert reply.status == 200
    got = json.loads(reply.body if verb == "generate" else reply.body.removeprefix(b"data: "))
    assert list(got) == ["id", "OUT", "model_name", "model_version"] and got["id"] == "g"
    id, parameters, sequence = json.loads(got["OUT"])
    expected = {"id": "g", "sequence_id": 7, "priority": 2, "b": True, "s": "x", "a": 1, "f": 1.5}
    assert (id, parameters, sequence) == ("g", expected, 0)


def test_a_model_that_fails(client: Http1 | Http2) -> None:
    reply = ask(client, "fails", "generate", "error")
    assert (reply.status, json.loads(reply.body)) == (400, {"error": "generation failed"})
    assert reply.headers["content-type"] == "application/json"
    reply = ask(client, "fails", "generate", "raise")
    assert reply.status == 400 and "RuntimeError: it broke" in json.loads(reply.body)["error"]
    reply = ask(client, "fails", "generate_stream", "error")
    assert reply.status == 400 and events(reply) == ["generation failed"]
    reply = ask(client, "fails", "generate_stream", "raise")
    assert reply.status == 400 and "RuntimeError: it broke" in events(reply)[0]


@pytest.mark.parametrize("front", ["lean", "hypercorn", "http2"])
@pytest.mark.parametrize("verb", ["generate", "generate_stream"])
def test_a_client_that_leaves_ends_the_request(
    servers: dict[str, ServerProcess], front: str, verb: str
) -> None:
    server = servers[front]
    told, runs = server.log().count("told: "), server.log().count("endless runs")
    body = json.dumps({"IN": [1], "how": "endless"}).encode()
    path = f"/v2/models/steps/{verb}"
    client: Http1 | Http2 = (Http2 if front == "http2" else Http1)(server.http)
    with client:
        client.start("POST", path, body)
        server.until_logged("endless runs", runs + 1)
    server.until_logged("told: ", told + 1)
    until(lambda: in_flight(server) == 0, server)


@pytest.mark.slow
@no_memory_figures
@pytest.mark.parametrize("front", ["lean", "hypercorn", "http2"])
def test_a_client_that_reads_nothing_stops_the_sender(servers: dict[str, ServerProcess], front: str) -> None:
    """10,000 responses of 64 KiB: the model waits in send(), the server keeps a few of them."""
    server = servers[front]
    told = server.log().count("told: ")
    body = json.dumps({"IN": [1], "how": "10000"}).encode()
    path = "/v2/models/many/generate_stream"

    def sent() -> int:
        reply = ask(asking, "many", "generate", "sent")
        return int(json.loads(reply.body)["OUT"])

    with Http1(server.http) as asking:
        sent()
        before = resident(server.process.pid)
        stalled: Http1 | Http2 = (Http2 if front == "http2" else Http1)(server.http)
        if isinstance(stalled, Http1):
            stalled.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        with stalled:
            stalled.start("POST", path, body)
            # the sender is at a standstill when 200 questions in a row are answered alike
            alike, last = 0, -1
            while alike < 200:
                now = sent()
                alike, last = (alike + 1 if now == last and now else 0), now
            assert last < 400  # the kernel takes its share, and reads none of it back
            assert resident(server.process.pid) - before < 64 << 20
            if front == "http2":  # what the windows let through goes on once the client reads
                assert isinstance(stalled, Http2)
                while len(stalled.replies.get(1, Reply(0)).body) < 4 << 20:
                    stalled.pump()
            else:
                assert len(stalled.file.read(8 << 20)) == 8 << 20
            until(lambda: sent() > last, server.log)
        server.until_logged("told: ", told + 1)
        until(lambda: in_flight(server) == 0, server.log)
        assert resident(server.process.pid) - before < 64 << 20
