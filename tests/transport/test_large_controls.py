"""Control verbs with large bodies and long answers do not hold up the loop."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from neptrio.loop import slices
from tests.support.embedded import EmbeddedServer
from tests.support.gated_workers import WorkersGate, gate_workers
from tests.support.http import Http1
from tests.support.repository import write_model

CONFIG = """backend: "identity"
input { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } output { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] }
"""
OVERRIDE = {
    "backend": "identity",
    "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}],
}
MODELS = 40


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    for number in range(MODELS):
        write_model(tmp_path, f"m{number}", CONFIG)
    settings: dict[str, Any] = {"model_control_mode": "explicit", "load_model": ("*",)}
    with EmbeddedServer(tmp_path, **settings) as made:
        yield made


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each pause; slices are used up at once."""
    made: list[int] = []
    pause = slices.Slices.pause

    async def counted(self: slices.Slices) -> None:
        made.append(1)
        await pause(self)

    monkeypatch.setattr(slices.Slices, "pause", counted)
    monkeypatch.setattr(slices, "SLICE_NS", -1)
    return made


def test_listings_are_cut_into_slices(server: EmbeddedServer, rests: list[int]) -> None:
    names = sorted(f"m{number}" for number in range(MODELS))
    with httpclient.InferenceServerClient(server.http) as client:
        assert [row["name"] for row in client.get_model_repository_index()] == names
        assert len(rests) == MODELS
        rests.clear()
        found = client.get_inference_statistics()
        assert sorted(row["name"] for row in found["model_stats"]) == names and list(found) == ["model_stats"]
        assert len(rests) == MODELS
        rests.clear()
    with Http1(server.http) as client:
        document = json.loads(client.request("GET", "/v2/models/stats?live=true").body)
        assert len(document["model_stats"]) == MODELS and document["loop_lag"]["count"] > 0
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        rests.clear()
        index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest())
        assert [row.name for row in index.models] == names and index.models[0].state == "READY"
        statistics = stub.ModelStatistics(service_pb2.ModelStatisticsRequest())
        assert sorted(row.name for row in statistics.model_stats) == names
        assert len(rests) == 2 * MODELS


def test_workers_read_large_bodies(server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    gate: WorkersGate = gate_workers(monkeypatch)
    server.ask(gate.open.set)
    content = bytes(range(256)) * 2048
    document = json.dumps(OVERRIDE)
    with Http1(server.http) as client:
        parameters = {"config": document, "file:1/data.bin": base64.b64encode(content).decode()}
        path = "/v2/repository/models/over/load"
        reply = client.request("POST", path, json.dumps({"parameters": parameters}).encode())
        assert reply.status == 200, reply.body
        assert gate.done == 1
        broken = json.dumps({"parameters": parameters}).encode()[:-1]
        assert b"failed to parse the request JSON buffer" in client.request("POST", path, broken).body
        small = json.dumps({"parameters": {"unload_dependents": False}}).encode()
        assert client.request("POST", "/v2/repository/models/over/unload", small).status == 200
        assert gate.asked == 2, "small ones are the loop's"
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        request = service_pb2.RepositoryModelLoadRequest(model_name="over")
        request.parameters["config"].string_param = document
        request.parameters["file:1/data.bin"].bytes_param = content
        stub.RepositoryModelLoad(request)
        assert gate.asked == 3
        stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="over"))
        assert gate.asked == 3
