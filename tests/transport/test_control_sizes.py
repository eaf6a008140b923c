"""Control verbs take a mebibyte, load calls more; what their JSON becomes is counted; what they do not understand they
refuse, and do nothing."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neptrio.limits import CONTROL_BYTES
from tests.support.http import Http1
from tests.support.repository import write_model
from tests.support.server import ServerProcess

CONFIG = """backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
"""
LOAD = "/v2/repository/models/m/load"
UNLOAD = "/v2/repository/models/m/unload"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "m", CONFIG)
    flags = (
        "--model-control-mode=explicit",
        "--load-model=m",
        "--max-load-bytes=3000000",
        "--max-held-bytes=11000000",
    )
    with ServerProcess(repository, *flags) as made:
        yield made


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Http1]:
    with Http1(server.http) as made:
        yield made


def serves(server: ServerProcess) -> bool:
    with Http1(server.http) as http:
        return http.request("GET", "/v2/models/m/ready").status == 200


@pytest.mark.parametrize("path", ["/v2/logging", "/v2/trace/setting", "/v2/repository/index", UNLOAD])
def test_a_body_beyond_the_limit_is_refused_before_it_comes(
    server: ServerProcess, http: Http1, path: str
) -> None:
    http.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {CONTROL_BYTES + 1}\r\n\r\n".encode())
    reply = http.read("POST")
    assert reply.status == 413
    assert reply.body == b'{"error":"request body exceeds the limit of 1048576 bytes for this verb."}'
    assert serves(server)


def test_a_body_in_chunks_is_refused_at_the_limit(http: Http1) -> None:
    http.send(
        b"POST /v2/logging HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n100000\r\n"
        + b" " * CONTROL_BYTES
    )
    http.send(b"\r\n1\r\n \r\n")
    assert http.read("POST").status == 413


def test_a_body_of_the_limit_and_a_larger_load_call_are_taken(http: Http1) -> None:
    assert http.request("POST", "/v2/logging", b"{}".ljust(CONTROL_BYTES)).status == 200
    config = json.dumps({"parameters": {"config": CONFIG.ljust(2 * CONTROL_BYTES)}}).encode()
    reply = http.request("POST", "/v2/repository/models/m/check", config)
    assert reply.status == 200, reply.body[:300]


def test_messages_beyond_the_limit_are_refused_at_their_length(server: ServerProcess) -> None:
    limits = {
        "inference.GRPCInferenceService/TraceSetting": 1 << 20,
        "inference.GRPCInferenceService/SystemSharedMemoryRegister": 1 << 20,
        "inference.GRPCInferenceService/RepositoryModelLoad": 3_000_000,
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo": 16 << 10,
    }
    with grpc.insecure_channel(server.grpc) as channel:
        for path, most in limits.items():
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(f"/{path}")(b"\x0a" * (most + 1))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert caught.value.details() == f"received message larger than max ({most + 1} vs. {most})"


def test_a_compressed_message_inflates_to_the_limit(server: ServerProcess) -> None:
    setting = service_pb2.TraceSettingRequest(model_name="x" * (2 << 20))
    with grpc.insecure_channel(server.grpc, compression=grpc.Compression.Gzip) as channel:
        assert len(gzip.compress(setting.SerializeToString())) < CONTROL_BYTES
        with pytest.raises(grpc.RpcError) as caught:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).TraceSetting(setting)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "inflates to more than 1048576 bytes" in caught.value.details()


def test_objects_of_large_json_are_counted(server: ServerProcess, http: Http1) -> None:
    """A body of 1 MiB becomes 12 MiB."""
    text = b'{"x":[' + b",".join([b'"xxxxxx"'] * 116_000) + b"]}"
    assert len(text) < CONTROL_BYTES
    reply = http.request("POST", "/v2/logging", text)
    assert reply.status == 503 and b"--max-held-bytes" in reply.body
    few = b'{"x":[' + b",".join([b"[]"] * 50_000) + b"]}"
    for _ in range(5):  # and given back
        assert http.request("POST", "/v2/logging", few).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"garbage",
        b'{"parameters":5}',
        b'{"parameters":null}',
        b'{"parameters":[]}',
        b'{"parameters":{"unload_dependents":"yes"}}',
        b'{"parameters":{"unload_dependents":1}}',
        b'"x"',
        b"5",
        b"[1]",
        b"true",
        b"\xff",
    ],
)
@pytest.mark.parametrize("path", [UNLOAD, LOAD])
def test_a_malformed_body_does_nothing(server: ServerProcess, http: Http1, path: str, body: bytes) -> None:
    reply = http.request("POST", path, body)
    # load knows no parameter of unload, and says so with the status of a Triton server
    assert reply.status == (500 if path == LOAD and b"unload_dep" in body else 400), reply.body
    assert b"error" in reply.body
    assert serves(server)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b"null", b'{"parameters":{"unload_dependents":true,"other":1}}']
)
def test_unload_takes_what_clients_send(server: ServerProcess, http: Http1, body: bytes) -> None:
    assert http.request("POST", UNLOAD, body).status == 200
    assert not serves(server)
    assert http.request("POST", LOAD).status == 200
