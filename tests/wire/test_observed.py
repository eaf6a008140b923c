"""What a real Triton server was seen to answer over HTTP (docs/protocol/observed.md 1 to 3), asked of ours.

The refusals of an infer request are in tests/transport/rest (refused_json.py, refused_binary.py), binary data and
compression in its test_http_infer.py, the framing of HTTP/1.1 in its test_http1.py; here is what those do not ask,
and how models' errors come on both protocols.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.http import Http1, Reply
from tests.support.server import ServerProcess
from tests.transport.rest.refusals import ROW
from tests.wire.conftest import LOST, STOL, TOO_LOW

NOT_READY = "Model version not ready"


@pytest.fixture(scope="module")
def client(observed: ServerProcess) -> Iterator[Http1]:
    with Http1(observed.http) as connection:
        yield connection


@pytest.fixture(scope="module")
def stub(observed: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(observed.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


# ---------------------------------------------------------------- 1, 2: paths, names, versions


@pytest.mark.parametrize(
    ("path", "status", "error"),
    [
        ("gone", 404, LOST + "'gone' has no available versions"),
        ("gone/config", 404, LOST + "'gone' has no available versions"),
        ("gone/ready", 400, NOT_READY),
        ("versions/versions/1", 503, LOST + "'versions' version 1 is not at ready state"),
        ("versions/versions/1/config", 503, LOST + "'versions' version 1 is not at ready state"),
        ("versions/versions/1/ready", 400, NOT_READY),
        ("versions/versions/7", 404, LOST + "'versions' version 7 is not found, it has 2, 10"),
        ("versions/versions/7/config", 404, LOST + "'versions' version 7 is not found, it has 2, 10"),
        ("versions/versions/0", 400, TOO_LOW.format("0")),
        ("versions/versions/" + "9" * 20, 400, STOL.format("9" * 20)),
        ("Simple", 404, LOST + "'Simple' is not found, did you mean 'simple'?"),  # ours goes on
        ("si%6dple", 404, LOST + "'si%6dple' is not found"),
        ("simple/", 404, "Not Found: GET /docs lists what there is"),
        ("simple/versions/1a", 404, "Not Found: GET /docs lists what there is"),
        ("simple/versions/", 404, "Not Found: GET /docs lists what there is"),
        ("/config", 404, "Not Found: GET /docs lists what there is"),
    ],
)
def test_lookups_that_fail(client: Http1, path: str, status: int, error: str) -> None:
    reply = client.request("GET", f"/v2/models/{path}")
    assert (reply.status, json.loads(reply.body)) == (status, {"error": error})


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v2", "/v2/models/simple", "/v2/models/simple/infer"])
def test_other_methods(client: Http1, method: str, path: str) -> None:
    reply = client.request(method, path)
    assert (reply.status, reply.reason) == (405, "Not Allowed")
    takes = "POST" if path.endswith("infer") else "GET"  # ours goes on
    refused = f'{{"error":"Method Not Allowed: this path takes {takes}"}}'.encode()
    assert reply.headers["allow"] == takes
    assert reply.body == (b"" if method == "HEAD" else refused)


def test_names_that_are_verbs(client: Http1) -> None:
    """A model called "ready" has metadata; one called "stats" is hidden behind everybody's statistics."""
    assert json.loads(client.request("GET", "/v2/models/ready").body)["name"] == "ready"
    assert len(json.loads(client.request("GET", "/v2/models/stats").body)["model_stats"]) > 10


METADATA: list[tuple[str, Any]] = [
    ("versions", {"versions": ["2", "10"]}),
    ("versions/versions/2", {"versions": ["2"]}),
    ("versions/versions/02", {"versions": ["2"]}),
    ("reshaped?x=y", {"inputs": [{"name": "I", "datatype": "INT32", "shape": [-1, 1]}]}),
    ("direct", {"inputs": [{"name": "INPUT", "datatype": "INT32", "shape": [-1, -1]}]}),
    (
        "optional",
        {"inputs": [{"name": name, "datatype": "INT32", "shape": [-1, 1]} for name in ("A", "B")]},
    ),
    ("told", {"platform": "python", "inputs": [{"name": "IN", "datatype": "BYTES", "shape": [-1]}]}),
    ("ensemble", {"platform": "ensemble"}),
]


