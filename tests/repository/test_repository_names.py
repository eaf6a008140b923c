"""Several repositories, of which a client names one: in the index, a load and an unload, over both protocols."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2, service_pb2_grpc

from tests.client.test_ensembles import ENSEMBLE
from tests.support.control import infer, post, refused, settled
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess

Verbs = Callable[..., Any]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base: Path = tmp_path_factory.mktemp("several")
    for repository in ("east", "west"):
        write_model(
            base / repository, "both", identity_config(max_batch_size={"east": 2, "west": 3}[repository])
        )
    write_model(base / "east", "left", identity_config())
    write_model(base / "west", "right", identity_config())
    write_model(base / "far" / "west", "remote", identity_config())
    return base


@pytest.fixture(scope="module")
def server(folders: Path) -> Iterator[ServerProcess]:
    flags = (f"--model-repository={folders / 'west'}", f"--model-repository={folders / 'far' / 'west'}")
    with ServerProcess(folders / "east", "--model-control-mode=explicit", *flags) as process:
        yield process


@pytest.fixture
def http(server: ServerProcess) -> Iterator[Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        yield client


def over_http(server: ServerProcess, verb: str, repository: str, model: str = "") -> Any:
    path = "index" if verb == "index" else f"models/{model}/{verb}"
    reply = post(server, f"{quote(repository, safe='')}/{path}")
    if reply.status != 200:
        return reply.status, json.loads(reply.body)["error"]
    return [row for row in json.loads(reply.body)] if verb == "index" else 200


def over_grpc(server: ServerProcess, verb: str, repository: str, model: str = "") -> Any:
    with grpc.insecure_channel(server.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            if verb == "index":
                rows = stub.RepositoryIndex(
                    service_pb2.RepositoryIndexRequest(repository_name=repository)
                ).models
                names = ("name", "version", "state", "reason")
                return [{name: getattr(row, name) for name in names if getattr(row, name)} for row in rows]
            given = {"repository_name": repository, "model_name": model}
            if verb == "load":
                stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(**given))
            else:
                stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(**given))
        except grpc.RpcError as error:
            # as HTTP's statuses, so that one test asks both
            code = {grpc.StatusCode.NOT_FOUND: 404, grpc.StatusCode.INTERNAL: 500}[error.code()]
            return code, error.details()
        return 200


@pytest.fixture(params=[over_http, over_grpc], ids=["http", "grpc"])
def ask(request: pytest.FixtureRequest) -> Verbs:
    return request.param  # type: ignore[no-any-return]


def batch_size(http: Any, model: str) -> int:
    return int(http.get_model_config(model)["max_batch_size"])


def test_the_index_of_one_repository(server: ServerProcess, folders: Path, ask: Verbs) -> None:
    def names(repository: str) -> list[str]:
        return [row["name"] for row in ask(server, "index", repository)]

    assert names("east") == names(str(folders / "east")) == names(f"{folders}/east/") == ["both", "left"]
    assert names(str(folders / "west")) == ["both", "right"]
    assert names(str(folders / "far" / "west")) == ["remote"]
    assert names("west") == ["both", "remote", "right"], "both folders have that name"
    assert ask(server, "index", "east")[0] == {"name": "both"}, "it could be loaded from here"


def test_a_model_of_two_repositories_is_loaded_from_the_named_one(
    server: ServerProcess, folders: Path, http: Any, ask: Verbs
) -> None:
    text = "failed to load 'both', failed to poll from model repository: model appears in two or more repositories"
    assert text in refused(post(server, "models/both/load"), 500)
    assert ask(server, "load", "west", "both") == 200
    assert batch_size(http, "both") == 3
    ready = {"name": "both", "version": "1", "state": "READY"}
    assert ready in ask(server, "index", "west") and ready not in ask(server, "index", "east")
    assert {"name": "both"} in ask(server, "index", "east"), "it was loaded from another"
    http.load_model("both")
    assert batch_size(http, "both") == 3, "a reload without a name keeps to the repository that was named"
    infer(http, "both")
    assert ask(server, "load", str(folders / "east"), "both") == 200
    assert batch_size(http, "both") == 2
    assert ready in ask(server, "index", "east") and ready not in ask(server, "index", "west")
    assert ask(server, "unload", "west", "both") == (
        404,
        "model 'both' was not loaded from the repository 'west'",
    )
    infer(http, "both")
    assert ask(server, "unload", "east", "both") == 200
    settled(http, "both")
    gone = {"name": "both", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert gone in ask(server, "index", "east")
    assert ask(server, "unload", "west", "both") == 200, "as of any model that is not loaded"


def test_a_model_that_the_named_repository_does_not_have(server: ServerProcess, ask: Verbs) -> None:
    status, text = ask(server, "load", "west", "left")
    assert status == 500
    assert text.endswith("there is no folder 'left' in the model repository 'west'")


@pytest.mark.parametrize("verb", ["index", "load", "unload"])
@pytest.mark.parametrize("name", ["nowhere", "eas", "/", "..", "east/left", "é", "a" * 500])
def test_a_repository_that_there_is_not(server: ServerProcess, ask: Verbs, verb: str, name: str) -> None:
    status, text = ask(server, verb, name, "left")
    assert status == 404
    assert text.startswith("there is no model repository '" + name[:30])
    assert text.endswith("expected the name or the path of one of 'east', 'west', 'west'")


def test_without_a_name_every_repository_counts(server: ServerProcess, http: Any) -> None:
    http.load_model("right")
    assert [row["name"] for row in http.get_model_repository_index()] == ["both", "left", "remote", "right"]
    http.unload_model("right")
    settled(http, "right")


def test_an_ensemble_keeps_to_its_repository(tmp_path: Path) -> None:
    """A step that changes makes the ensemble anew, from the repository that its load has named."""
    for name in ("first", "second"):
        write_model(tmp_path / "a", name, identity_config())
    for repository in ("a", "b"):
        write_model(tmp_path / repository, "ens", ENSEMBLE)
    flags = ("--model-control-mode=explicit", f"--model-repository={tmp_path / 'b'}")
    with ServerProcess(tmp_path / "a", *flags) as server:
        assert over_grpc(server, "load", "b", "ens") == 200
        (tmp_path / "a" / "first" / "config.pbtxt").write_text(identity_config(max_batch_size=9))
        with httpclient.InferenceServerClient(server.http) as client:
            client.load_model("first")
            states = {row["name"]: row["state"] for row in over_grpc(server, "index", "b")}
            assert states == {"ens": "READY"}


@pytest.mark.parametrize("mode", ["none", "poll"])
def test_modes_that_load_by_themselves_say_what_is_missing(tmp_path: Path, mode: str) -> None:
    write_model(tmp_path, "m", identity_config())
    texts = {
        "none": "explicit model load / unload is not allowed without --model-control-mode=explicit",
        "poll": "explicit model load / unload is not allowed if polling is enabled",
    }
    with ServerProcess(tmp_path, f"--model-control-mode={mode}") as server:
        for verb in ("load", "unload"):
            assert refused(post(server, f"models/m/{verb}"), 503) == texts[mode]
            with grpc.insecure_channel(server.grpc) as channel, pytest.raises(grpc.RpcError) as info:
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                if verb == "load":
                    stub.RepositoryModelLoad(service_pb2.RepositoryModelLoadRequest(model_name="m"))
                else:
                    stub.RepositoryModelUnload(service_pb2.RepositoryModelUnloadRequest(model_name="m"))
            assert (info.value.code(), info.value.details()) == (grpc.StatusCode.UNAVAILABLE, texts[mode])
        assert over_http(server, "index", tmp_path.name) == [{"name": "m", "version": "1", "state": "READY"}]
