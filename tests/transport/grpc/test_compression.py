"""Responses that the server compresses, per level and per what the client accepts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.support.embedded import EmbeddedServer
from tests.support.infer_messages import request
from tests.support.raw_http2 import RawClient


@pytest.mark.slow
@pytest.mark.parametrize(("level", "used"), [("low", "gzip"), ("medium", "deflate"), ("high", "deflate")])
def test_response_compression(grpc_repository: Path, level: str, used: str) -> None:
    large = np.zeros(1 << 20, np.uint8)
    with EmbeddedServer(grpc_repository, grpc_infer_response_compression_level=level) as server:
        with RawClient(server.grpc) as client:
            accept = [("grpc-accept-encoding", "identity, deflate, gzip")]
            for stream_id, tensor in ((1, large[:1000]), (3, large)):
                client.start(stream_id, request("big", tensor), extra=accept)
                reply = client.finish(stream_id)
                assert reply.headers[0]["grpc-encoding"] == used and reply.data[0] == 1
                assert len(reply.data) < 5000
            client.start(5, request("big", large[:1000]), extra=[("grpc-accept-encoding", "gzip")])
            assert client.finish(5).headers[0]["grpc-encoding"] == "gzip"
            reply = client.call(7, request("big", large[:1000]))
            assert "grpc-encoding" not in reply.headers[0] and reply.data[0] == 0
        with grpcclient.InferenceServerClient(server.grpc) as real:
            given = grpcclient.InferInput("INPUT0", large.shape, "UINT8")
            given.set_data_from_numpy(large)
            result = real.infer("big", [given], compression_algorithm="gzip")
            assert np.array_equal(result.as_numpy("OUTPUT0"), large)
            stub = service_pb2_grpc.GRPCInferenceServiceStub(real._channel)
            asked = [
                service_pb2.ModelInferRequest.FromString(request("big", large[: 1 << n], request_id=str(n)))
                for n in (3, 20, 4, 18, 5)
            ]
            got = [r.infer_response for r in stub.ModelStreamInfer(iter(asked))]
            assert [(r.id, len(r.raw_output_contents[0])) for r in got] == [
                (str(n), 1 << n) for n in (3, 20, 4, 18, 5)
            ]
        server.until_idle()
