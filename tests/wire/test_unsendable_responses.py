"""What a model can make and a message cannot carry: its own request is told, and no other one waits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.backends.python.models import config, python_model
from tests.support.http import Http1
from tests.support.server import ServerProcess

MODEL = """
import numpy as np

HALF = "x\\ud800y"

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(r.inputs()[0].as_numpy().flat[0].decode()) for r in requests]

    def answer(self, told):
        good = pb_utils.Tensor("OUT", np.array(["good"], object))
        if told == "error":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(HALF))
        parameters = {"text": {"k": HALF}, "key": {HALF: 1}, "large": {"k": 1 << 64}, "low": {"k": -(1 << 63) - 1}}
        return pb_utils.InferenceResponse([good], parameters=parameters.get(told))
"""
BEGIN = "the response of model 'm' cannot be sent"
INTEGER = BEGIN + " over gRPC: parameter 'k' is an integer beyond 64 bits"
UNICODE = " is not valid Unicode: '\\ud800' at position 1 is half of a surrogate pair"
CASES = {
    "error": "x\\ud800y",
    "text": f"{BEGIN}: parameter 'k'{UNICODE}",
    "key": f"{BEGIN}: the name of parameter 'x\\ud800y'{UNICODE}",
    "large": INTEGER,
    "low": INTEGER,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("unsendable")
    batching = "dynamic_batching { preferred_batch_size: [ 2 ] max_queue_delay_microseconds: 60000000 }"
    text = config("IN:TYPE_STRING:1", "OUT:TYPE_STRING:1", 2, batching)
    python_model(repository, "m", MODEL, text)
    # it ends with status 0: every request has left the accounts
    with ServerProcess(repository) as process:
        yield process


def asked(told: str) -> Any:
    made = pb.ModelInferRequest(model_name="m")
    made.inputs.add(name="IN", datatype="BYTES", shape=[1, 1]).contents.bytes_contents.append(told.encode())
    return made


def document(told: str) -> bytes:
    tensor = {"name": "IN", "shape": [1, 1], "datatype": "BYTES", "data": [told]}
    return json.dumps({"inputs": [tensor]}).encode()


@pytest.mark.parametrize("told", CASES)
def test_a_call(server: ServerProcess, told: str) -> None:
    """The other request of the batch is answered behind it."""
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        first = stub.ModelInfer.future(asked(told), timeout=60)
        second = stub.ModelInfer.future(asked("good"), timeout=60)
        assert second.result().raw_output_contents == [b"\4\0\0\0good"]
        error = first.exception()
        assert (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, CASES[told])


@pytest.mark.parametrize("told", CASES)
@pytest.mark.parametrize("strict", [False, True])
def test_a_stream(server: ServerProcess, told: str, strict: bool) -> None:
    metadata = [("triton_grpc_error", "true")] if strict else []
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = stub.ModelStreamInfer(iter([asked(told), asked("good")]), timeout=60, metadata=metadata)
        if strict:
            with pytest.raises(grpc.RpcError) as info:
                list(answers)
            assert (info.value.code(), info.value.details()) == (grpc.StatusCode.INTERNAL, CASES[told])
            return
        first, second = answers
        assert first.error_message == CASES[told] and not first.infer_response.outputs
        assert second.infer_response.raw_output_contents == [b"\4\0\0\0good"]


@pytest.mark.parametrize("told", CASES)
def test_http(server: ServerProcess, told: str) -> None:
    with Http1(server.http) as one, Http1(server.http) as other:
        for client, what in ((one, told), (other, "good")):
            body = document(what)
            head = f"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            client.send(head.encode() + body)
        reply = one.read()
        assert other.read().status == 200
    if told in ("large", "low"):  # JSON has no limit
        value = {"large": 1 << 64, "low": -(1 << 63) - 1}[told]
        assert (reply.status, json.loads(reply.body)["parameters"]) == (200, {"k": value})
    else:
        assert (reply.status, json.loads(reply.body)) == (500, {"error": CASES[told]})


@pytest.mark.parametrize("told", ["text", "key"])
@pytest.mark.parametrize("verb", ["generate", "generate_stream", "infer_stream"])
def test_other_verbs(server: ServerProcess, told: str, verb: str) -> None:
    with Http1(server.http) as client, Http1(server.http) as other:
        for each, what in ((client, told), (other, "good")):
            body = document(what) if verb == "infer_stream" else json.dumps({"IN": what}).encode()
            each.start("POST", f"/v2/models/m/{verb}", body)
        assert other.read().status == 200
        reply = client.read()
    text = reply.body.decode().strip().rpartition("data: ")[2]
    assert (reply.status, json.loads(text)) == (
        500 if verb == "infer_stream" else 400,
        {"error": CASES[told]},
    )
