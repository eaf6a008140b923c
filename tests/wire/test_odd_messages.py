"""Requests that protobuf takes and the generated messages do not: what is left out, and what has another wire type.

For protobuf an entry of a map without its value has the default value, and a field of another wire type than
it is declared with is unknown. Neither is the server's failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[grpc.Channel]:
    repository: Path = tmp_path_factory.mktemp("odd-messages")
    write_model(repository, "m", identity_config())
    # the end looks for tracebacks
    with (
        ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as server,
        grpc.insecure_channel(server.grpc) as made,
    ):
        yield made


def outcome(channel: grpc.Channel, method: str, raw: bytes) -> tuple[str, str]:
    try:
        channel.unary_unary(SERVICE + method)(raw, timeout=60)
    except grpc.RpcError as error:
        return error.code().name, error.details()  # type: ignore[attr-defined]
    return "OK", ""


def entry(field: int, content: bytes) -> bytes:
    """A field of wire type 2."""
    return bytes([field << 3 | 2, len(content)]) + content


KEY = entry(1, b"trace_rate")
NUMBER_AS_NAME = b"\x08\x05"  # field 1 as a varint
FIXED_AS_NAME = b"\x0d\x01\x00\x00\x00"  # field 1 as four bytes
UNKNOWN = "Request for unknown model: '' is not found"


@pytest.mark.parametrize(
    ("method", "raw", "code"),
    [
        ("TraceSetting", entry(1, KEY), "OK"),  # no value: nothing is set
        ("TraceSetting", entry(1, entry(2, entry(1, b"1"))), "OK"),  # no key
        ("TraceSetting", entry(1, KEY + b"\x10\x01"), "OK"),  # a number for the value
        ("TraceSetting", NUMBER_AS_NAME, "OK"),
        ("LogSettings", entry(1, entry(1, b"log_info")), "INVALID_ARGUMENT"),
        ("LogSettings", entry(1, entry(1, b"log_info") + entry(2, entry(1, b"x"))), "INVALID_ARGUMENT"),
        ("LogSettings", entry(1, entry(1, b"other")), "OK"),
        ("LogSettings", FIXED_AS_NAME, "OK"),
        ("RepositoryModelLoad", entry(2, b"m") + entry(3, entry(1, b"config")), "INVALID_ARGUMENT"),
        ("RepositoryModelLoad", entry(2, b"m") + entry(3, entry(1, b"file:1/x")), "INVALID_ARGUMENT"),
        ("RepositoryModelLoad", entry(2, b"m") + entry(3, b"\x08\x01"), "OK"),  # a number for the key
        ("RepositoryModelUnload", entry(2, b"n") + entry(3, entry(1, b"unload_dependents")), "INVALID_ARGUMENT"),
        ("RepositoryModelLoad", b"\x10\x05", "INVALID_ARGUMENT"),  # no model's name
        ("ModelMetadata", NUMBER_AS_NAME, "NOT_FOUND"),
        ("ModelMetadata", FIXED_AS_NAME, "NOT_FOUND"),
        ("ModelConfig", NUMBER_AS_NAME, "NOT_FOUND"),
        ("ModelStatistics", NUMBER_AS_NAME, "OK"),
        ("ModelReady", NUMBER_AS_NAME, "OK"),
        ("RepositoryIndex", NUMBER_AS_NAME, "OK"),
        ("SystemSharedMemoryStatus", NUMBER_AS_NAME, "OK"),
        ("CudaSharedMemoryStatus", NUMBER_AS_NAME, "OK"),
        ("ModelMetadata", b"\x0a\x01\xff", "INVALID_ARGUMENT"),  # not UTF-8
        ("ModelMetadata", b"\x0a\x05m", "INVALID_ARGUMENT"),  # cut off
    ],
)  # fmt: skip
def test_what_protobuf_takes(channel: grpc.Channel, method: str, raw: bytes, code: str) -> None:
    got, text = outcome(channel, method, raw)
    assert got == code, text
    assert not any(word in text for word in ("AttributeError", "KeyError", "TypeError")), text


REGION = "shared_memory_region"
REQUESTS = {
    "classes in a region": (
        lambda made: made.outputs.add(name="OUTPUT0", parameters={
            REGION: pb.InferParameter(string_param="r"), "classification": pb.InferParameter(int64_param=2)}),
        "INVALID_ARGUMENT",
        "Output can't set both 'shared_memory_region' and 'classification'",  # as over HTTP
    ),
    "data and a region": (
        lambda made: made.inputs[0].parameters[REGION].MergeFrom(pb.InferParameter(string_param="r")),
        "INVALID_ARGUMENT",
        "contents field must not be specified when using shared memory for 'INPUT0' for model 'm'",
    ),
    "an id of 128 characters": (
        lambda made: made.parameters["sequence_id"].MergeFrom(pb.InferParameter(string_param=128 * "\u20ac")),
        "OK",
        "",
    ),
    "an id of 129 characters": (
        lambda made: made.parameters["sequence_id"].MergeFrom(pb.InferParameter(string_param=129 * "\u20ac")),
        "UNIMPLEMENTED",
        "string correlation ID cannot be longer than 128 characters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
def test_what_a_request_must_not_say(channel: grpc.Channel, name: str) -> None:
    change, code, text = REQUESTS[name]
    made = pb.ModelInferRequest(model_name="m")
    for i in range(2):
        made.inputs.add(name=f"INPUT{i}", datatype="INT32", shape=[1, 16]).contents.int_contents.extend(
            range(16)
        )
    change(made)
    assert outcome(channel, "ModelInfer", made.SerializeToString()) == (code, text)
