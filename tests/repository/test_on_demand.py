"""Models that are loaded when they are asked for (docs/on-demand.md)."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

import neptrio
from tests.support import openai_models
from tests.support.control import progress
from tests.support.http import Http1
from tests.support.metrics import scrape
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.slow_models import CONFIG, latch, loads, parameter, slow_model
from tests.support.streams import Answers
from tests.support.waiting import until

ON_DEMAND = "--model-control-mode=on-demand"
pytestmark = pytest.mark.slow

BLS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            asked = pb_utils.InferenceRequest(
                model_name="called",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.get_input_tensor_by_name(request, "INPUT0")],
            )
            answer = asked.exec()
            responses.append(pb_utils.InferenceResponse(answer.output_tensors(), answer.error()))
        return responses
"""
ASKS = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        ready = [pb_utils.is_model_ready("m", version) for version in ("1", "2", "3")]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array(ready, np.int32))]) for _ in requests]
"""
GENERATES = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("TEXT", pb_utils.get_input_tensor_by_name(request, "PROMPT").as_numpy())]
            )
            for request in requests
        ]
"""
ENSEMBLE = """platform: "ensemble" max_batch_size: 0
input [ { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling { step [ { model_name: "step" model_version: -1
  input_map { key: "INPUT0" value: "IN" } output_map { key: "OUTPUT0" value: "OUT" } } ] }
"""
PYTHON = """backend: "python" max_batch_size: 0
input [ {{ name: "{0}" data_type: {2} dims: [ -1 ] }} ]
output [ {{ name: "{1}" data_type: {2} dims: [ -1 ] }} ]
"""


def http_infer(
    client: httpclient.InferenceServerClient, model: str, name: str = "INPUT0", **options: Any
) -> list[int]:
    given = httpclient.InferInput(name, [3], "INT32")
    given.set_data_from_numpy(np.arange(3, dtype=np.int32))
    answer = client.infer(model, [given], **options)
    found = answer.as_numpy("OUT" if name == "IN" else "OUTPUT0")
    return [int(value) for value in found]


def own_infer(server: ServerProcess, model: str, **options: Any) -> list[int]:
    """The same by a client of its own, for threads."""
    with httpclient.InferenceServerClient(server.http) as client:
        return http_infer(client, model, **options)


def grpc_input(name: str = "INPUT0") -> grpcclient.InferInput:
    given = grpcclient.InferInput(name, [3], "INT32")
    given.set_data_from_numpy(np.arange(3, dtype=np.int32))
    return given


def document(server: ServerProcess, path: str, method: str = "GET", body: bytes = b"") -> tuple[int, Any]:
    with Http1(server.http) as client:
        answer = client.request(method, path, body)
        return answer.status, json.loads(answer.body) if answer.body else None


def on_demand(server: ServerProcess, model: str) -> dict[str, Any]:
    found: dict[str, Any] = progress(server, model)["on_demand"]
    return found


def phase(server: ServerProcess, model: str) -> str:
    return str(progress(server, model).get("loading", {}).get("phase", ""))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("on-demand")
    for name in (
        "http",
        "grpc",
        "stream",
        "step",
        "called",
        "left",
        "timed",
        "seen",
        "known",
        "again",
        "measured",
        "shown",
    ):
        slow_model(repository, name)
    write_model(repository, "calls", PYTHON.format("INPUT0", "OUTPUT0", "TYPE_INT32"), {"1/model.py": BLS})
    write_model(
        repository, "writes", PYTHON.format("PROMPT", "TEXT", "TYPE_STRING"), {"1/model.py": GENERATES}
    )
    write_model(repository, "whole", ENSEMBLE)
    return repository


@pytest.fixture(scope="module")
def server(places: Path) -> Iterator[ServerProcess]:
    with ServerProcess(places, ON_DEMAND, failures="the weights are broken") as running:
        yield running


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpclient.InferenceServerClient]:
    with httpclient.InferenceServerClient(server.http, concurrency=8) as client:
        yield client


@pytest.fixture(scope="module")
def grpc(server: ServerProcess) -> Iterator[grpcclient.InferenceServerClient]:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        yield client


