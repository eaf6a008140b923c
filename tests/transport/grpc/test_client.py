"""What the real gRPC client meets: metadata, deadlines, cancels, a drain."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import identity, identity_inputs


@pytest.mark.slow
def test_real_clients_reconnect_after_a_drain(grpc_repository: Path) -> None:
    with EmbeddedServer(grpc_repository) as server:
        with grpcclient.InferenceServerClient(server.grpc) as client:
            assert client.is_server_live()
            for connection in list(server.grpc_server.open):
                server.ask(connection.start_drain)
            assert client.infer("identity", identity_inputs(), request_id="r").get_response().id == "r"


def test_binary_metadata_from_the_real_client(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(client._channel)
        metadata = (("x-bin", bytes(range(256))), ("y", "z"))
        assert stub.ServerLive(service_pb2.ServerLiveRequest(), metadata=metadata).live
        made = service_pb2.ModelInferRequest.FromString(identity("m"))
        assert stub.ModelInfer(made, metadata=metadata).id == "m"


def test_real_deadlines_and_cancels(server: EmbeddedServer) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        with pytest.raises(InferenceServerException) as info:
            client.infer("stuck", identity_inputs(), client_timeout=0.05)
        assert info.value.status() == "StatusCode.DEADLINE_EXCEEDED"
        done: list[Any] = []
        came = threading.Event()
        call = client.async_infer(
            "stuck", identity_inputs(), lambda result, error: (done.append(error), came.set())
        )
        call.cancel()
        assert came.wait(60) and done[0].status() == "StatusCode.CANCELLED"
    server.until_idle()
