"""Whatever a client writes is answered by a server with front ends as by one without, and ends none of them.

What a front end passes to the engine is refused there as no correct front end's (a Violation), and it is killed with all
its connections. So nothing that a client chose may be such: each value here is sent to both servers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from tests.frontend.test_front_ends import pids
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

SERVICE = "/inference.GRPCInferenceService/"
DIMENSIONS = [
    [-1], [1, -4], [-(2**63)], [2**62], [2**62 + 1], [2**63 - 1], [2**63], [2**64], [10**30], [0], [0, -1],
    [1] * 64, [1] * 65, [1] * 1000, [True], [1.5], [1e30], [None], ["1"], [[1]], None, 1, {},
]  # fmt: skip
NUMBERS = [
    -1,
    0,
    1,
    2**31,
    2**32,
    2**62,
    2**62 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    2**64,
    -(2**63),
    -(2**63) - 1,
]
VALUES = [
    *NUMBERS,
    1.5,
    1e300,
    True,
    None,
    "",
    "x",
    "\ud800",
    "é",
    [],
    [1],
    {},
    {"a": {"b": 1}},
    float("nan"),
]
NAMES = ["", "\ud800", "é", "x" * 70, "x" * 70_000, "a/b", "\x00"]


class Servers(NamedTuple):
    """The same models, without and with front ends."""

    alone: ServerProcess
    fronts: ServerProcess


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    repository = tmp_path_factory.mktemp("values")
    write_model(repository, "echo", identity_config(dims="-1", pairs=1))
    write_model(repository, "text", identity_config("TYPE_STRING", dims="-1", pairs=1))
    write_model(
        repository, "many", identity_config(dims="-1", pairs=1, extra="model_transaction_policy { decoupled: true }")
    )  # fmt: skip
    with (
        ServerProcess(repository, "--frontends=0") as alone,
        ServerProcess(repository, "--frontends=2") as fronts,
    ):
        before = sorted(pids(fronts))
        yield Servers(alone, fronts)
        assert sorted(pids(fronts)) == before
        assert "is killed" not in fronts.log()


def infer(**changes: Any) -> dict[str, Any]:
    """A right request, whose input's members are those of `changes` where they have its names."""
    given: dict[str, Any] = {"name": "INPUT0", "datatype": "INT32", "shape": [1, 1], "data": [7]}
    given.update({name: changes.pop(name) for name in list(changes) if name in (*given, "input_parameters")})
    if "input_parameters" in given:
        given["parameters"] = given.pop("input_parameters")
    if given["data"] is None:
        del given["data"]
    return {"inputs": [given], **changes}