def test_nothing_is_loaded_and_all_is_known(
    places: Path, server: ServerProcess, http: Any, grpc: Any
) -> None:
    assert loads(places / "known") == 0
    assert http.is_server_ready() and grpc.is_server_ready()
    assert http.is_model_ready("known") and grpc.is_model_ready("known")
    assert not http.is_model_ready("known", "7"), "it has no such version"
    assert document(server, "/v2/models/known/ready?loaded=true")[0] == 400
    (row,) = [row for row in http.get_model_repository_index() if row["name"] == "known"]
    assert row == {"name": "known", "version": "1", "state": "UNAVAILABLE", "reason": "on demand"}
    assert not http.is_model_ready("no-such-model")
    with pytest.raises(
        InferenceServerException, match="Request for unknown model: 'no-such-model' is not found"
    ):
        http_infer(http, "no-such-model")


def test_waiting_requests_share_one_load(places: Path, server: ServerProcess, http: Any) -> None:
    folder = places / "http"
    with latch(folder) as held, ThreadPoolExecutor(5) as pool:
        answers = [pool.submit(own_infer, server, "http") for _ in range(5)]
        until(lambda: on_demand(server, "http")["waiting"] == 5)
        (row,) = [row for row in http.get_model_repository_index() if row["name"] == "http"]
        assert row["state"] == "LOADING"
        assert http.is_server_ready(), "a load on demand does not make the server unready"
        held.open()
        assert [answer.result(60) for answer in answers] == [[0, 1, 2]] * 5
    assert loads(folder) == 1
    assert document(server, "/v2/models/http/ready?loaded=true")[0] == 200
    assert on_demand(server, "http") == {
        "state": "loaded", "waiting": 0, "misses": 5, "loads": 1, "load_failures": 0, "put_away": 0,
    }  # fmt: skip
    statistics = http.get_inference_statistics("http")["model_stats"][0]
    assert statistics["inference_stats"]["success"]["count"] == 5
    assert statistics["inference_stats"]["fail"]["count"] == 0


def test_grpc_loads(places: Path, grpc: Any) -> None:
    assert grpc.infer("grpc", [grpc_input()]).as_numpy("OUTPUT0").tolist() == [0, 1, 2]
    assert loads(places / "grpc") == 1


def test_a_stream_keeps_its_order(places: Path, server: ServerProcess) -> None:
    with (
        latch(places / "stream") as held,
        grpcclient.InferenceServerClient(server.grpc) as client,
        Answers(client) as answers,
    ):
        for number in range(4):
            client.async_stream_infer("stream", [grpc_input()], request_id=str(number))
        until(lambda: on_demand(server, "stream")["waiting"] == 4)
        held.open()
        assert [result.get_response().id for result in answers.results(4)] == ["0", "1", "2", "3"]


def test_an_ensemble_loads_its_steps(places: Path, http: Any) -> None:
    assert http_infer(http, "whole", "IN") == [0, 1, 2]
    assert loads(places / "step") == 1


def test_a_model_calls_one(places: Path, http: Any) -> None:
    assert http_infer(http, "calls") == [0, 1, 2]
    assert loads(places / "called") == 1


def test_generate_and_metadata_load(server: ServerProcess, http: Any) -> None:
    status, answer = document(server, "/v2/models/writes/generate", "POST", b'{"PROMPT":"hello"}')
    assert (status, answer["TEXT"]) == (200, "hello")
    assert http.get_model_metadata("seen")["inputs"][0]["name"] == "INPUT0"
    assert http.get_model_config("seen")["backend"] == "python"


def test_who_leaves_does_not_end_the_load(places: Path, server: ServerProcess, grpc: Any) -> None:
    left: queue.Queue[Any] = queue.Queue()
    with latch(places / "left") as held, ThreadPoolExecutor(1) as pool:
        stays = pool.submit(grpc.infer, "left", [grpc_input()])
        until(lambda: on_demand(server, "left")["waiting"] == 1)
        leaves = grpc.async_infer("left", [grpc_input()], lambda result, error: left.put(error))
        until(lambda: on_demand(server, "left")["waiting"] == 2)
        leaves.cancel()
        assert "Locally cancelled" in str(left.get(timeout=60))
        until(lambda: on_demand(server, "left")["waiting"] == 1)
        assert on_demand(server, "left")["misses"] == 2
        with pytest.raises(InferenceServerException, match=r"(?i)deadline exceeded"):
            grpc.infer("left", [grpc_input()], client_timeout=0.2)
        until(lambda: on_demand(server, "left")["waiting"] == 1)
        held.open()
        assert stays.result(60).as_numpy("OUTPUT0").tolist() == [0, 1, 2]
    assert loads(places / "left") == 1


