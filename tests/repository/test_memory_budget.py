"""Models are put away for others, and when nobody asks for them (docs/on-demand.md)."""

from __future__ import annotations

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from neptrio.repository.room_line import PATIENCE_SECONDS
from tests.support.control import progress
from tests.support.http import Http1
from tests.support.latch import Latch
from tests.support.metrics import scrape, value
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.slow_models import parameter
from tests.support.waiting import until

MIB = 1 << 20
AT_ONCE = parameter("minimum_loaded_seconds", "0.001")
pytestmark = pytest.mark.slow

WAITS = """
import os
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]

    def execute(self, requests):
        open(os.path.join(self.folder, "begun"), "w").close()
        with open(os.path.join(self.folder, "latch")) as held:
            held.read()
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy())]
            )
            for request in requests
        ]
"""


def sized(folder: Path, mib: int) -> None:
    """A file of weights that takes no room on the disk."""
    with (folder / "1" / "weights.bin").open("wb") as file:
        file.truncate(mib * MIB)


def model(repository: Path, name: str, mib: int = 10, extra: str = AT_ONCE) -> None:
    """An identity model that counts as so large: half as much more before its load, since that is an estimate."""
    sized(
        write_model(repository, name, identity_config(dims="-1", max_batch_size=0, pairs=1, extra=extra)), mib
    )


def server(repository: Path, *flags: str) -> ServerProcess:
    return ServerProcess(repository, "--model-control-mode=on-demand", *flags)


def infer(client: httpclient.InferenceServerClient, name: str) -> None:
    given = httpclient.InferInput("INPUT0", [2], "INT32")
    given.set_data_from_numpy(np.arange(2, dtype=np.int32))
    assert client.infer(name, [given]).as_numpy("OUTPUT0").tolist() == [0, 1]


def own_infer(running: ServerProcess, name: str) -> None:
    with httpclient.InferenceServerClient(running.http) as client:
        infer(client, name)


def states(client: httpclient.InferenceServerClient) -> dict[str, str]:
    """READY, or the reason why not."""
    return {row["name"]: row.get("reason") or row["state"] for row in client.get_model_repository_index()}


def post(running: ServerProcess, name: str) -> Any:
    with Http1(running.http) as client:
        body = b'{"inputs":[{"name":"INPUT0","datatype":"INT32","shape":[1],"data":[5]}]}'
        return client.request("POST", f"/v2/models/{name}/infer", body)


def held_bytes(running: ServerProcess) -> tuple[int, int]:
    text = scrape(running)
    return int(value(text, "neptrio_demand_held_bytes")), int(value(text, "neptrio_demand_budget_bytes"))


