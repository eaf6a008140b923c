"""Load, unload and index through the real clients."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.client.test_ensembles import ENSEMBLE
from tests.support.control import CONFIG, infer, load, post, progress, refused, rows, settled
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "first", identity_config())
    write_model(tmp_path, "second", identity_config())
    write_model(tmp_path, "ens", ENSEMBLE)
    write_model(tmp_path, "bad", "max_batch_size: oops")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.pbtxt").write_text(identity_config())
    return tmp_path


@pytest.fixture
def server(repository: Path) -> Iterator[ServerProcess]:
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=m") as process:
        yield process


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server for tests that leave it as it was."""
    repository = tmp_path_factory.mktemp("shared")
    write_model(repository, "m", identity_config())
    with ServerProcess(repository, "--model-control-mode=explicit", "--load-model=*") as process:
        yield process


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Any]:
    with httpclient.InferenceServerClient(server.http) as made:
        yield made


def count(client: Any, name: str = "m") -> int:
    number: int = client.get_inference_statistics(name)["model_stats"][0]["inference_count"]
    return number


def test_statistics_begin_anew_with_a_reload(client: Any) -> None:
    other = json.dumps({**client.get_model_config("m"), "max_batch_size": 3})
    for _ in range(2):
        client.load_model("m", config=other)
        assert count(client) == 0
        infer(client)
        assert count(client) == 1


def test_index_and_states(server: ServerProcess, client: Any) -> None:
    assert client.get_model_repository_index()[-1] == {"name": "second"}
    assert rows(client, "m") == [("1", "READY", "")]
    reply = post(server, "models/m/unload")
    assert (reply.status, reply.body) == (200, b"")
    with pytest.raises(InferenceServerException, match="unknown model: 'm' has no available versions"):
        infer(client)
    with pytest.raises(InferenceServerException, match="unknown model: 'm' version 1 is not at ready state"):
        infer(client, version="1")
    client.load_model("m")
    assert rows(client, "m") == [("1", "READY", "")]
    infer(client)
    assert post(server, "index", {"ready": True}).body == b'[{"name":"m","version":"1","state":"READY"}]'
    assert "non-boolean" in refused(post(server, "index", {"ready": "x"}), 400)
    assert refused(post(server, "index", b'"x"'), 400) == 'attempt to get members for non-object, got: "x"'
    for name in ("nope", "first"):
        assert post(server, f"models/{name}/unload").status == 200, "also of what is not loaded"


def test_load_errors(server: ServerProcess, client: Any, repository: Path) -> None:
    for reply in (load(server, "nope"), load(server, "a" * 300), load(server, "...")):
        text = refused(reply, 500)
        assert "', failed to poll from model repository: there is no folder '" in text
        assert f"in the model repositories '{repository}'" in text
    assert all(row["name"] not in ("nope", "...") for row in client.get_model_repository_index())
    assert "bad/config.pbtxt:1:" in refused(load(server, "bad"), 500)
    assert rows(client, "bad")[0][:2] == ("", "UNAVAILABLE")
    with pytest.raises(
        InferenceServerException, match="'bad' is not found; it failed to load, the log and the repository"
    ):
        infer(client, "bad")
    assert refused(load(server, "frist"), 500).endswith(f"repositories '{repository}', did you mean 'first'?")
    assert client.is_server_ready(), "a folder that cannot be taken does not count"
    assert refused(load(server, "bare"), 400) == (
        "load failed for model 'bare': at least one version must be available under the version policy of model "
        "'bare'\n"
    )
    reason = "at least one version must be available under the version policy of model 'bare'"
    assert rows(client, "bare") == [("", "UNAVAILABLE", reason)]
    assert reason in progress(server, "bare")["last_error"]
    (repository / "bare" / "1").mkdir()
    client.load_model("bare")
    assert rows(client, "bare") == [("1", "READY", "")]
    write_model(repository, "above", ENSEMBLE.replace('"first"', '"nobody"'))
    reason = "ensemble above contains models that are not available or ambiguous: nobody"
    assert reason in refused(load(server, "above"), 400)
    assert rows(client, "above") == [("", "UNAVAILABLE", reason)]
    assert reason in progress(server, "above")["last_error"]
    assert client.is_server_ready()
    write_model(repository, "lost", 'backend: "nosuch" max_batch_size: 8')
    text = refused(load(server, "lost"), 400)
    assert text.startswith(
        "load failed for model 'lost': version 1 is at UNAVAILABLE state: Invalid argument: unable to find backend "
        "library for backend 'nosuch'"
    ) and text.endswith(";\n")
    assert rows(client, "lost")[0][1] == "UNAVAILABLE"
    assert not client.is_server_ready()
    client.unload_model("lost")
    assert "unable to find backend library" in rows(client, "lost")[0][2], "the reason stays"


