"""grpcio with classes made of the public .proto files, over every method of the service: prints what is left as JSON.

    python -m tests.clients.grpcio_verbs GRPC

A program of its own, because tritonclient registers the same messages.
"""

from __future__ import annotations

import importlib
import json
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from grpc_tools import protoc

PROTO = Path(__file__).resolve().parents[2] / "proto"
A, B = list(range(16)), [1] * 16


def generated() -> tuple[Any, Any, Any]:
    """The modules of messages and of stubs, and those of the health service."""
    folder = tempfile.mkdtemp()
    files = ("grpc_service.proto", "model_config.proto", "health.proto")
    arguments = ["protoc", f"-I{PROTO}", f"--python_out={folder}", f"--grpc_python_out={folder}"]
    assert protoc.main([*arguments, *(str(PROTO / file) for file in files)]) == 0
    sys.path.insert(0, folder)
    names = ("grpc_service_pb2", "grpc_service_pb2_grpc", "health_pb2")
    first, second, third = (importlib.import_module(name) for name in names)
    return first, second, third


class Recorder:
    """Calls methods of the stub by name, and notes which were called."""

    def __init__(self, messages: Any, stub: Any) -> None:
        self.messages, self.stub = messages, stub
        self.called: set[str] = set()

    def __call__(self, method: str, /, **fields: Any) -> Any:
        self.called.add(method)
        return getattr(self.stub, method)(getattr(self.messages, f"{method}Request")(**fields), timeout=60)


def refused(code: grpc.StatusCode, call: Recorder, method: str, /, **fields: Any) -> None:
    try:
        call(method, **fields)
    except grpc.RpcError as error:
        assert error.code() is code, error
    else:
        raise AssertionError(f"{method} was not refused")


def infer_request(messages: Any, raw: bool) -> Any:
    request = messages.ModelInferRequest(model_name="simple", id="mine")
    for name, data in (("INPUT0", A), ("INPUT1", B)):
        tensor = request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        if raw:
            request.raw_input_contents.append(struct.pack("<16i", *data))
        else:
            tensor.contents.int_contents.extend(data)
    return request


def check(answer: Any) -> None:
    assert answer.id == "mine"
    sums, differences = (struct.unpack("<16i", raw) for raw in answer.raw_output_contents)
    assert list(sums) == [a + b for a, b in zip(A, B, strict=True)]
    assert list(differences) == [a - b for a, b in zip(A, B, strict=True)]


def main() -> None:
    messages, stubs, health = generated()
    with grpc.insecure_channel(sys.argv[1]) as channel:
        stub = stubs.GRPCInferenceServiceStub(channel)
        call = Recorder(messages, stub)
        assert call("ServerLive").live and call("ServerReady").ready
        assert call("ModelReady", name="simple").ready
        assert "statistics" in call("ServerMetadata").extensions
        assert call("ModelMetadata", name="simple").platform == "kernel"
        assert call("ModelConfig", name="simple").config.max_batch_size == 8
        refused(grpc.StatusCode.NOT_FOUND, call, "ModelMetadata", name="nothing")
        for raw in (False, True):
            call.called.add("ModelInfer")
            check(stub.ModelInfer(infer_request(messages, raw), timeout=60))

        def requests() -> Iterator[Any]:
            for raw in (False, True, True):
                yield infer_request(messages, raw)

        call.called.add("ModelStreamInfer")
        answers = list(stub.ModelStreamInfer(requests(), timeout=60))
        assert len(answers) == 3
        for answer in answers:
            assert not answer.error_message
            check(answer.infer_response)
        (row,) = call("ModelStatistics", name="simple").model_stats
        assert row.inference_count >= 5
        assert "simple" in {model.name for model in call("RepositoryIndex").models}
        call("RepositoryModelLoad", model_name="identity_int64")
        assert call("ModelReady", name="identity_int64").ready
        call("RepositoryModelUnload", model_name="identity_int64")
        assert not call("SystemSharedMemoryStatus").regions
        refused(
            grpc.StatusCode.INTERNAL,
            call,
            "SystemSharedMemoryRegister",
            name="r",
            key="/neptrio-none",
            byte_size=8,
        )
        call("SystemSharedMemoryUnregister", name="r")
        assert not call("CudaSharedMemoryStatus").regions
        refused(grpc.StatusCode.INVALID_ARGUMENT, call, "CudaSharedMemoryRegister", name="r", byte_size=8)
        call("CudaSharedMemoryUnregister", name="r")
        assert "trace_rate" in call("TraceSetting").settings
        assert "log_info" in call("LogSettings").settings
        check_health = channel.unary_unary("/grpc.health.v1.Health/Check")
        answer = health.HealthCheckResponse.FromString(check_health(b"", timeout=60))
        assert answer.status == health.HealthCheckResponse.SERVING
    service = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    print(json.dumps({"grpc": sorted({method.name for method in service.methods} - call.called)}))


main()
