"""The control verbs as a real Triton server answers them, over both protocols, against a real server.

What a request that is malformed is told is in tests/observe, tests/repository and tests/client; here is what
clients of a Triton server send and what they are answered there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.wire.conftest import LOST, STOL, TOO_LOW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of trace files."""
    made: Path = tmp_path_factory.mktemp("traces")
    return made


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("verbs")
    write_model(repository, "simple", identity_config())
    write_model(repository, "text", identity_config("TYPE_STRING", "-1", 8, 1))
    (write_model(repository, "versionless", identity_config()) / "1").rmdir()
    with ServerProcess(
        repository,
        "--model-control-mode=explicit",
        "--load-model=simple",
        "--load-model=text",
        "--allow-client-shm=true",
        f"--trace-config=triton,file={folder}/start",
        f"--trace-dir={folder}",
    ) as process:
        yield process


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[Http1]:
    with Http1(server.http) as connection:
        yield connection


@pytest.fixture(scope="module")
def stub(server: ServerProcess) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def post(http: Http1, path: str, document: Any) -> tuple[int, Any]:
    """(status, the answer's document, or the text of its error)."""
    body = document if isinstance(document, bytes) else json.dumps(document).encode()
    reply = http.request("POST", path, body)
    answer = json.loads(reply.body) if reply.body else None
    return reply.status, answer["error"] if reply.status != 200 else answer


def refused(call: Any, message: Any) -> tuple[str, str]:
    """(code, details) of a call that fails."""
    with pytest.raises(grpc.RpcError) as info:
        call(message)
    return info.value.code().name, info.value.details()


# ---------------------------------------------------------------- trace settings