@pytest.mark.parametrize(
    ("parameters", "status", "text"),
    [
        ({"config": 1}, 400, "non-string as string"),
        (
            {"foo": "x"},
            500,
            "unexpected error on creating Triton parameter: unknown load parameter 'foo', expected",
        ),
        ({"async": "x"}, 400, "non-boolean"),
        ({"config": "{"}, 500, "failed to poll from model repository"),
        ({"config": '{"nosuch": 1}'}, 500, "unknown field 'nosuch'"),
        ({"config": '{"name": "other"}'}, 500, "directory name must equal model name"),
        ({"config": "[" * 5000}, 500, "failed to poll"),
        ({"file:1/model.py": ""}, 500, "without the parameter 'config'"),
        ({"config": "{}", "file:../../x": "QUJD"}, 500, "must stay within model directory"),
        ({"config": "{}", "file:/etc/x/": "QUJD"}, 500, "expected file:<version>/<file name>"),
        ({"config": "{}", "file:": "QUJD"}, 500, "expected file:"),
        ({"config": "{}", "file:1/" + "x" * 300: "QUJD"}, 500, "longer than 255 bytes"),
        ({"config": "{}", "file:1": "QUJD", "file:1/x": "QUJD"}, 500, "cannot be written"),
    ],
)
def test_hostile_parameters(shared: ServerProcess, parameters: Any, status: int, text: str) -> None:
    assert text in refused(load(shared, "m", **parameters), status)
    with httpclient.InferenceServerClient(shared.http) as client:
        assert rows(client, "m") == [("1", "READY", "")], "the old one keeps serving"
        infer(client)
        assert client.is_server_ready()


def test_unmodified_model_is_not_loaded_again(server: ServerProcess, client: Any, repository: Path) -> None:
    infer(client)
    client.load_model("m")
    assert count(client) == 1
    (repository / "m" / "1" / "weights").write_text("new")
    client.load_model("m")
    assert count(client) == 0, "reloaded"


def test_failed_reload_keeps_the_old_one(server: ServerProcess, client: Any, repository: Path) -> None:
    infer(client)
    (repository / "m" / "config.pbtxt").write_text(identity_config().replace("identity", "nosuch"))
    assert "unable to find backend" in refused(load(server, "m"), 400)
    assert rows(client, "m") == [("1", "READY", "")]
    infer(client)
    assert count(client) == 2 and client.is_server_ready()
    (repository / "m" / "config.pbtxt").write_text(identity_config(max_batch_size=4))
    client.load_model("m")
    assert client.get_model_config("m")["max_batch_size"] == 4


def test_config_override_persists_until_files_change(
    server: ServerProcess, client: Any, repository: Path
) -> None:
    def size() -> int:
        number: int = client.get_model_config("m")["max_batch_size"]
        return number

    client.load_model("m", config=json.dumps({**CONFIG, "max_batch_size": 2}))
    assert size() == 2
    client.load_model("m")
    assert size() == 2
    client.unload_model("m")
    client.load_model("m")
    assert size() == 8, "unloading forgets it"
    client.load_model("m", config=json.dumps({**CONFIG, "max_batch_size": 3}))
    os.utime(repository / "m" / "config.pbtxt", (1, 1))
    client.load_model("m")
    assert size() == 8, "changed files win"


