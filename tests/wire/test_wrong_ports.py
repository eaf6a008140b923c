"""A client that has one port in the place of another is told so, in the protocol that it speaks."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


@pytest.fixture(scope="module", params=[(), pytest.param(("--frontends=1",), marks=pytest.mark.slow)])
def server(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ServerProcess]:
    """Also with a front end."""
    repository = tmp_path_factory.mktemp("repository")
    write_model(repository, "m", identity_config())
    with ServerProcess(repository, *request.param) as process:
        yield process


def test_grpc_calls_on_the_port_of_rest(server: ServerProcess) -> None:
    asked = service_pb2.ModelInferRequest(model_name="m", raw_input_contents=[bytes(1 << 20)])
    with grpc.insecure_channel(server.http) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for call in (
            lambda: stub.ServerLive(service_pb2.ServerLiveRequest()),
            lambda: stub.ModelInfer(asked),
            lambda: next(stub.ModelStreamInfer(iter([asked]))),
        ):
            with pytest.raises(grpc.RpcError) as info:
                call()
            assert info.value.code() is grpc.StatusCode.UNIMPLEMENTED
            assert (
                info.value.details() == "This port speaks REST. gRPC is on another port, --grpc-port (8001)"
            )
    with grpcclient.InferenceServerClient(server.grpc) as client:
        assert client.is_server_live()


def test_rest_on_the_ports_of_grpc_and_of_metrics(server: ServerProcess) -> None:
    for port, status, text in (
        (
            server.grpc,
            400,
            b"This port speaks gRPC over HTTP/2. REST is on another port, --http-port (8000)\n",
        ),
        (
            server.metrics,
            200,
            b"# metrics are at /metrics; this is the metrics port, REST is on another port, --http-port (8000)\n",
        ),
    ):
        with Http1(port) as client:
            reply = client.request("GET", "/v2/models/m")
        assert (reply.status, reply.body) == (status, text)