def requests() -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """(path, body, headers) of HTTP requests."""
    documents = [infer(shape=shape) for shape in DIMENSIONS]
    documents += [infer(shape=shape, data=[]) for shape in DIMENSIONS]
    documents += [infer(shape=shape, datatype="BYTES", data=["a"]) for shape in DIMENSIONS[:16]]
    for name in ("sequence_id", "priority", "timeout", "sequence_start", "own", "\ud800"):
        documents += [infer(parameters={name: value}) for value in VALUES]
    documents += [infer(id=value) for value in VALUES]
    documents += [infer(name=name) for name in NAMES]
    documents += [infer(datatype=name) for name in [*NAMES, "BYTES", "FP64"]]
    documents += [infer(outputs=[{"name": name}]) for name in NAMES]
    for name in ("classification", "shared_memory_offset", "shared_memory_byte_size", "binary_data"):
        for value in VALUES:
            region = {"shared_memory_region": "r", "shared_memory_byte_size": 4} if "shared" in name else {}
            documents.append(infer(outputs=[{"name": "OUTPUT0", "parameters": {**region, name: value}}]))
    for name in (
        "shared_memory_region",
        "shared_memory_offset",
        "shared_memory_byte_size",
        "binary_data_size",
    ):
        for value in VALUES:
            region = (
                {"shared_memory_region": "r", "shared_memory_byte_size": 4} if "binary" not in name else {}
            )
            documents.append(infer(data=None, input_parameters={**region, name: value}))
    documents += [infer(data=None, shape=shape, input_parameters={"shared_memory_region": "r", "shared_memory_byte_size": 4})
                  for shape in DIMENSIONS]  # fmt: skip
    for document in documents:
        body = json.dumps(document).encode()
        for model in ("echo", "text") if "shape" in document["inputs"][0] else ("echo",):
            yield f"/v2/models/{model}/infer", body, {}
    right = json.dumps(infer()).encode()
    for value in ("-1", "0", "5", str(2**64), "x", "", str(len(right)), str(len(right) + 1)):
        yield "/v2/models/echo/infer", right, {"Inference-Header-Content-Length": value}
    for value in ("1", "-1", "\xe9", "x" * 5000, "00-" + "a" * 32 + "-" + "b" * 16 + "-01"):
        for name in ("triton-request-id", "traceparent", "x-request-id", "x-forwarded-for", "neptrio-trace"):
            yield "/v2/models/echo/infer", right, {name: value}
    for path in (
        "/v2/models/many/infer",
        "/v2/models/%ff/infer",
        "/v2/models/%00/infer",
        "/v2/models//infer",
    ):
        yield path, right, {}
    for path in (
        "/v2/models/many/generate",
        "/v2/models/echo/generate_stream",
        "/v2/models/%ff/config",
        "/v2/\xe9",
    ):
        yield path, json.dumps({"INPUT0": 7, "parameters": {"a": "\ud800"}}).encode(), {}
    for path in ("/v2/logging", "/v2/trace/setting", "/v2/models/echo/trace/setting", "/v2/repository/index"):
        for body in (
            b"{",
            b"[]",
            b'{"\\ud800":"\\ud800"}',
            b"\xff",
            b'{"trace_rate":"-1"}',
            b'{"log_verbose_level":-1}',
        ):
            yield path, body, {}


def test_over_http(servers: Servers) -> None:
    with ExitStack() as stack:
        connections = [stack.enter_context(Http1(server.http)) for server in servers]
        sent = 0
        for path, body, headers in requests():
            found = []
            for place, server in enumerate(servers):
                reply = connections[place].request("POST", path, body, headers)
                found.append((reply.status, reply.body, reply.headers.get("content-type")))
                if reply.headers.get("connection") == "close":
                    connections[place] = stack.enter_context(Http1(server.http))
            assert found[0] == found[1], (path, body[:300], headers)
            sent += 1
    assert sent > 300