def test_a_request_waits_no_longer_than_its_timeout(places: Path, server: ServerProcess, http: Any) -> None:
    with latch(places / "timed") as held:
        with pytest.raises(InferenceServerException, match="Request timeout expired") as refused:
            http_infer(http, "timed", timeout=100_000)
        assert refused.value.status() == "503"
        held.open()
        assert http_infer(http, "timed", timeout=60_000_000) == [0, 1, 2]
    assert loads(places / "timed") == 1


def test_an_unload_by_hand_loses_nobody(places: Path, server: ServerProcess, http: Any) -> None:
    folder = places / "again"
    assert http_infer(http, "again") == [0, 1, 2]
    http.unload_model("again")
    (row,) = [row for row in http.get_model_repository_index() if row["name"] == "again"]
    assert (row["state"], row["reason"]) == ("UNAVAILABLE", "put away: unloaded")
    assert http.is_model_ready("again")
    with latch(folder) as held, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(own_infer, server, "again")
        until(lambda: loads(folder) == 2)
        http.unload_model("again")  # ends that load; another one begins
        until(lambda: loads(folder) == 3)
        held.open()
        assert answer.result(60) == [0, 1, 2]
    assert http.get_inference_statistics("again")["model_stats"][0]["inference_count"] == 2
    http.unload_model("again")
    statistics = document(server, "/v2/models/again/stats?since_start=true&live=true")[1]["model_stats"][0]
    assert statistics["inference_count"] == 2 and statistics["memory_usage"] == []
    assert statistics["since_start"]["inference_stats"]["success"]["count"] == 2
    with grpcclient.InferenceServerClient(server.grpc) as client:
        rows = client.get_inference_statistics().model_stats
        assert [row.inference_count for row in rows if row.name == "again"] == [2]
        assert [row.inference_count for row in client.get_inference_statistics("known").model_stats] == [0]