def test_the_model_that_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    for name in "abcd":
        model(tmp_path, name)
    with (
        server(tmp_path, "--model-memory-budget=34MiB") as running,
        httpclient.InferenceServerClient(running.http) as client,
    ):
        for name in ("a", "b", "a", "c"):
            infer(client, name)
            used = time.time_ns() // 1_000_000
            until(lambda used=used: time.time_ns() // 1_000_000 > used)  # uses are told apart by milliseconds
        assert states(client)["b"] == "put away: room for 'c'"
        assert {states(client)[name] for name in "ac"} == {"READY"}
        infer(client, "d")
        assert states(client)["a"] == "put away: room for 'd'"
        held, budget = held_bytes(running)
        assert budget == 34 * MIB and 20 * MIB <= held <= budget
        infer(client, "b")
        assert client.get_inference_statistics("b")["model_stats"][0]["inference_count"] == 2
        assert client.is_server_ready()


def test_where_nothing_can_go_the_request_learns_who_holds_the_memory(tmp_path: Path) -> None:
    model(tmp_path, "kept", 10, parameter("keep_loaded", "true"))
    model(tmp_path, "asked", 10)
    model(tmp_path, "large", 100)
    with (
        server(tmp_path, "--model-memory-budget=20MiB") as running,
        httpclient.InferenceServerClient(running.http) as client,
    ):
        infer(client, "kept")
        answer = post(running, "asked")
        assert answer.status == 503 and int(answer.headers["retry-after"]) >= 1
        text = json.loads(answer.body)["error"]
        assert "there is no room for model 'asked', which takes about 15.0 MiB" in text
        assert re.search(r"is held by 'kept' 1\d\.\d MiB \(keep_loaded\)", text), text
        assert client.is_model_ready("asked"), "it has not failed"
        with pytest.raises(
            InferenceServerException, match=r"takes about 150\.0 MiB, more than --model-memory-budget"
        ):
            infer(client, "large")
        with pytest.raises(InferenceServerException, match="there is no room for model 'asked'"):
            client.get_model_metadata("asked")
        client.unload_model("kept")
        infer(client, "asked")


def test_a_reload_does_not_wait_for_the_model_that_it_is_to_replace(tmp_path: Path) -> None:
    """There is no room for both, and the old one serves until the new one does."""
    model(tmp_path, "big", 20)
    flags = ("--model-memory-budget=34MiB", "--load-wait-secs=600")
    with server(tmp_path, *flags) as running, httpclient.InferenceServerClient(running.http) as client:
        infer(client, "big")
        sized(tmp_path / "big", 21)
        with pytest.raises(InferenceServerException, match=r"no room for model 'big'.* is held by 'big'"):
            client.load_model("big")
        infer(client, "big")


STOPS_LATE = """
import os


class TritonPythonModel:
    def initialize(self, args):
        self.folder = args["model_repository"]
        if args["model_version"] == "2":
            open(os.path.join(self.folder, "failed"), "w").close()
            raise ValueError("not this version")

    def execute(self, requests):
        return []

    def finalize(self):
        with open(os.path.join(self.folder, "latch")) as held:
            held.read()
"""


def test_what_a_load_has_made_in_vain_counts_until_it_is_gone(tmp_path: Path) -> None:
    config = 'backend: "python" max_batch_size: 0 version_policy { all {} } '
    config += 'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
    config += parameter("isolation", "none")
    files = {f"{version}/model.py": STOPS_LATE for version in (1, 2)}
    folder = write_model(tmp_path, "late", config, files)
    sized(folder, 10)
    with (
        server(tmp_path, "--model-memory-budget=100MiB") as running,
        Latch(folder / "latch") as held,
        httpclient.InferenceServerClient(running.http) as client,
    ):
        with pytest.raises(InferenceServerException, match="not this version"):
            client.load_model("late")
        assert (folder / "failed").exists() and held_bytes(running)[0] >= 10 * MIB
        held.open()
        until(lambda: held_bytes(running)[0] == 0)


IMPORTS_LATE = """
import os

folder = os.path.dirname(os.path.dirname(__file__))
open(os.path.join(folder, "begun"), "w").close()
with open(os.path.join(folder, "latch")) as held:
    held.read()


class TritonPythonModel:
    def execute(self, requests):
        return []
"""


def test_a_load_that_was_given_up_counts_until_its_thread_has_ended(tmp_path: Path) -> None:
    config = 'backend: "python" max_batch_size: 0 '
    config += 'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
    config += parameter("isolation", "none")
    folder = write_model(tmp_path, "late", config, {"1/model.py": IMPORTS_LATE})
    sized(folder, 10)
    model(tmp_path, "asked", 12)
    with (
        server(tmp_path, "--model-memory-budget=34MiB", "--model-load-thread-count=1") as running,
        Latch(folder / "latch") as held,
        httpclient.InferenceServerClient(running.http) as client,
        ThreadPoolExecutor(2) as pool,
    ):
        late = pool.submit(own_load, running, "late")
        until((folder / "begun").exists)
        client.unload_model("late")
        with pytest.raises(InferenceServerException):
            late.result(60)
        assert held_bytes(running)[0] >= 26 * MIB
        asked = pool.submit(own_infer, running, "asked")
        told = "waiting for room, held by 'late' 26.0 MiB (its load was given up, and has not ended)"
        until(lambda: phase(running, "asked") == told)
        held.open()
        asked.result(60)
        until(lambda: held_bytes(running)[0] < 20 * MIB)


def test_a_burst_for_five_times_the_models_that_fit_is_answered(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(100)]
    for name in names:
        model(tmp_path, name, 1, "")
    with server(tmp_path, "--model-memory-budget=20MiB") as running:
        with ThreadPoolExecutor(len(names)) as pool:
            for done in [pool.submit(own_infer, running, name) for name in names]:
                done.result()
        with httpclient.InferenceServerClient(running.http) as client:
            found = list(states(client).values())
        assert 0 < found.count("READY") <= 20
        held, budget = held_bytes(running)
        assert held <= budget == 20 * MIB


def own_load(running: ServerProcess, name: str) -> None:
    with httpclient.InferenceServerClient(running.http) as client:
        client.load_model(name)


def phase(running: ServerProcess, name: str) -> str:
    """What the load of a model under way is doing."""
    return str(progress(running, name).get("loading", {"phase": ""})["phase"])


def test_a_model_with_requests_is_not_put_away(tmp_path: Path) -> None:
    config = """backend: "python" max_batch_size: 0
    input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
    output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] """
    config += parameter("isolation", "none") + AT_ONCE
    folder = write_model(tmp_path, "busy", config, {"1/model.py": WAITS})
    sized(folder, 10)
    model(tmp_path, "asked", 12)
    model(tmp_path, "small", 2)
    with (
        server(tmp_path, "--model-memory-budget=27MiB") as running,
        Latch(folder / "latch") as held,
        httpclient.InferenceServerClient(running.http) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        first = pool.submit(own_infer, running, "busy")
        until((folder / "begun").exists)
        second = pool.submit(own_infer, running, "asked")

        def told(name: str) -> dict[str, Any]:
            found: dict[str, Any] = progress(running, name).get("loading", {"phase": "", "elapsed_ns": 0})
            return found

        until(lambda: told("asked")["phase"].startswith("waiting for room, held by 'busy'"))
        assert "has requests under way" in told("asked")["phase"]
        assert states(client)["busy"] == "READY" and not second.done()
        until(lambda: told("asked")["elapsed_ns"] > 2e9 * PATIENCE_SECONDS)
        third = pool.submit(
            own_infer, running, "small"
        )  # there is room for it, but it does not pass who waits so long
        until(lambda: told("small")["phase"].startswith("waiting for room"))
        held.open()
        for answer in (first, second, third):
            answer.result(60)
        assert states(client) == {"busy": "put away: room for 'asked'", "asked": "READY", "small": "READY"}


def test_a_model_with_a_live_sequence_is_not_put_away(tmp_path: Path) -> None:
    folder = write_model(
        tmp_path,
        "sums",
        """backend: "sequence" max_batch_size: 1 sequence_batching { }
        input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]
        output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ]"""
        + AT_ONCE,
    )
    sized(folder, 10)
    model(tmp_path, "asked")
    with (
        server(tmp_path, "--model-memory-budget=20MiB") as running,
        httpclient.InferenceServerClient(running.http) as client,
        grpcclient.InferenceServerClient(running.grpc) as grpc,
    ):

        def step(value: int, **said: bool) -> int:
            given = grpcclient.InferInput("INPUT", [1, 1], "INT32")
            given.set_data_from_numpy(np.array([[value]], dtype=np.int32))
            return int(grpc.infer("sums", [given], sequence_id=7, **said).as_numpy("OUTPUT")[0][0])

        step(1, sequence_start=True)
        with pytest.raises(InferenceServerException, match=r"'sums' 1\d\.\d MiB \(has live sequences\)"):
            infer(client, "asked")
        assert step(2, sequence_end=True) == 3
        infer(client, "asked")
        assert states(client)["sums"] == "put away: room for 'asked'"


def test_idle_models_are_put_away_and_kept_ones_are_not(tmp_path: Path) -> None:
    idle = AT_ONCE + parameter("idle_unload_seconds", "0.1")
    model(tmp_path, "idle", 1, idle)
    model(tmp_path, "kept", 1, idle + parameter("keep_loaded", "true"))
    with server(tmp_path) as running, httpclient.InferenceServerClient(running.http) as client:
        infer(client, "kept")
        infer(client, "idle")
        until(lambda: states(client)["idle"] == "put away: idle for 0.1 s")
        infer(client, "idle")
        statistics = client.get_inference_statistics("idle")["model_stats"][0]
        assert statistics["inference_stats"]["success"]["count"] == 2
        until(lambda: states(client)["idle"] == "put away: idle for 0.1 s")
        assert states(client)["kept"] == "READY"
        text = scrape(running)
        assert 'neptrio_demand_put_away_total{model="idle"} 2\n' in text
        assert "neptrio_demand_budget_bytes" not in text


def test_the_models_of_an_ensemble_go_after_it(tmp_path: Path) -> None:
    model(tmp_path, "step")
    model(tmp_path, "asked")
    write_model(
        tmp_path,
        "whole",
        """platform: "ensemble" max_batch_size: 0
        input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
        output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]
        ensemble_scheduling { step [ { model_name: "step" model_version: -1
        input_map { key: "INPUT0" value: "INPUT0" } output_map { key: "OUTPUT0" value: "OUTPUT0" } } ] } """
        + AT_ONCE,
    )
    with (
        server(tmp_path, "--model-memory-budget=20MiB") as running,
        httpclient.InferenceServerClient(running.http) as client,
    ):
        infer(client, "whole")
        infer(client, "asked")
        found = states(client)
        assert found == {
            "asked": "READY",
            "step": "put away: room for 'asked'",
            "whole": "put away: room for 'asked'",
        }
        infer(client, "whole")
        assert states(client)["asked"] == "put away: room for 'step'"


def test_steps_that_do_not_fit_together_are_told_at_once(tmp_path: Path) -> None:
    steps = ""
    for name, given, made in (("first", "INPUT0", "between"), ("second", "between", "OUTPUT0")):
        model(tmp_path, name)
        steps += f"""step {{ model_name: "{name}" model_version: -1
            input_map {{ key: "INPUT0" value: "{given}" }} output_map {{ key: "OUTPUT0" value: "{made}" }} }} """
    tensor = "data_type: TYPE_INT32 dims: [ -1 ]"
    write_model(
        tmp_path,
        "whole",
        f"""platform: "ensemble" max_batch_size: 0 input {{ name: "INPUT0" {tensor} }}
        output {{ name: "OUTPUT0" {tensor} }} ensemble_scheduling {{ {steps} }} """,
    )
    flags = ("--model-memory-budget=19MiB", "--load-wait-secs=600")
    with server(tmp_path, *flags) as running, httpclient.InferenceServerClient(running.http) as client:
        told = r"takes about 15\.0 MiB beside other steps of 'whole', which waits for it: .* is held by '(first|second)' 1\d"
        for _ in range(2):
            with pytest.raises(InferenceServerException, match=told):
                infer(client, "whole")
        infer(client, "first")
        infer(client, "second")


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("gpu:0=50%", "expected a number of bytes"),
        ("cpu:0=1GiB", "expected a number of bytes"),
        ("much", "expected a number of bytes"),
        ("101%", "expected a number of bytes"),
    ],
)
def test_budgets_that_are_none(flag: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from neptrio.serving import settings_of

    with pytest.raises(SystemExit):
        settings_of([f"--model-memory-budget={flag}"])
    assert said in capsys.readouterr().err
