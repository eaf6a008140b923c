"""Reflection over gRPC, as grpcurl uses it."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from neptrio._proto.grpc.reflection import v1, v1alpha
from neptrio.transport.grpc import reflection
from tests.support.embedded import EmbeddedServer


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
def test_reflection(server: EmbeddedServer, version: str) -> None:
    """As grpcurl does it: list the services, take the files of each, find a message in them."""
    ask = reflection_pb2.ServerReflectionRequest
    questions = [
        ask(list_services="*"),
        ask(file_containing_symbol="inference.GRPCInferenceService"),
        ask(file_by_filename="model_config.proto"),
        ask(file_containing_symbol="no.such.Symbol"),
        ask(all_extension_numbers_of_type="inference.ModelConfig"),
        ask(
            file_containing_extension=reflection_pb2.ExtensionRequest(containing_type="x", extension_number=1)
        ),
        ask(),
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        call = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            request_serializer=ask.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        got = list(call(iter(questions)))
    assert [r.original_request for r in got] == questions
    services = {s.name for s in got[0].list_services_response.service}
    assert services == {
        "inference.GRPCInferenceService",
        "grpc.health.v1.Health",
        "grpc.reflection.v1.ServerReflection",
        "grpc.reflection.v1alpha.ServerReflection",
    }
    files = [
        descriptor_pb2.FileDescriptorProto.FromString(f)
        for f in got[1].file_descriptor_response.file_descriptor_proto
    ]
    assert [f.name for f in files] == ["grpc_service.proto", "model_config.proto"]
    assert {m.name for m in files[0].service[0].method} >= {"ModelInfer", "ModelStreamInfer", "ServerLive"}
    assert "ModelConfig" in {
        m.name
        for f in got[2].file_descriptor_response.file_descriptor_proto
        for m in descriptor_pb2.FileDescriptorProto.FromString(f).message_type
    }
    assert got[3].error_response.error_code == 5
    assert got[4].all_extension_numbers_response.base_type_name == "inference.ModelConfig"
    assert got[5].error_response.error_code == 5
    assert got[6].error_response.error_code == 3


def test_the_same_question_is_answered_from_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors are copied and encoded once, however often they are asked for."""
    made: list[str] = []
    copy = reflection._with_dependencies

    def counted(file: Any, seen: set[str]) -> Any:
        made.append(file.name)
        return copy(file, seen)

    monkeypatch.setattr(reflection, "_with_dependencies", counted)
    reflection._descriptors.cache_clear()
    for host in map(str, range(300)):  # more than there are answers kept
        for api in (v1, v1alpha):
            asked = api.ServerReflectionRequest(host=host, file_by_filename="health.proto")
            got = api.ServerReflectionResponse.parse(bytes(reflection.answered(api, asked)))
            assert (
                got.original_request.host == host
                and len(got.file_descriptor_response.file_descriptor_proto) == 1
            )
    assert made == ["health.proto"]