def test_empty_trace_values(http: Http1, stub: Any, folder: Path) -> None:
    """An empty value is refused or says nothing; only null and an empty list of gRPC clear."""
    path = "/v2/trace/setting"

    def settings(**wanted: Any) -> pb.TraceSettingRequest:
        message = pb.TraceSettingRequest()
        for key, value in wanted.items():
            message.settings[key].value.extend(value)
        return message

    start = {"trace_level": ["TENSORS"], "trace_rate": "5", "trace_count": "9", "log_frequency": "3"}
    assert post(http, path, start)[0] == 200
    for key in ("trace_rate", "trace_count", "log_frequency"):
        text = f"Unable to parse '{key}', got: "
        assert post(http, path, {key: ""}) == (400, text)
        assert refused(stub.TraceSetting, settings(**{key: [""]})) == ("INVALID_ARGUMENT", text)
        kind = f"Unable to parse '{key}': attempt to access JSON non-string as string, got: []"
        assert post(http, path, {key: []}) == (400, kind)
    status, text = post(http, path, {"trace_level": ""})
    assert (status, text[:69]) == (
        400,
        "Unable to parse 'trace_level': attempt to access JSON non-array as ar",
    )
    unnamed = "Attempting to set invalid trace setting :trace file name is not given"
    assert post(http, path, {"trace_file": ""}) == (400, unnamed)
    assert refused(stub.TraceSetting, settings(trace_file=[""])) == ("INVALID_ARGUMENT", unnamed)
    assert post(http, path, {"trace_level": []})[1]["trace_level"] == ["TENSORS"]
    assert post(http, path, {"trace_level": [""]})[1]["trace_level"] == ["TENSORS"]
    now = stub.TraceSetting(settings(trace_level=[""])).settings
    assert {key: list(now[key].value) for key in start} == {
        key: value if isinstance(value, list) else [value] for key, value in start.items()
    }

    assert post(http, path, {"trace_rate": None})[1]["trace_rate"] == "1000"
    now = stub.TraceSetting(settings(trace_level=[], trace_count=[], log_frequency=[])).settings
    assert {key: list(now[key].value) for key in start} == {
        "trace_level": ["OFF"],
        "trace_rate": ["1000"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
    }


def test_the_grpc_client_clears_with_none(server: ServerProcess, stub: Any) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.update_trace_settings(None, {"trace_rate": "7"})
        again = client.update_trace_settings(None, {"trace_rate": None}, as_json=True)
    assert again["settings"]["trace_rate"]["value"] == ["1000"]


# ---------------------------------------------------------------- log settings

KINDS = {"bool_param": True, "uint32_param": 3, "string_param": "ISO8601", "": None}


@pytest.mark.parametrize(
    ("key", "taken", "expected"),
    [
        ("log_info", "bool_param", "boolean"),
        ("log_verbose_level", "uint32_param", "int32"),
        ("log_format", "string_param", "string"),
    ],
)
def test_log_settings_of_the_wrong_kind(stub: Any, key: str, taken: str, expected: str) -> None:
    def settings(kind: str) -> pb.LogSettingsRequest:
        message = pb.LogSettingsRequest()
        message.settings[key].SetInParent()
        if kind:
            setattr(message.settings[key], kind, KINDS[kind])
        return message

    for kind in KINDS:
        if kind != taken:
            wrong = ("INVALID_ARGUMENT", f"expect {expected} for '{key}'")
            assert refused(stub.LogSettings, settings(kind)) == wrong, kind
    now = stub.LogSettings(settings(taken)).settings
    assert getattr(now[key], taken) == KINDS[taken]


# ---------------------------------------------------------------- versions in statistics


@pytest.mark.parametrize("model", ["simple", "nope", ""])
@pytest.mark.parametrize(
    ("version", "error"),
    [("abc", STOL.format("abc")), ("-1", TOO_LOW.format("-1")), ("9" * 20, STOL.format("9" * 20))],
)
def test_versions_that_statistics_cannot_have(stub: Any, model: str, version: str, error: str) -> None:
    """What is wrong with the version is told before the model is looked for."""
    asked = pb.ModelStatisticsRequest(name=model, version=version)
    assert refused(stub.ModelStatistics, asked) == ("INVALID_ARGUMENT", error)


def test_versions_that_statistics_may_have(http: Http1, stub: Any) -> None:
    for version in ("0", "9"):
        asked = pb.ModelStatisticsRequest(name="simple", version=version)
        text = "requested model version is not available for model 'simple'"
        assert refused(stub.ModelStatistics, asked) == ("INVALID_ARGUMENT", text)
    for version in ("1", "01"):
        asked = pb.ModelStatisticsRequest(name="simple", version=version)
        assert [stat.version for stat in stub.ModelStatistics(asked).model_stats] == ["1"]
        assert http.request("GET", f"/v2/models/simple/versions/{version}/stats").status == 200
    assert len(stub.ModelStatistics(pb.ModelStatisticsRequest(version="9")).model_stats) == 2


# ---------------------------------------------------------------- what is told first


@pytest.mark.parametrize("body", [b"{}", b"", b'{"key": 4}', b'{"raw_handle": 4}'])
@pytest.mark.parametrize("kind", ["system", "cuda"])
def test_a_registration_without_a_region(http: Http1, kind: str, body: bytes) -> None:
    text = f"'region name' is necessary to register {kind} shared memory region"
    assert post(http, f"/v2/{kind}sharedmemory/register", body) == (400, text)


def test_a_model_without_versions(http: Http1, stub: Any) -> None:
    """Its folder was taken, so it is known: it has nothing to serve."""
    status, text = post(http, "/v2/repository/models/versionless/load", {})
    assert status == 400 and text.startswith("load failed for model 'versionless': at least one version must")
    none = LOST + "'versionless' has no available versions"
    for path in ("", "/config"):
        reply = http.request("GET", f"/v2/models/versionless{path}")
        assert (reply.status, json.loads(reply.body)) == (404, {"error": none})
    assert refused(stub.ModelMetadata, pb.ModelMetadataRequest(name="versionless")) == ("NOT_FOUND", none)
    assert refused(stub.ModelInfer, pb.ModelInferRequest(model_name="versionless")) == ("NOT_FOUND", none)
    asked = pb.ModelMetadataRequest(name="versionless", version="1")
    assert refused(stub.ModelMetadata, asked) == (
        "NOT_FOUND",
        LOST + "'versionless' version 1 is not found",
    )
    assert post(http, "/v2/repository/models/unknown/load", {})[0] == 500
    asked = pb.ModelMetadataRequest(name="unknown")
    assert refused(stub.ModelMetadata, asked) == ("NOT_FOUND", LOST + "'unknown' is not found")


# ---------------------------------------------------------------- overrides that cannot be taken

POLL = "failed to load 'simple', failed to poll from model repository: load parameter 'config':"
TENSORS: dict[str, Any] = {
    "input": [{"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [16]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [16]}],
}
STEP = {
    "model_name": "text",
    "model_version": -1,
    "input_map": {"INPUT0": "A"},
    "output_map": {"OUTPUT0": "B"},
}
START_CONTROL = {"name": "A", "control": [{"kind": "CONTROL_SEQUENCE_START"}]}


@pytest.mark.parametrize(
    ("override", "line", "error"),
    [
        ({"max_batch_size": -1}, 3, "max_batch_size: expected 0 (no batching) or more, got -1"),
        (
            {"max_batch_size": 8, "dynamic_batching": {"preferred_batch_size": [9]}},
            6,
            "dynamic_batching.preferred_batch_size[0]: expected a batch size from 1 to max_batch_size (8), got 9",
        ),
        (
            {"dynamic_batching": {"priority_levels": 2}},
            3,
            "dynamic_batching.default_priority_level: expected a level from 1 to priority_levels (2), got 0",
        ),
        (
            {"sequence_batching": {"control_input": [START_CONTROL]}},
            8,
            "sequence_batching.control_input[0].control[0]: control 'A' must specify exactly one of",
        ),
        (
            {"ensemble_scheduling": {"step": [STEP]}},
            2,
            "backend: an ensemble has no backend of its own, got 'identity'",
        ),
        ({"name": "other"}, 3, "name: unexpected directory name 'simple' for model 'other'"),
        ({"nonsense": 1}, 3, "unknown field 'nonsense' of ModelConfig"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_overrides_that_fail_to_poll(
    http: Http1, stub: Any, override: dict[str, Any], line: int, error: str
) -> None:
    """500 / INTERNAL with the place; what serves goes on, and no version has failed."""
    config = json.dumps({"backend": "identity", **override, **TENSORS}, indent=1)
    status, text = post(http, "/v2/repository/models/simple/load", {"parameters": {"config": config}})
    assert status == 500 and text.startswith(f"{POLL}{line}: "), text
    assert error in text
    asked = pb.RepositoryModelLoadRequest(model_name="simple")
    asked.parameters["config"].string_param = config
    assert refused(stub.RepositoryModelLoad, asked) == ("INTERNAL", text)
    index = post(http, "/v2/repository/index", {})[1]
    assert [row for row in index if row["name"] == "simple"] == [
        {"name": "simple", "version": "1", "state": "READY"}
    ]


def test_an_override_that_fails_a_version(http: Http1) -> None:
    """What is wrong with a tensor is the version's failure, as on a Triton server."""
    wrong = [{**TENSORS["input"][0], "dims": [0]}]
    config = json.dumps({"backend": "identity", **TENSORS, "input": wrong})
    status, text = post(http, "/v2/repository/models/simple/load", {"parameters": {"config": config}})
    assert status == 400
    assert text.startswith(
        "load failed for model 'simple': version 1 is at UNAVAILABLE state: Invalid argument: "
    )