def test_what_is_seen_of_models_on_demand(server: ServerProcess, http: Any) -> None:
    """The statistics, `neptrio top`, and nothing of other models for those who ask for one."""
    for _ in range(3):
        assert http_infer(http, "shown") == [0, 1, 2]
    found = document(server, "/v2/models/stats?live=true")[1]["on_demand"]
    rows = {row["name"]: row for row in found["models"]}
    assert rows["shown"] == {
        "name": "shown", "state": "loaded", "waiting": 0, "hits": 2, "misses": 1, "loads": 1, "load_failures": 0,
        "put_away": 0,
    }  # fmt: skip
    assert "known" not in rows and found["states"]["on demand"] >= 1, "nobody has asked for it"
    assert (found["held_bytes"], found["budget_bytes"]) == (0, 0)
    assert rows["writes"]["hits"] == 0, "the request that generate has made has waited"
    one = document(server, "/v2/models/shown/stats?live=true")[1]["on_demand"]
    assert [row["name"] for row in one["models"]] == ["shown"] and one["states"] == found["states"]
    assert "on_demand" not in document(server, "/v2/models/stats")[1]
    done = subprocess.run(
        [sys.executable, "-m", "neptrio", "top", server.http, "--once", "--interval=0.1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    lines = done.stdout.splitlines()
    head = next(line for line in lines if line.startswith("MODEL")).split()
    (row,) = [line.split() for line in lines if line.startswith("shown ")]
    assert head[3:5] == ["ON", "DEMAND"] and row[3] == "loaded", done.stdout
    assert lines[1].startswith("on demand: ") and "0.0 hits/s, 0.0 misses/s" in lines[1]
    assert " known " not in done.stdout, "it is not one of those that should be ready"


def test_metrics(server: ServerProcess, http: Any) -> None:
    assert http_infer(http, "measured") == [0, 1, 2]
    assert http_infer(http, "measured") == [0, 1, 2]
    http.unload_model("measured")
    text = scrape(server)
    assert 'neptrio_demand_misses_total{model="measured"} 1\n' in text
    assert 'neptrio_demand_hits_total{model="measured"} 1\n' in text
    assert 'neptrio_demand_loads_total{model="measured",outcome="loaded"} 1\n' in text
    assert 'neptrio_demand_loads_total{model="measured",outcome="failed"} 0\n' in text
    assert 'neptrio_demand_waiting_requests{model="measured"} 0\n' in text
    assert 'neptrio_demand_put_away_total{model="measured"} 0\n' in text, "it was unloaded by hand"
    assert 'neptrio_demand_misses_total{model="known"}' not in text
    assert 'neptrio_demand_models{state="on demand"}' in text
    assert 'neptrio_demand_models{state="put away"}' in text


def test_a_failed_load_tells_all_who_wait_and_is_tried_again_later(tmp_path: Path) -> None:
    folder = slow_model(tmp_path, "m")
    (folder / "broken").touch()
    with (
        ServerProcess(tmp_path, ON_DEMAND, failures="the weights are broken") as server,
        httpclient.InferenceServerClient(server.http, concurrency=4) as http,
    ):
        with latch(folder) as held, ThreadPoolExecutor(3) as pool:
            answers = [pool.submit(own_infer, server, "m") for _ in range(3)]
            until(lambda: on_demand(server, "m")["waiting"] == 3)
            held.open()
            errors = [answer.exception(60) for answer in answers]
        assert all("the weights are broken" in str(error) for error in errors), errors
        assert [error.status() for error in errors] == ["503"] * 3  # type: ignore[union-attr]
        body = b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1],"data":[5]}]}'

        def not_tried() -> Any:
            """The answer to a request that does not load the model: it comes while the pause lasts, which doubles."""
            tried = loads(folder)
            with Http1(server.http) as client:
                answer = client.request("POST", "/v2/models/m/infer", body)
            assert answer.status == 503 and b"the weights are broken" in answer.body
            return answer if loads(folder) == tried else None

        answer = until(not_tried, "it is not tried again at once")
        assert b"it is tried again in" in answer.body and int(answer.headers["retry-after"]) >= 1
        assert not http.is_model_ready("m")
        (row,) = http.get_model_repository_index()
        assert row["state"] == "UNAVAILABLE" and "the weights are broken" in row["reason"]
        assert http.is_server_ready()
        (folder / "broken").unlink()
        until(lambda: _answers(http))
        assert http.is_model_ready("m")


def _answers(http: httpclient.InferenceServerClient) -> bool:
    try:
        return http_infer(http, "m") == [0, 1, 2]
    except InferenceServerException as error:
        assert "it is tried again in" in str(error), error
        return False


def test_a_request_waits_no_longer_than_the_server_lets_it(tmp_path: Path) -> None:
    folder = slow_model(tmp_path, "m")
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--load-wait-secs=0.2") as server,
        httpclient.InferenceServerClient(server.http) as http,
        latch(folder) as held,
    ):
        for ask in (lambda: http_infer(http, "m"), lambda: http.get_model_metadata("m")):
            with pytest.raises(InferenceServerException, match=r"not loaded within --load-wait-secs, 0\.2 s"):
                ask()
        held.open()
        until(lambda: document(server, "/v2/models/m/ready?loaded=true")[0] == 200)
        assert loads(folder) == 1


def test_a_version_that_is_not_loaded_is_refused_at_once(tmp_path: Path) -> None:
    """Another one is, so nothing will load it: whoever waited for it would wait in vain, and would keep the model."""
    folder = slow_model(tmp_path, "m")
    write_model(tmp_path, "asks", PYTHON.format("INPUT0", "OUTPUT0", "TYPE_INT32"), {"1/model.py": ASKS})
    write_model(tmp_path, "writes", PYTHON.format("PROMPT", "TEXT", "TYPE_STRING"), {"1/model.py": GENERATES})
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--load-wait-secs=600") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        assert http_infer(http, "m", model_version="1") == [0, 1, 2]
        assert document(server, "/v2/models/writes/generate", "POST", b'{"PROMPT":"a"}')[0] == 200
        shutil.copytree(folder / "1", folder / "2")
        shutil.copytree(tmp_path / "writes" / "1", tmp_path / "writes" / "2")
        for name in ("m", "writes"):
            http.load_model(name)
        assert http_infer(http, "m") == http_infer(http, "m", model_version="2") == [0, 1, 2]
        with pytest.raises(InferenceServerException, match="'m' version 1 is not at ready state"):
            http_infer(http, "m", model_version="1")
        with (
            grpcclient.InferenceServerClient(server.grpc) as grpc,
            pytest.raises(InferenceServerException, match="'m' version 1 is not at ready state"),
        ):
            grpc.infer("m", [grpc_input()], model_version="1")
        with pytest.raises(InferenceServerException, match="'m' version 3 is not found"):
            http_infer(http, "m", model_version="3")
        status, _ = document(server, "/v2/models/writes/versions/1/generate", "POST", b'{"PROMPT":"a"}')
        assert status == 503
        assert http_infer(http, "asks") == [0, 1, 0]
        assert on_demand(server, "m")["waiting"] == 0 and loads(folder) == 2