@pytest.mark.parametrize(("path", "expected"), METADATA, ids=[row[0] for row in METADATA])
def test_metadata(client: Http1, path: str, expected: dict[str, Any]) -> None:
    document = json.loads(client.request("GET", f"/v2/models/{path}").body)
    assert list(document) == ["name", "versions", "platform", "inputs", "outputs"]
    assert {key: document[key] for key in expected} == expected
    assert all(list(tensor) == ["name", "datatype", "shape"] for tensor in document["inputs"])


BEFORE = "name platform backend runtime version_policy max_batch_size input output batch_input batch_output"
AFTER = "instance_group default_model_filename cc_model_filenames metric_tags parameters model_warmup"
CONFIGS: list[tuple[str, str, str, Any]] = [
    ("simple", "optimization", "", {"version_policy": {"latest": {"num_versions": 1}}, "platform": ""}),
    ("told", "optimization", "", {"default_model_filename": "model.py", "max_batch_size": 0}),
    ("dynamic", "optimization dynamic_batching", "", {}),
    ("oldest", "optimization sequence_batching", "", {}),
    ("decoupled", "optimization", "model_transaction_policy", {"model_transaction_policy": {"decoupled": True}}),
    (
        "ensemble",
        "ensemble_scheduling",
        "model_transaction_policy",
        {"instance_group": [], "model_transaction_policy": {"decoupled": False}, "platform": "ensemble"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "last", "expected"), CONFIGS, ids=[row[0] for row in CONFIGS])
def test_config(client: Http1, name: str, kind: str, last: str, expected: dict[str, Any]) -> None:
    document = json.loads(client.request("GET", f"/v2/models/{name}/config").body)
    assert list(document) == f"{BEFORE} {kind} {AFTER} {last}".split()
    assert {key: document[key] for key in expected} == expected
    if "optimization" in document:
        assert document["optimization"] == {
            "priority": "PRIORITY_DEFAULT",
            "input_pinned_memory": {"enable": True},
            "output_pinned_memory": {"enable": True},
            "gather_kernel_buffer_threshold": 0,
            "eager_batching": False,
        }
        (group,) = document["instance_group"]
        assert (group["name"], group["count"]) == (name, 1)
    if name == "dynamic":
        assert document["dynamic_batching"]["preferred_batch_size"] == [8]
    if name == "oldest":
        assert document["sequence_batching"]["oldest"]["preferred_batch_size"] == [4]


# ---------------------------------------------------------------- 3: what models answer


CODES = {  # of a model's error: the status of HTTP and the code of gRPC
    "UNKNOWN": (400, "UNKNOWN"),
    "INTERNAL": (500, "INTERNAL"),
    "NOT_FOUND": (404, "NOT_FOUND"),
    "INVALID_ARG": (400, "INVALID_ARGUMENT"),
    "UNAVAILABLE": (503, "UNAVAILABLE"),
    "UNSUPPORTED": (501, "UNIMPLEMENTED"),
    "ALREADY_EXISTS": (400, "ALREADY_EXISTS"),
    "CANCELLED": (400, "CANCELLED"),
}


def told(client: Http1, what: str, **more: Any) -> Reply:
    tensor = {"name": "IN", "shape": [1], "datatype": "BYTES", "data": [what]}
    body = json.dumps({"inputs": [tensor], **more}).encode()
    return client.request("POST", "/v2/models/told/infer", body)


def told_message(what: str) -> Any:
    message = pb.ModelInferRequest(model_name="told")
    message.inputs.add(name="IN", datatype="BYTES", shape=[1]).contents.bytes_contents.append(what.encode())
    return message


@pytest.mark.parametrize("code", CODES)
def test_errors_of_models(client: Http1, stub: Any, code: str) -> None:
    http, name = CODES[code]
    reply = told(client, code)
    assert (reply.status, reply.body) == (http, b'{"error":"said"}')
    with pytest.raises(grpc.RpcError) as info:
        stub.ModelInfer(told_message(code))
    assert (info.value.code().name, info.value.details()) == (name, "said")


def test_failures_of_models(client: Http1, stub: Any) -> None:
    assert (told(client, "error").status, told(client, "error").body) == (500, b'{"error":"said: verbatim"}')
    reply = told(client, "raise")
    error = json.loads(reply.body)["error"]
    said, empty, at, *frames = error.removesuffix("\n").split("\n")
    assert said == (
        "Failed to process the request(s) for model 'told_0', message: RuntimeError: unhandled python exception"
    )
    assert (reply.status, empty, at) == (500, "", "At:")
    assert frames[0].endswith("told/1/model.py(11): answer")  # the innermost comes first
    assert frames[-1].endswith("told/1/model.py(7): execute")
    with pytest.raises(grpc.RpcError) as info:
        stub.ModelInfer(told_message("raise"))
    assert info.value.code() == grpc.StatusCode.INTERNAL and info.value.details() == error


HEAD = '"model_name":"told","model_version":"1","outputs":'
OUT = '[{"name":"OUT","datatype":"BYTES","shape":[1],"data":["%s"]}]}'
PARAMETERS: dict[str, Any] = {"a": 1, "b": True, "c": "x", "d": 1.5, "e": -3}
CONSUMED = {"priority": 1, "timeout": 5, "binary_data_output": False, "sequence_id": 4, "headers": "h"}
ANSWERS: list[tuple[str, str, dict[str, Any], str]] = [
    ("no-outputs", "nothing", {}, f"{{{HEAD}[]}}"),
    (
        "wrong-type-and-shape",
        "wrong",
        {},
        f'{{{HEAD}[{{"name":"OUT","datatype":"FP32","shape":[2,1],"data":[0.0,0.0]}}]}}',
    ),
    ("no-sequence", "flags", {}, f"{{{HEAD}{OUT % '[0, 0]'}"),
    (
        "sequence",
        "flags",
        {"parameters": {"sequence_id": 4, "sequence_start": True, "sequence_end": True}},
        f"{{{HEAD}{OUT % '[3, 4]'}",
    ),
    ("text-id", "flags", {"parameters": {"sequence_id": "s"}}, f"{{{HEAD}{OUT % '''[0, 's']'''}"),
    (
        "parameters",
        "parameters",
        {"parameters": {**PARAMETERS, **CONSUMED}},
        f"{{{HEAD}{OUT % json.dumps(PARAMETERS, separators=(',', ':')).replace(chr(34), chr(92) + chr(34))}",
    ),
    (
        "id-and-unknown-parameters",
        "flags",
        {"id": "a/b", "outputs": [{"name": "OUT", "parameters": {"foo": {}}}]},
        f'{{"id":"a/b",{HEAD}{OUT % "[0, 0]"}',
    ),
    (
        "output-parameters-null",
        "flags",
        {"outputs": [{"name": "OUT", "parameters": None}]},
        f"{{{HEAD}{OUT % '[0, 0]'}",
    ),
]


@pytest.mark.parametrize(("what", "more", "answer"), [a[1:] for a in ANSWERS], ids=[a[0] for a in ANSWERS])
def test_answers_of_models(client: Http1, what: str, more: dict[str, Any], answer: str) -> None:
    reply = told(client, what, **more)
    assert (reply.status, reply.body.decode()) == (200, answer)


def test_an_ensemble_answers_as_it_is_configured(client: Http1) -> None:
    """In the configured order, without sequence parameters that nobody sent."""
    inputs = [{"name": name, "shape": [1, 16], "datatype": "INT32", "data": ROW} for name in "BA"]
    reply = client.request("POST", "/v2/models/ensemble/infer", json.dumps({"inputs": inputs}).encode())
    document = json.loads(reply.body)
    assert list(document) == ["model_name", "model_version", "outputs"]
    assert [output["name"] for output in document["outputs"]] == ["Z", "Y"]


def test_only_the_optional_input(client: Http1) -> None:
    tensor = {"name": "B", "shape": [1, 1], "datatype": "INT32", "data": [1]}
    reply = client.request("POST", "/v2/models/optional/infer", json.dumps({"inputs": [tensor]}).encode())
    assert (reply.status, json.loads(reply.body)["outputs"]) == (200, [])
