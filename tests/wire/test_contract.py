"""proto/ says on the wire what tritonclient's and grpcio's own descriptors say.

Every message, field number, type, label, oneof, map entry, enum value and service method that
the clients know must be in our files, the same; what only we have (a newer release's fields, the
server's own messages) is listed here, so that nothing is added by accident.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from neptrio.codec.descriptors import file_set

# (what, name) that tritonclient's descriptors lack; empty: our files are theirs, member for member
ONLY_OURS: set[str] = set()


def files(*roots: Any) -> list[Any]:
    found = []
    for root in roots:
        proto = descriptor_pb2.FileDescriptorProto()
        root.DESCRIPTOR.CopyToProto(proto)
        found.append(proto)
    return found


def field_facts(field: Any, message: Any) -> tuple[Any, ...]:
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return (field.number, field.type, field.label, field.type_name, oneof, field.proto3_optional)


def message_facts(prefix: str, message: Any) -> Iterator[tuple[str, Any]]:
    name = f"{prefix}.{message.name}"
    yield f"message {name}", message.options.map_entry
    for field in message.field:
        yield f"field {name}.{field.name}", field_facts(field, message)
    for enum in message.enum_type:
        yield from enum_facts(name, enum)
    for nested in message.nested_type:
        yield from message_facts(name, nested)


def enum_facts(prefix: str, enum: Any) -> Iterator[tuple[str, Any]]:
    for value in enum.value:
        yield f"enum {prefix}.{enum.name}.{value.name}", value.number


def facts(file: Any) -> Iterator[tuple[str, Any]]:
    for message in file.message_type:
        yield from message_facts(file.package, message)
    for enum in file.enum_type:
        yield from enum_facts(file.package, enum)
    for service in file.service:
        for method in service.method:
            yield (
                f"method {file.package}.{service.name}/{method.name}",
                (method.input_type, method.output_type, method.client_streaming, method.server_streaming),
            )


def ours(package: str) -> dict[str, Any]:
    return dict(fact for file in file_set().file if file.package == package for fact in facts(file))


def health() -> Any:
    """grpc.health.v1 as published (there is no Python package of it among the test dependencies)."""
    text = descriptor_pb2.FileDescriptorProto(name="h", package="grpc.health.v1", syntax="proto3")
    kind = descriptor_pb2.FieldDescriptorProto
    request = text.message_type.add(name="HealthCheckRequest")
    request.field.add(name="service", number=1, type=kind.TYPE_STRING, label=kind.LABEL_OPTIONAL)
    response = text.message_type.add(name="HealthCheckResponse")
    status = response.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        status.value.add(name=name, number=number)
    response.field.add(
        name="status",
        number=1,
        type=kind.TYPE_ENUM,
        label=kind.LABEL_OPTIONAL,
        type_name=".grpc.health.v1.HealthCheckResponse.ServingStatus",
    )
    service = text.service.add(name="Health")
    for name, streaming in (("Check", False), ("Watch", True)):
        service.method.add(
            name=name,
            input_type=".grpc.health.v1.HealthCheckRequest",
            output_type=".grpc.health.v1.HealthCheckResponse",
            server_streaming=streaming,
        )
    return text


THEIRS = [
    ("inference", files(service_pb2, model_config_pb2), 400),
    ("grpc.health.v1", [health()], 8),
    ("grpc.reflection.v1alpha", files(reflection_pb2), 20),
]


@pytest.mark.parametrize(("package", "published", "at_least"), THEIRS, ids=[t[0] for t in THEIRS])
def test_same_as_published(package: str, published: list[Any], at_least: int) -> None:
    theirs = dict(fact for file in published for fact in facts(file))
    mine = ours(package)
    assert len(theirs) >= at_least, "the published descriptors were not found"
    assert {k: v for k, v in theirs.items() if k not in mine} == {}, "missing in proto/"
    assert {k: (mine[k], v) for k, v in theirs.items() if mine[k] != v} == {}, (
        "different in proto/ (ours, theirs)"
    )
    assert set(mine) - set(theirs) - ONLY_OURS == set(), "only in proto/"


def test_reflection_v1_is_v1alpha_under_another_name() -> None:
    def renamed(facts: dict[str, Any]) -> dict[str, str]:
        return {k.replace("v1alpha", "v1"): repr(v).replace("v1alpha", "v1") for k, v in facts.items()}

    assert renamed(ours("grpc.reflection.v1")) == renamed(ours("grpc.reflection.v1alpha"))