def test_instance_group_change_keeps_statistics(server: ServerProcess, client: Any) -> None:
    client.load_model("m", config=json.dumps(CONFIG))
    infer(client)
    before = count(client)
    client.load_model(
        "m", config=json.dumps({**CONFIG, "instance_group": [{"count": 3, "kind": "KIND_CPU"}]})
    )
    assert client.get_model_config("m")["instance_group"][0]["count"] == 3
    infer(client)
    assert count(client) == before + 1


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_file_override(server: ServerProcess, client: Any, kind: str) -> None:
    module: Any = httpclient if kind == "http" else grpcclient
    with module.InferenceServerClient(server.http if kind == "http" else server.grpc) as own:
        own.load_model("m", config=json.dumps(CONFIG), files={"file:7/weights": b"\0\xff" * 100})
        assert settled(client, "m") == [("1", "UNAVAILABLE", "unloaded"), ("7", "READY", "")]
        own.load_model("m")
        assert settled(client, "m") == [("1", "READY", ""), ("7", "UNAVAILABLE", "unloaded")]
        own.load_model("ghost", config=json.dumps(CONFIG), files={"file:1/weights": b"x"})
        infer(own, "ghost")
        assert rows(client, "ghost") == [], "no folder of a repository"
        with pytest.raises(InferenceServerException, match="failed to load 'ghost', failed to poll"):
            own.load_model("ghost")
        infer(own, "ghost")
        own.unload_model("ghost")
        with pytest.raises(InferenceServerException, match="'ghost' has no available versions"):
            infer(own, "ghost")


@pytest.mark.slow
def test_override_folders_are_removed(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    temporary = tmp_path_factory.mktemp("temporary")
    environment = {**os.environ, "TMPDIR": str(temporary)}
    with ServerProcess(
        repository, "--model-control-mode=explicit", "--load-model=m", env=environment
    ) as server:
        content = base64.b64encode(b"x").decode()
        for name in ("m", "ghost"):
            for _ in range(3):
                reply = load(server, name, **{"config": json.dumps(CONFIG), "file:1/weights": content})
                assert reply.status == 200, reply.body
        refused(load(server, "m", **{"config": "{", "file:1/weights": content}), 500)
        assert len(list(temporary.iterdir())) <= 6
    assert list(temporary.iterdir()) == []


def test_ensembles_and_their_children(server: ServerProcess, client: Any) -> None:
    def states() -> list[str]:
        return [(rows(client, name)[0][1] or "-") for name in ("first", "second", "ens")]

    def run() -> None:
        infer(client, "ens", ("A", "B"))

    client.load_model("ens")
    assert states() == ["READY"] * 3
    run()
    client.unload_model("first")
    assert rows(client, "ens")[0][2] in ("unloaded", "")
    with pytest.raises(InferenceServerException, match="'ens' has no available versions"):
        run()
    assert states()[1] == "READY"
    client.load_model("first")
    assert states() == ["READY"] * 3
    run()
    client.unload_model("ens")
    assert states()[:2] == ["READY"] * 2, "plain unload leaves the children"
    client.load_model("ens")
    client.unload_model("ens", unload_dependents=True)
    assert states()[0] == "READY", "first was loaded by name"
    with pytest.raises(InferenceServerException, match="'second' has no available versions"):
        infer(client, "second")
    client.load_model("ens")
    client.unload_model("second", unload_dependents=True)
    client.load_model("second")
    with pytest.raises(InferenceServerException, match="'ens' has no available versions"):
        run()


def test_progress(server: ServerProcess, client: Any) -> None:
    with Http1(server.http) as http:
        plain = json.loads(http.request("GET", "/v2/repository/models/m").body)
        assert plain["versions"][0]["state"] == "READY" and plain["versions"][0]["load_duration_ns"] > 0
        assert http.request("GET", "/v2/repository/models/nope").status == 404
        refused(load(server, "bad"), 500)
        assert (
            "config.pbtxt:1"
            in json.loads(http.request("GET", "/v2/repository/models/bad").body)["last_error"]
        )
        assert load(server, "first", **{"async": True}).status == 200
