"""The model repository extension, sentence by sentence, over both protocols."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2

from tests.client.test_ensembles import ENSEMBLE
from tests.support import onnx_models
from tests.support.control import CONFIG, infer, post, refused, rows, settled
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

ONNX = {"backend": "onnxruntime"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository: Path = tmp_path_factory.mktemp("repository")
    for name in ("m", "first", "second"):
        write_model(repository, name, identity_config())
    write_model(repository, "ens", ENSEMBLE)
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as process:
        yield process


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        yield client


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client._client_stub


def told(call: Any, request: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as info:
        call(request)
    return info.value.code(), info.value.details()


def test_the_extension_is_reported(http: Any, stub: Any) -> None:
    for listed in (
        http.get_server_metadata()["extensions"],
        stub.ServerMetadata(service_pb2.ServerMetadataRequest()).extensions,
    ):
        assert {"model_repository", "model_repository(unload_dependents)"} <= set(listed)


def test_index_tells_every_model_that_could_be_loaded(server: ServerProcess, http: Any, stub: Any) -> None:
    http.load_model("first")
    http.unload_model("first")
    settled(http, "first")
    expected = [
        {"name": "ens"},
        {"name": "first", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"},
        {"name": "m", "version": "1", "state": "READY"},
        {"name": "second"},
    ]
    for body in (b"", {}, {"ready": False}, {"unknown": 1}, b"[]", b"null"):
        assert json.loads(post(server, "index", body).body) == expected
    assert json.loads(post(server, "index", {"ready": True}).body) == [expected[2]]
    empty = {"name": "", "version": "", "state": "", "reason": ""}
    models = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest()).models
    assert [{key: getattr(m, key) for key in empty} for m in models] == [{**empty, **e} for e in expected]
    (only,) = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(ready=True)).models
    assert (only.name, only.state) == ("m", "READY")
    assert refused(post(server, "index", b"{"), 400)


def test_load_with_a_configuration_and_a_file(server: ServerProcess, http: Any, stub: Any) -> None:
    """The seed's example: the model is served from the call's file under the call's version."""
    content = onnx_models.add_sub()
    body = {
        "parameters": {"config": json.dumps(ONNX), "file:2/model.onnx": base64.b64encode(content).decode()}
    }
    assert post(server, "models/mymodel/load", body).status == 200
    assert infer(http, "mymodel", ("A", "B")).as_numpy("SUM").tolist() == [[2] * 16]
    assert http.get_model_metadata("mymodel")["versions"] == ["2"]
    request = service_pb2.RepositoryModelLoadRequest(model_name="mymodel")
    request.parameters["config"].string_param = json.dumps(ONNX)
    request.parameters["file:3/model.onnx"].bytes_param = content
    stub.RepositoryModelLoad(request)
    assert http.get_model_metadata("mymodel")["versions"] == ["3"]
    http.unload_model("mymodel")
    # the words of the seed's example are not those of ModelConfig: "config" must parse as one
    wrong = {"name": "mymodel", "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1]}]}
    text = refused(post(server, "models/mymodel/load", {"parameters": {"config": json.dumps(wrong)}}), 500)
    assert "failed to load 'mymodel', failed to poll from model repository" in text
    only_file = {"parameters": {"file:2/model.onnx": base64.b64encode(content).decode()}}
    assert "without the parameter 'config'" in refused(post(server, "models/mymodel/load", only_file), 500)


def test_a_configuration_reloads(server: ServerProcess, http: Any) -> None:
    infer(http)
    assert http.get_inference_statistics("m")["model_stats"][0]["inference_count"] > 0
    http.load_model("m", config=json.dumps({**CONFIG, "max_batch_size": 4}))
    assert http.get_model_config("m")["max_batch_size"] == 4
    assert http.get_inference_statistics("m")["model_stats"][0]["inference_count"] == 0
    assert post(server, "models/m/load").status == 200, "the body may be empty"
    assert post(server, "models/m/load", {"parameters": {}}).status == 200


def test_parameters_over_grpc_have_types(stub: Any) -> None:
    for key, field, value, text in (
        (
            "config",
            "bytes_param",
            b"{}",
            "invalid value type for load parameter 'config', expected string_param.",
        ),
        (
            "file:1/x",
            "string_param",
            "x",
            "invalid value type for load parameter 'file:1/x', expected bytes_param.",
        ),
        ("foo", "string_param", "x", "unrecognized load parameter 'foo'."),
    ):
        request = service_pb2.RepositoryModelLoadRequest(model_name="m")
        setattr(request.parameters[key], field, value)
        assert told(stub.RepositoryModelLoad, request) == (grpc.StatusCode.INVALID_ARGUMENT, text)
    request = service_pb2.RepositoryModelUnloadRequest(model_name="m")
    request.parameters["unload_dependents"].string_param = "true"
    assert told(stub.RepositoryModelUnload, request) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "invalid value type for 'unload_dependents' parameter, expected bool_param.",
    )


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_unload_with_and_without_dependents(server: ServerProcess, http: Any, stub: Any, kind: str) -> None:
    def unload(name: str, dependents: bool | None) -> None:
        if kind == "http":
            body: Any = b"" if dependents is None else {"parameters": {"unload_dependents": dependents}}
            assert post(server, f"models/{name}/unload", body).status == 200
            return
        request = service_pb2.RepositoryModelUnloadRequest(model_name=name)
        if dependents is not None:
            request.parameters["unload_dependents"].bool_param = dependents
        stub.RepositoryModelUnload(request)

    def serving() -> set[str]:
        for name in ("ens", "first", "second"):
            settled(http, name)
        return {name for name in ("ens", "first", "second") if rows(http, name)[0][1] == "READY"}

    for dependents, left in ((None, {"first", "second"}), (False, {"first", "second"}), (True, set())):
        http.load_model("ens")
        assert serving() == {"ens", "first", "second"}
        unload("ens", dependents)
        assert serving() == left
    http.load_model("ens")
    for wrong in ("false", "true", 1, None) if kind == "http" else ():
        body = {"parameters": {"unload_dependents": wrong}}
        assert post(server, "models/ens/unload", body).status == 400
        assert serving() == {"ens", "first", "second"}, "nothing was done"
    if kind == "http":  # the seeds have parameters in an object of that name
        for verb in ("load", "unload"):
            for misplaced in ("unload_dependents", "config", "async", "file:1/model.py"):
                reply = post(server, f"models/ens/{verb}", {misplaced: "yes"})
                assert reply.status == 400
                assert (
                    f"'{misplaced}' is a parameter: expected it in the object 'parameters'"
                    in reply.body.decode()
                )
        assert serving() == {"ens", "first", "second"}
    unload("first", None)
    assert serving() == {"second"}, "what is composed of it goes too"
    unload("second", None)
    unload("unknown", None)