DECOUPLED = "model_transaction_policy { decoupled: true }"


def versions(server: ServerProcess, model: str) -> list[str]:
    _, rows = document(server, "/v2/repository/index", "POST")
    return [row["version"] for row in rows if row["name"] == model and "version" in row]


def test_what_was_loaded_is_what_is_known_of_a_model_that_is_put_away(tmp_path: Path) -> None:
    folder = slow_model(tmp_path, "m")
    once = slow_model(tmp_path, "once", DECOUPLED)
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--repository-poll-secs=0") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
            http_infer(http, "once")
        (once / "config.pbtxt").write_text(CONFIG)
        (folder / "1").rename(folder / "2")
        for name in ("once", "m"):
            http.load_model(name)
            http.unload_model(name)
        assert http_infer(http, "once") == [0, 1, 2]
        assert versions(server, "m") == ["2"]
        assert http.is_model_ready("m", "2") and not http.is_model_ready("m", "1")
        assert document(server, "/v2/models/m/labels", "POST", b'{"labels":{"stable":2}}')[0] == 200
        # what a call brings along is not what the next request loads
        http.load_model("m", config='{"model_transaction_policy":{"decoupled":true}}')
        http.unload_model("m")
        assert http_infer(http, "m") == [0, 1, 2]


def test_folders_that_change_while_models_are_away_are_read_again(tmp_path: Path) -> None:
    folder = slow_model(tmp_path, "m", DECOUPLED)
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--repository-poll-secs=1") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        with pytest.raises(InferenceServerException, match="decoupled transaction policy"):
            http_infer(http, "m")
        (folder / "config.pbtxt").write_text(
            CONFIG + 'parameters { key: "version_labels" value: { string_value: "stable=2" } }'
        )
        shutil.copytree(folder / "1", folder / "2")
        until(lambda: versions(server, "m") == ["2"])
        assert http.is_model_ready("m", "stable") and not http.is_model_ready("m", "1")
        assert loads(folder) == 0
        assert http_infer(http, "m", model_version="stable") == [0, 1, 2]


def test_explicit_mode_loads_marked_models_on_demand(tmp_path: Path) -> None:
    marked = slow_model(tmp_path, "marked", parameter("load", "on-demand"))
    slow_model(tmp_path, "plain")
    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=*") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        assert loads(marked) == 0 and loads(tmp_path / "plain") == 1
        http.unload_model("plain")
        with pytest.raises(InferenceServerException, match="has no available versions"):
            http_infer(http, "plain")
        assert http_infer(http, "marked") == [0, 1, 2]
        write_model(tmp_path, "wrong", identity_config(extra=parameter("load", "later")))
        with pytest.raises(
            InferenceServerException, match="parameter 'load' must be 'on-demand', got 'later'"
        ):
            http.load_model("wrong")


def test_behind_front_ends(tmp_path: Path) -> None:
    folders = [slow_model(tmp_path, name) for name in ("a", "b")]
    write_model(tmp_path, "writes", PYTHON.format("PROMPT", "TEXT", "TYPE_STRING"), {"1/model.py": GENERATES})
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--frontends=1") as server,
        httpclient.InferenceServerClient(server.http) as http,
        grpcclient.InferenceServerClient(server.grpc) as grpc,
    ):
        assert http.is_model_ready("a")
        assert http_infer(http, "a") == [0, 1, 2]
        assert grpc.infer("b", [grpc_input()]).as_numpy("OUTPUT0").tolist() == [0, 1, 2]
        status, answer = document(server, "/v2/models/writes/generate", "POST", b'{"PROMPT":"hello"}')
        assert (status, answer["TEXT"]) == (200, "hello")
        assert [loads(folder) for folder in folders] == [1, 1]


