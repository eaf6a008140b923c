"""Names that no model and no version can have are answered alike, over both protocols, with front ends and without."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neptrio.limits import LONGEST_NAME
from tests.frontend.test_front_ends import infer_body
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

LONG = "n" * (LONGEST_NAME + 1)
CUT = "n" * 128 + "..."  # what an error shows of it
VERBS = ("/infer", "", "/ready", "/config", "/stats")


@pytest.fixture(
    scope="module", params=[(), ("--frontends=2",), ("--http-lean=false",)], ids=["none", "two", "hypercorn"]
)
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    write_model(repository, "echo", identity_config(dims="-1", pairs=1))
    with ServerProcess(repository, *request.param) as process:
        yield process


def asked(server: ServerProcess, place: str, verb: str) -> tuple[int, str]:
    with Http1(server.http) as http:
        way = ("POST", infer_body([1])) if verb == "/infer" else ("GET", b"")
        reply = http.request(way[0], f"/v2/models/{place}{verb}", way[1])
        return reply.status, reply.body.decode()


@pytest.mark.parametrize("verb", VERBS)
def test_over_http(server: ServerProcess, verb: str) -> None:
    status, text = asked(server, LONG, verb)
    assert status == 400 and f"'model' has {len(LONG)} characters, the most is {LONGEST_NAME}" in text
    assert CUT in text and len(text) < 400
    status, text = asked(server, f"echo/versions/{'1' * len(LONG)}", verb)
    assert status == 400 and f"'version' has {len(LONG)} characters" in text and len(text) < 400
    if verb == "/infer":
        status, text = asked(server, "n" * LONGEST_NAME, verb)
        assert status == 404 and f"'{CUT} ({LONGEST_NAME} characters)' is not found" in text


@pytest.mark.parametrize("field", ["model_name", "model_version"])
def test_over_grpc(server: ServerProcess, field: str) -> None:
    message = service_pb2.ModelInferRequest(
        model_name="echo",
        inputs=[{"name": "INPUT0", "shape": [1, 1], "datatype": "INT32"}],
        raw_input_contents=[bytes(4)],
    )
    setattr(message, field, LONG)
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(message, timeout=60)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = caught.value.details()
        assert f"has {len(LONG)} bytes, the most is {LONGEST_NAME}" in details
        assert CUT in details and len(details) < 300
        streamed = next(stub.ModelStreamInfer(iter([message]), timeout=60))
        assert streamed.error_message == details
