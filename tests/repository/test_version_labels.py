"""Labels of versions and aliases of models, through a real server (docs/model-repository.md)."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from grpc import insecure_channel
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

import neptrio
from tests.support.http import Http1
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until
from tests.wire.conftest import STOL

EXPLICIT = "--model-control-mode=explicit"
ALL = "version_policy { all {} }"


def named(labels: str = "", aliases: str = "", extra: str = ALL) -> str:
    """The configuration of a model with these names."""
    for key, value in (("version_labels", labels), ("aliases", aliases)):
        if value:
            extra += f' parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'
    return identity_config("TYPE_INT32", "2", 0, 1, extra)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("labels")
    for name in ("m", "moved", "held"):
        write_model(made, name, named("stable=3,canary=4", f"of-{name}"), versions=(1, 3, 4))
    write_model(made, "plain", identity_config("TYPE_INT32", "2", 0, 1, ALL), versions=(1, 2))
    write_model(made, "other", named(), versions=(1,))
    write_model(made, "away", named("stable=1", "of-away"), versions=(1,))
    return made


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[ServerProcess]:
    loaded = [f"--load-model={name}" for name in ("m", "moved", "held", "plain", "other", "away")]
    with ServerProcess(repository, EXPLICIT, *loaded, failures="version label|alias") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.http) as client:
        yield client


@pytest.fixture(scope="module")
def grpc(server: ServerProcess) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client


def ask(server: ServerProcess, method: str, path: str, document: Any = None) -> tuple[int, Any]:
    """(status, the answer's document, or the text of its error)."""
    with Http1(server.http) as client:
        body = b"" if document is None else json.dumps(document).encode()
        answer = client.request(method, path, body)
    found = json.loads(answer.body) if answer.body else None
    return answer.status, found["error"] if answer.status != 200 else found


def served_by(client: Any, model: str, version: str = "") -> tuple[str, str]:
    """(model, version) that an answer names."""
    kind = grpcclient if isinstance(client, grpcclient.InferenceServerClient) else httpclient
    given = kind.InferInput("INPUT0", [2], "INT32")
    given.set_data_from_numpy(np.arange(2, dtype=np.int32))
    answer = client.infer(model, [given], version)
    assert answer.as_numpy("OUTPUT0").tolist() == [0, 1]
    told = answer.get_response()
    if isinstance(told, dict):
        return told["model_name"], told["model_version"]
    return told.model_name, told.model_version


def test_a_label_serves_wherever_a_version_does(server: ServerProcess, http: Any, grpc: Any) -> None:
    for client in (http, grpc):
        assert served_by(client, "m", "stable") == ("m", "3")
        assert served_by(client, "m", "canary") == ("m", "4")
        assert served_by(client, "of-m") == ("m", "4")
        assert served_by(client, "of-m", "stable") == ("m", "3")
        assert served_by(client, "of-m", "1") == ("m", "1")
        assert client.is_model_ready("m", "stable") and client.is_model_ready("of-m")
    assert http.get_model_metadata("of-m", "stable")["name"] == "m"
    assert http.get_model_metadata("m", "stable")["versions"] == ["3"]
    assert list(grpc.get_model_metadata("m", "stable").versions) == ["3"]
    assert http.get_model_config("of-m", "stable")["name"] == "m"
    assert grpc.get_model_config("of-m", "stable").config.name == "m"
    for model in ("m", "of-m"):
        (row,) = http.get_inference_statistics(model, "stable")["model_stats"]
        assert (row["name"], row["version"]) == ("m", "3") and row["inference_count"] >= 2
    assert [row.version for row in grpc.get_inference_statistics("of-m", "canary").model_stats] == ["4"]
    (status, found) = ask(server, "GET", "/v2/models/of-m/versions/stable/stats?live=true")
    assert status == 200 and found["model_stats"][0]["version"] == "3"


def test_streams_and_the_other_forms_of_inference(server: ServerProcess, grpc: Any) -> None:
    found: list[Any] = []
    given = grpcclient.InferInput("INPUT0", [2], "INT32")
    given.set_data_from_numpy(np.arange(2, dtype=np.int32))
    with grpcclient.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: found.append((result, error)))
        client.async_stream_infer("of-m", [given], "stable")
        client.async_stream_infer("m", [given], "none")
        client.stop_stream()
    assert found[0][0].get_response().model_version == "3"
    assert "or a label: model 'm' has the labels" in str(found[1][1])
    body = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [2], "data": [0, 1]}]}
    with Http1(server.http) as client:
        answer = client.request(
            "POST", "/v2/models/of-m/versions/stable/infer_stream", json.dumps(body).encode()
        )
    assert answer.status == 200 and b'"model_version":"3"' in answer.body
    status, made = ask(server, "POST", "/v2/models/of-m/versions/stable/generate", {"INPUT0": [0, 1]})
    assert (status, made["model_name"], made["model_version"]) == (200, "m", "3")