def messages() -> Iterator[Any]:
    """ModelInferRequest messages."""

    def right(model: str = "echo") -> Any:
        made = service_pb2.ModelInferRequest(model_name=model, id="1")
        made.inputs.add(name="INPUT0", datatype="INT32", shape=[1, 1])
        made.raw_input_contents.append(np.int32(7).tobytes())
        return made

    for model in ("echo", "text", "many"):
        for shape in DIMENSIONS:
            if isinstance(shape, list) and all(type(d) is int and -(2**63) <= d < 2**63 for d in shape):
                made = right(model)
                made.inputs[0].shape[:] = shape
                yield made
                made = right(model)
                made.inputs[0].shape[:] = shape
                made.raw_input_contents[:] = [b""]
                yield made
                made = right(model)
                made.inputs[0].shape[:] = shape
                made.raw_input_contents[:] = []
                made.inputs[0].contents.int_contents[:] = [1]
                yield made
                made = right(model)
                made.inputs[0].shape[:] = shape
                made.raw_input_contents[:] = []
                made.inputs[0].parameters["shared_memory_region"].string_param = "r"
                made.inputs[0].parameters["shared_memory_byte_size"].int64_param = 4
                yield made
    for name in (
        "sequence_id",
        "priority",
        "timeout",
        "sequence_start",
        "own",
        "triton_enable_empty_final_response",
    ):
        for value in VALUES:
            made = right()
            try:
                if isinstance(value, bool):
                    made.parameters[name].bool_param = value
                elif isinstance(value, int):
                    if value >= 2**63:
                        made.parameters[name].uint64_param = value
                    else:
                        made.parameters[name].int64_param = value
                elif isinstance(value, float):
                    made.parameters[name].double_param = value
                elif isinstance(value, str):
                    made.parameters[name].string_param = value
            except (ValueError, UnicodeEncodeError):
                continue  # protobuf itself cannot say it
            yield made
    for name in ("shared_memory_offset", "shared_memory_byte_size", "classification"):
        for value in NUMBERS:
            if not -(2**63) <= value < 2**63:
                continue
            for place in ("inputs", "outputs"):
                made = right()
                if place == "outputs":
                    made.outputs.add(name="OUTPUT0")
                else:
                    made.raw_input_contents[:] = []
                parameters = getattr(made, place)[0].parameters
                if name != "classification":
                    parameters["shared_memory_region"].string_param = "r"
                    parameters["shared_memory_byte_size"].int64_param = 4
                parameters[name].int64_param = value
                yield made
    for text in ("", "é", "x" * 70, "x" * 70_000, "\x00"):
        for field in ("model_name", "model_version", "id"):
            made = right()
            setattr(made, field, text)
            yield made
        made = right()
        made.inputs[0].name = text
        yield made
        made = right()
        made.inputs[0].datatype = text
        yield made
        made = right()
        made.outputs.add(name=text)
        yield made


def called(call: Any, metadata: Any = ()) -> tuple[str, Any]:
    try:
        return "OK", call(metadata)
    except grpc.RpcError as error:
        return error.code().name, error.details()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_over_grpc(servers: Servers) -> None:
    with (
        grpc.insecure_channel(servers.alone.grpc) as alone,
        grpc.insecure_channel(servers.fronts.grpc) as fronts,
    ):
        for made in messages():
            raw = made.SerializeToString()
            for method in ("ModelInfer", "ModelStreamInfer"):
                found = []
                for channel in (alone, fronts):
                    if method == "ModelInfer":
                        unary = channel.unary_unary(SERVICE + method)
                        found.append(called(lambda _, call=unary, raw=raw: call(raw, timeout=60)))
                    else:
                        stream = channel.stream_stream(SERVICE + method)
                        found.append(
                            called(lambda _, call=stream, raw=raw: list(call(iter([raw]), timeout=60)))
                        )
                assert found[0] == found[1], (method, str(made)[:500])


# what grpc's own client refuses to send is sent as frames in tests/transport/http2
METADATA = [
    ("x-bin", b"\xff\x00"), ("x", "\u00e9"), ("triton-request-id", "x" * 3000), ("traceparent", "00-x"),
    ("neptrio-trace", "1"), ("x", ""), ("te", "trailers"), ("grpc-accept-encoding", "x"),
]  # fmt: skip


@pytest.mark.parametrize("method", ["ModelInfer", "ServerLive", "ModelConfig", "TraceSetting"])
def test_metadata(servers: Servers, method: str) -> None:
    raw = next(messages()).SerializeToString() if method == "ModelInfer" else b""
    with (
        grpc.insecure_channel(servers.alone.grpc) as alone,
        grpc.insecure_channel(servers.fronts.grpc) as fronts,
    ):
        for key, value in METADATA:
            found = []
            for channel in (alone, fronts):
                call = channel.unary_unary(SERVICE + method)
                try:
                    found.append(
                        called(lambda m, call=call: call(raw, timeout=60, metadata=m), [(key, value)])
                    )
                except (ValueError, TypeError, UnicodeEncodeError) as error:
                    found.append(("refused by the client", type(error).__name__))
            assert found[0] == found[1], (key, value)
