"""infer_stream: responses of any model as server-sent events or as parts, over every HTTP front."""

from __future__ import annotations

import base64
import email
import email.policy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.http import Http1, Http2, Reply
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            n = int(pb_utils.get_input_tensor_by_name(request, "N").as_numpy()[0])
            sender = request.get_response_sender()
            for i in range(abs(n)):
                if n < 0 and i == 1:
                    sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("in the middle")))
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("I", np.full(SIZE, i, np.int32))]))
                if request.is_cancelled():
                    break
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CONFIG = """
backend: "python" max_batch_size: 0 model_transaction_policy {{ decoupled: true }}
input [ {{ name: "N" data_type: TYPE_INT32 dims: [ 1 ] }} ]
output [ {{ name: "I" data_type: TYPE_INT32 dims: [ {} ] }} ]
"""
REFUSE = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("not today")) for _ in requests]
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("streams")
    for name, size in (("count", 1), ("large", 1 << 17)):
        write_model(folder, name, CONFIG.format(size), {"1/model.py": COUNT.replace("SIZE", str(size))})
    write_model(folder, "same", identity_config("TYPE_FP32", "2", 0, 1))
    write_model(
        folder,
        "refuse",
        'backend: "python" output [ { name: "O" data_type: TYPE_INT32 dims: [ 1 ] } ]',
        {"1/model.py": REFUSE},
    )
    return folder


@pytest.fixture(scope="module", params=["lean", "hypercorn"])
def server(repository: Path, request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess(repository, f"--http-lean={str(request.param == 'lean').lower()}") as process:
        yield process


def ask(model: str, n: int, server: ServerProcess, binary: bool = False, **headers: str) -> Reply:
    document: dict[str, Any] = {
        "id": "mine",
        "inputs": [{"name": "N", "datatype": "INT32", "shape": [1], "data": [n]}],
        "outputs": [{"name": "I", "parameters": {"binary_data": binary}}],
    }
    with Http1(server.http) as client:
        body = json.dumps(document).encode()
        return client.request("POST", f"/v2/models/{model}/infer_stream", body, headers)


def events(body: bytes) -> list[tuple[str, Any]]:
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields.get("event", "message"), json.loads(fields["data"])))
    return found


def test_events_of_a_decoupled_model(server: ServerProcess) -> None:
    reply = ask("count", 3, server)
    assert (reply.status, reply.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    found = events(reply.body)
    assert [kind for kind, _ in found] == ["message"] * 4
    assert [[o["data"] for o in document["outputs"]] for _, document in found] == [[[0]], [[1]], [[2]], []]
    assert [d["parameters"]["triton_final_response"] for _, d in found] == [False, False, False, True]
    assert {(d["model_name"], d["model_version"], d["id"]) for _, d in found} == {("count", "1", "mine")}


def test_a_model_with_one_response(server: ServerProcess) -> None:
    body = json.dumps({"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [2], "data": [1, 2]}]})
    with Http1(server.http) as client:
        reply = client.request("POST", "/v2/models/same/versions/1/infer_stream", body.encode())
    ((_, document),) = events(reply.body)
    assert document["outputs"] == [{"name": "OUTPUT0", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]}]
    assert document["parameters"] == {"triton_final_response": True}


def test_binary_outputs_are_base64_in_events(server: ServerProcess) -> None:
    (_, first), (_, second), _ = events(ask("count", 2, server, binary=True).body)
    for i, document in enumerate((first, second)):
        (output,) = document["outputs"]
        assert "data" not in output
        assert base64.b64decode(output["base64"]) == struct.pack("<i", i)
        assert output["parameters"] == {"binary_data_size": 4}


def parts(reply: Reply) -> list[Any]:
    head = f"Content-Type: {reply.headers['content-type']}\r\n\r\n".encode()
    message = email.message_from_bytes(head + reply.body, policy=email.policy.HTTP)
    assert message.is_multipart()
    return list(message.iter_parts())  # type: ignore[attr-defined]


def test_parts(server: ServerProcess) -> None:
    reply = ask("count", 2, server, binary=True, Accept="multipart/mixed")
    assert reply.status == 200
    found = parts(reply)
    assert len(found) == 3
    for i, part in enumerate(found[:2]):
        assert part.get_content_type() == "application/octet-stream"
        body = part.get_payload(decode=True)
        assert len(body) == int(part["Content-Length"])
        size = int(part["Inference-Header-Content-Length"])
        assert json.loads(body[:size])["parameters"] == {"triton_final_response": False}
        assert body[size:] == struct.pack("<i", i)
    assert found[2].get_content_type() == "application/json"
    assert json.loads(found[2].get_payload(decode=True))["parameters"] == {"triton_final_response": True}


def test_an_error_in_the_middle(server: ServerProcess) -> None:
    found = events(ask("count", -2, server).body)
    assert [kind for kind, _ in found] == ["message", "error", "message", "message"]
    assert found[1][1] == {"error": "in the middle"}


@pytest.mark.parametrize(
    ("model", "document", "status", "error"),
    [
        ("nope", {"inputs": []}, 404, "Request for unknown model: 'nope' is not found"),
        ("count", [], 400, "'inputs'"),
        ("count", {"inputs": []}, 400, "expected 1 inputs but got 0"),
        ("refuse", {"inputs": []}, 500, "not today"),
    ],
    ids=["model", "document", "inputs", "the model"],
)
def test_refusals_are_those_of_infer(
    server: ServerProcess, model: str, document: Any, status: int, error: str
) -> None:
    with Http1(server.http) as client:
        body = json.dumps(document).encode()
        streamed = client.request("POST", f"/v2/models/{model}/infer_stream", body)
        assert (streamed.status, streamed.headers["content-type"]) == (status, "application/json")
        if model != "count":  # infer refuses a decoupled model before it reads the body
            plain = client.request("POST", f"/v2/models/{model}/infer", body)
            assert (streamed.status, streamed.body) == (plain.status, plain.body)
        assert error in json.loads(streamed.body)["error"]
        other = client.request("GET", "/v2/models/count/infer_stream")
        assert other.status == 405


def test_a_client_that_leaves_cancels_the_request(server: ServerProcess) -> None:
    document = {"inputs": [{"name": "N", "datatype": "INT32", "shape": [1], "data": [1 << 30]}]}
    body = json.dumps(document).encode()
    client = Http1(server.http)
    client.start("POST", "/v2/models/large/infer_stream", body)
    assert client.sock.recv(12) == b"HTTP/1.1 200"

    def executing() -> int:
        with Http1(server.http) as other:
            stats = json.loads(other.request("GET", "/v2/models/large/stats?live=true").body)
            found: int = stats["model_stats"][0]["live"]["executing"]
            return found

    assert executing() == 1  # it waits for its reader: a billion responses take no memory
    client.close()
    until(lambda: executing() == 0, "the model is told")


def test_over_http2(server: ServerProcess) -> None:
    document = {"inputs": [{"name": "N", "datatype": "INT32", "shape": [1], "data": [3]}]}
    with Http2(server.http) as client:
        reply = client.request("POST", "/v2/models/count/infer_stream", json.dumps(document).encode())
    assert len(events(reply.body)) == 4