def test_trace_settings_by_alias_are_the_models(server: ServerProcess) -> None:
    assert ask(server, "POST", "/v2/models/of-m/trace/setting", {"trace_rate": "77"})[0] == 200
    assert ask(server, "GET", "/v2/models/m/trace/setting")[1]["trace_rate"] == "77"


def test_unknown_labels_say_what_there_is(server: ServerProcess, http: Any, grpc: Any) -> None:
    known = " or a label: model 'm' has the labels canary (4), stable (3) and the versions 1, 3, 4"
    for call in (served_by, lambda client, model, version: client.get_model_metadata(model, version)):
        for model, text in (("m", STOL.format("none") + known), ("plain", STOL.format("none"))):
            with pytest.raises(InferenceServerException) as refused:
                call(grpc, model, "none")
            assert (refused.value.status(), refused.value.message()) == (
                "StatusCode.INVALID_ARGUMENT",
                text,
            )
            with pytest.raises(InferenceServerException) as refused:
                call(http, model, "none")
            assert refused.value.message() == text and refused.value.status() in (None, "404")
    assert ask(server, "GET", "/v2/models/m/versions/none/ready")[0] == 404
    assert ask(server, "GET", "/v2/models/m/versions/none/stats") == (404, STOL.format("none") + known)


def test_labels_move_at_once_and_without_a_reload(server: ServerProcess, http: Any, grpc: Any) -> None:
    before = ask(server, "POST", "/v2/repository/index?timings=true")[1]
    moved = {"labels": {"stable": 4, "canary": "1", "last": 4}}
    status, found = ask(server, "POST", "/v2/models/moved/labels", moved)
    assert (status, found) == (200, {
        "name": "moved",
        "versions": [1, 3, 4],
        "labels": {"canary": 1, "last": 4, "stable": 4},
        "aliases": ["of-moved"],
        "set": {"labels": ["canary", "last", "stable"], "aliases": []},
    })  # fmt: skip
    assert ask(server, "GET", "/v2/models/of-moved/labels") == (200, found)
    assert served_by(http, "moved", "stable") == served_by(grpc, "moved", "last") == ("moved", "4")
    assert served_by(http, "moved", "canary") == ("moved", "1")
    wrong = {"labels": {"stable": 1, "canary": 7}}
    status, text = ask(server, "POST", "/v2/models/moved/labels", wrong)
    assert status == 400 and text == (
        "version label 'canary' of model 'moved' names version 7, which is not there: it has 1, 3, 4"
    )
    assert served_by(http, "moved", "stable") == ("moved", "4"), "all of a call is done or nothing"
    assert ask(server, "POST", "/v2/repository/index?timings=true")[1] == before, "nothing was loaded"
    assert (
        ask(server, "POST", "/v2/models/moved/labels", {"labels": {"stable": None, "last": None}})[0] == 200
    )
    assert served_by(http, "moved", "stable") == ("moved", "3")
    with pytest.raises(InferenceServerException, match="or a label: model 'moved' has the labels"):
        served_by(grpc, "moved", "last")
    progress = ask(server, "GET", "/v2/repository/models/of-moved")[1]
    assert (progress["name"], progress["labels"], progress["aliases"]) == (
        "moved", {"canary": 1, "stable": 3}, ["of-moved"],
    )  # fmt: skip


def test_calls_that_are_refused(server: ServerProcess) -> None:
    for document, problem in (
        ({"labels": {"3": 3}}, "a version label has letters"),
        ({"labels": {"stable": "x"}}, "must be the number of a version"),
        ({"aliases": {"plain": True}}, "alias 'plain' of model 'm' is the name of another model"),
        ({"aliases": {"m": True}}, "is the model's own name"),
        ({"label": {}}, "unknown member 'label'"),
    ):
        status, text = ask(server, "POST", "/v2/models/m/labels", document)
        assert status == 400 and problem in text, text
    status, text = ask(server, "POST", "/v2/models/none/labels", {})
    assert status == 404 and text.startswith("Request for unknown model: 'none' is not found")