def test_new_folders_are_found(tmp_path: Path) -> None:
    slow_model(tmp_path, "old")
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--repository-poll-secs=1", "--load-model=old") as server,
        httpclient.InferenceServerClient(server.http) as http,
    ):
        assert loads(tmp_path / "old") == 1, "it was named"
        slow_model(tmp_path, "new")
        until(lambda: http.is_model_ready("new"))
        assert http_infer(http, "new") == [0, 1, 2]


def test_a_shutdown_answers_those_who_wait(tmp_path: Path) -> None:
    folder = slow_model(tmp_path, "m")
    with latch(folder), ServerProcess(tmp_path, ON_DEMAND) as server:
        answers: list[Any] = []

        def ask() -> None:
            with httpclient.InferenceServerClient(server.http) as http:
                try:
                    answers.append(http_infer(http, "m"))
                except InferenceServerException as error:
                    answers.append(str(error))

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: on_demand(server, "m")["waiting"] == 1)
        server.stop()
        asking.join(60)
    assert len(answers) == 1 and "Server exiting" in answers[0]


def test_the_python_api_and_openai_load(tmp_path: Path) -> None:
    folder = slow_model(tmp_path, "m")
    openai_models.write_models(tmp_path)
    with neptrio.Server(tmp_path, model_control_mode="on-demand", http_port=0).running() as server:
        model = server.model("m")
        assert model.infer({"INPUT0": [1, 2]})["OUTPUT0"].dtype == np.int32, (
            "lists become what the model takes"
        )
        assert loads(folder) == 1
        address = server.addresses["http"]
        body = json.dumps({"model": "whole", "prompt": "hello"}).encode()
        with Http1(address) as client:
            answer = client.request("POST", "/v1/completions", body)
        assert answer.status == 200, answer.body


def test_a_sequence_waits_as_a_whole(tmp_path: Path) -> None:
    write_model(
        tmp_path,
        "sums",
        """backend: "sequence" max_batch_size: 1 sequence_batching { }
        input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]""",
    )
    first = slow_model(tmp_path, "first")
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--model-load-thread-count=1") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        Answers(client) as answers,
        latch(first) as held,  # whose load holds up the other until all of the sequence is there
        ThreadPoolExecutor(1) as pool,
    ):
        other = pool.submit(own_infer, server, "first")
        until(lambda: loads(first) == 1)
        for number in range(3):
            given = grpcclient.InferInput("INPUT", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[number + 1]], dtype=np.int32))
            client.async_stream_infer(
                "sums", [given], sequence_id=7, sequence_start=number == 0, sequence_end=number == 2
            )
        until(lambda: on_demand(server, "sums")["waiting"] == 3)
        held.open()
        assert [int(result.as_numpy("OUTPUT")[0][0]) for result in answers.results(3)] == [1, 3, 6]
        assert other.result(60) == [0, 1, 2]
        assert on_demand(server, "sums")["misses"] == 3


def test_the_load_that_is_waited_for_most_urgently_is_next(tmp_path: Path) -> None:
    first, plain, urgent = (slow_model(tmp_path, name) for name in ("first", "plain", "urgent"))
    with (
        ServerProcess(tmp_path, ON_DEMAND, "--model-load-thread-count=1") as server,
        latch(first) as held,
        latch(urgent) as held_urgent,
        ThreadPoolExecutor(3) as pool,
    ):
        answers = [pool.submit(own_infer, server, "first")]
        until(lambda: loads(first) == 1)
        for name, priority in (("plain", 0), ("urgent", 1)):
            answers.append(pool.submit(own_infer, server, name, priority=priority))
            until(lambda: phase(server, name) == "waiting for its turn to load")  # noqa: B023
        assert loads(plain) == loads(urgent) == 0, "one load at once"
        held.open()
        until(lambda: loads(urgent) == 1)
        assert loads(plain) == 0 and phase(server, "plain") == "waiting for its turn to load"
        held_urgent.open()
        assert [answer.result(60) for answer in answers] == [[0, 1, 2]] * 3