def test_an_alias_moves_to_another_model(server: ServerProcess, http: Any, grpc: Any) -> None:
    assert ask(server, "POST", "/v2/models/plain/labels", {"aliases": {"prod": True}})[0] == 200
    assert served_by(http, "prod") == served_by(grpc, "prod") == ("plain", "2")
    assert ask(server, "POST", "/v2/models/other/labels", {"aliases": {"prod": True}})[0] == 200
    assert served_by(http, "prod") == served_by(grpc, "prod") == ("other", "1")
    assert ask(server, "GET", "/v2/models/plain/labels")[1]["aliases"] == []
    names = {row["name"] for row in ask(server, "POST", "/v2/repository/index")[1]}
    assert "prod" not in names
    for client in (http, grpc):
        for call in (client.load_model, client.unload_model):
            with pytest.raises(InferenceServerException, match="'prod' is an alias of model 'other'"):
                call("prod")
    assert ask(server, "POST", "/v2/models/other/labels", {"aliases": {"prod": None}})[0] == 200
    with pytest.raises(InferenceServerException, match="'prod' is not found"):
        served_by(grpc, "prod")


def test_a_load_moves_labels_with_its_versions(
    repository: Path, server: ServerProcess, http: Any, grpc: Any
) -> None:
    """The versions of a load and its labels change between two requests; one that would leave a label without its version
    is refused, and what serves stays."""
    assert ask(server, "POST", "/v2/models/held/labels", {"labels": {"fixed": 1}})[0] == 200
    only = "version_policy { specific { versions: [ 3, 4 ] } }"
    (repository / "held" / "config.pbtxt").write_text(named("stable=3,canary=4", "of-held", only))
    with pytest.raises(InferenceServerException) as refused:
        http.load_model("held")
    assert refused.value.message() == (
        "load failed for model 'held': version label 'fixed' of model 'held' names version 1, which is not there: it has "
        "3, 4"
    )
    assert served_by(http, "held", "fixed") == ("held", "1"), "what served still does"
    grpc_load(server, "held", "fixed=4, stable=4")
    assert served_by(http, "held", "fixed") == served_by(grpc, "held", "stable") == ("held", "4")
    assert ask(server, "GET", "/v2/models/held/labels")[1]["versions"] == [3, 4]
    load = {"parameters": {"version_labels": "fixed=,stable="}}
    assert ask(server, "POST", "/v2/repository/models/held/load", load)[0] == 200
    assert ask(server, "GET", "/v2/models/held/labels")[1]["set"]["labels"] == []
    loaded_at = loads(server, "held")
    (repository / "held" / "config.pbtxt").write_text(named("stable=4,new=3", "also-held", only))
    http.load_model("held")
    assert loads(server, "held") == loaded_at, "labels and aliases of the configuration need no new model"
    assert served_by(http, "also-held", "new") == ("held", "3")
    shown = http.get_model_config("held")["parameters"]
    assert shown["version_labels"]["string_value"] == "stable=4,new=3"
    given = json.dumps(
        {**http.get_model_config("held"), "parameters": {"version_labels": {"string_value": "given=3"}}}
    )
    http.load_model("held", config=given)
    assert loads(server, "held") == loaded_at
    assert served_by(http, "held", "given") == ("held", "3")
    with pytest.raises(InferenceServerException, match="'also-held' is not found"):
        served_by(http, "also-held")


def grpc_load(server: ServerProcess, model: str, labels: str) -> None:
    """tritonclient's load_model() has no such parameter; the message has."""
    request = service_pb2.RepositoryModelLoadRequest(model_name=model)
    request.parameters["version_labels"].string_param = labels
    with insecure_channel(server.grpc) as channel:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).RepositoryModelLoad(request)


def loads(server: ServerProcess, model: str) -> list[int]:
    rows = ask(server, "GET", f"/v2/repository/models/{model}")[1]["versions"]
    return [row["loaded_at"] for row in rows if row["state"] == "READY"]


def test_an_unload_forgets_what_was_set(server: ServerProcess, http: Any) -> None:
    assert (
        ask(server, "POST", "/v2/models/away/labels", {"labels": {"x": 1}, "aliases": {"y": True}})[0] == 200
    )
    assert served_by(http, "y", "x") == ("away", "1")
    http.unload_model("away")
    status, text = ask(server, "POST", "/v2/models/away/labels", {"labels": {"x": 1}})
    assert status == 400 and text.endswith("names version 1, which is not there: it has none")
    status, text = ask(server, "POST", "/v2/models/away/labels", {"aliases": {"y": True}})
    assert status == 400 and "load it before it gets an alias" in text
    for alias in ("y", "of-away"):
        with pytest.raises(InferenceServerException, match=f"'{alias}' is not found"):
            served_by(http, alias)
    http.load_model("away")
    assert served_by(http, "of-away", "stable") == ("away", "1")
    with pytest.raises(InferenceServerException, match="has the labels stable"):
        served_by(http, "away", "x")


def test_a_configuration_that_cannot_be(repository: Path, server: ServerProcess, http: Any) -> None:
    for config, problem in (
        (named("stable=9"), "names version 9, which is not there: it has 1"),
        (named("stable=one"), "with the numbers of versions"),
        (named(aliases="of-m"), "alias 'of-m' of model 'late' is one of model 'm' already"),
        (named(aliases="plain"), "alias 'plain' of model 'late' is the name of another model"),
    ):
        write_model(repository, "late", config)
        with pytest.raises(InferenceServerException, match=problem):
            http.load_model("late")
    given = {**http.get_model_config("m"), "parameters": {"version_labels": {"string_value": "stable=9"}}}
    checked = ask(server, "POST", "/v2/repository/models/m/check", {"config": given})[1]
    assert any("names version 9" in problem["message"] for problem in checked["problems"]), checked


@pytest.mark.slow
def test_only_where_loads_are_allowed(tmp_path: Path) -> None:
    write_model(tmp_path, "m", named("stable=1"))
    for flags, status, problem in (
        ((), 503, "setting labels is not allowed without --model-control-mode=explicit"),
        ((EXPLICIT, "--load-model=m", "--read-only=true"), 403, "setting labels is not possible"),
    ):
        with ServerProcess(tmp_path, *flags) as server:
            found, text = ask(server, "POST", "/v2/models/m/labels", {"labels": {"stable": 1}})
            assert found == status and problem in text
            assert ask(server, "GET", "/v2/models/m/labels")[1]["labels"] == {"stable": 1}


@pytest.mark.slow
def test_polling_takes_labels_of_a_changed_configuration(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", named("stable=3"), versions=(3, 4))
    flags = "--model-control-mode=poll", "--repository-poll-secs=1"
    with ServerProcess(tmp_path, *flags) as server, httpclient.InferenceServerClient(server.http) as http:
        assert served_by(http, "m", "stable") == ("m", "3")
        loaded_at = loads(server, "m")
        (folder / "config.pbtxt").write_text(named("stable=4", "prod"))
        until(lambda: served_by(http, "m", "stable") == ("m", "4"))
        assert served_by(http, "prod", "stable") == ("m", "4") and loads(server, "m") == loaded_at


@pytest.mark.slow
def test_models_on_demand_and_front_ends(tmp_path: Path) -> None:
    write_model(tmp_path, "a", named("stable=3,canary=4", "of-a"), versions=(3, 4))
    write_model(tmp_path, "b", named("stable=1", "of-b"))
    write_model(tmp_path, "c", named("stable=1", "of-c"))
    flags = "--model-control-mode=on-demand", "--frontends=1"
    with (
        ServerProcess(tmp_path, *flags) as server,
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        assert http.is_model_ready("of-a", "stable") and not http.is_model_ready("of-a", "9")
        status, text = ask(server, "POST", "/v2/models/of-a/versions/none/infer", {})
        assert status == 404 and "has the labels canary (4), stable (3) and the versions 3, 4" in text
        assert ask(server, "GET", "/v2/models/a/ready?loaded=true")[0] == 400, (
            "a label that it lacks loads nothing"
        )
        assert served_by(grpc, "of-a", "stable") == ("a", "3")
        assert served_by(http, "of-b", "stable") == ("b", "1")
        assert http.get_model_metadata("of-c", "stable")["versions"] == ["1"]
        assert ask(server, "POST", "/v2/models/a/labels", {"labels": {"stable": 4}})[0] == 200
        for _ in range(2):  # the second time the front end has the head
            assert served_by(http, "a", "stable") == served_by(http, "of-a", "stable") == ("a", "4")
        moved = {"aliases": {"of-a": True}, "labels": {"own": 1}}
        assert ask(server, "POST", "/v2/models/b/labels", moved)[0] == 200
        assert served_by(http, "of-a", "own") == served_by(grpc, "of-a", "own") == ("b", "1")
        http.unload_model("a")
        status, text = ask(server, "POST", "/v2/models/a/labels", {"labels": {"stable": 7}})
        assert status == 400 and text.endswith("it has 3, 4")
        assert ask(server, "POST", "/v2/models/a/labels", {"labels": {"stable": 3}})[0] == 200
        assert served_by(http, "a", "stable") == ("a", "3"), "what was set while it was away"


@pytest.mark.slow
def test_an_alias_is_free_when_its_model_is_gone(tmp_path: Path) -> None:
    """Of two models that are loaded on demand and claim one alias, the first has it, and then the other."""
    for name in ("a", "b"):
        write_model(tmp_path, name, named(aliases="prod"))
    flags = "--model-control-mode=on-demand", "--repository-poll-secs=1"
    with (
        ServerProcess(tmp_path, *flags, failures="alias 'prod'") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        assert served_by(http, "prod") == ("a", "1")
        with pytest.raises(
            InferenceServerException, match="alias 'prod' of model 'b' is one of model 'a' already"
        ):
            served_by(http, "b")
        shutil.rmtree(tmp_path / "a")
        http.unload_model("a")

        def moved() -> bool:
            return ask(server, "GET", "/v2/models/b/labels")[1]["aliases"] == ["prod"]

        until(moved, server.log)

        def serves() -> bool:  # after a pause: its load has failed before
            try:
                return served_by(http, "prod") == ("b", "1")
            except InferenceServerException:
                return False

        until(serves, server.log)


@pytest.mark.slow
def test_requests_meet_a_label_before_or_after_it_has_moved(tmp_path: Path) -> None:
    """While versions come and go with their label, no request by it fails, and none is served by what is gone."""
    write_model(
        tmp_path,
        "m",
        named("stable=3", extra="version_policy { specific { versions: [ 3 ] } }"),
        versions=(3, 4),
    )
    ended = threading.Event()
    found: list[set[tuple[str, str]]] = [set(), set()]

    def ask_on(kind: Any, address: str, seen: set[tuple[str, str]]) -> None:
        with kind(address) as client:
            while not ended.is_set():
                seen.add(served_by(client, "m", "stable"))

    with ServerProcess(tmp_path, EXPLICIT, "--load-model=m") as server, ThreadPoolExecutor(2) as pool:
        with httpclient.InferenceServerClient(server.http) as http:
            asking = [
                pool.submit(ask_on, httpclient.InferenceServerClient, server.http, found[0]),
                pool.submit(ask_on, grpcclient.InferenceServerClient, server.grpc, found[1]),
            ]
            try:
                config = http.get_model_config("m")
                for version in (4, 3) * 5:
                    config["version_policy"] = {"specific": {"versions": [str(version)]}}
                    parameters = {"config": json.dumps(config), "version_labels": f"stable={version}"}
                    loaded = ask(server, "POST", "/v2/repository/models/m/load", {"parameters": parameters})
                    assert loaded[0] == 200, loaded
                    assert served_by(http, "m", "stable") == ("m", str(version))
                    now = ("m", str(version))
                    until(lambda: all(now in seen for seen in found) or any(one.done() for one in asking))  # noqa: B023
            finally:
                ended.set()
            for one in asking:
                one.result(60)
            assert found == [{("m", "3"), ("m", "4")}] * 2


@pytest.mark.slow
def test_the_python_api(tmp_path: Path) -> None:
    write_model(tmp_path, "m", named("stable=3", "prod"), versions=(3, 4))
    with neptrio.Server(tmp_path).running() as server:
        model = server.model("prod", "stable")
        asked = {"INPUT0": np.arange(2, dtype=np.int32)}
        assert (model.infer(asked).model_name, model.infer(asked).model_version) == ("m", "3")
        assert server.names("m")["labels"] == {"stable": 3}
        assert server.set_names("m", labels={"stable": 4}, aliases={"main": True})["aliases"] == [
            "main",
            "prod",
        ]
        assert model.infer(asked).model_version == "4"
        assert server.model("main").ready()
