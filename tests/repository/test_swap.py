"""Reloads and unloads under load, loads that never end, ensembles in motion, polling."""

from __future__ import annotations

import itertools
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.client.test_ensembles import ENSEMBLE
from tests.support.control import infer, load, post, refused, rows, settled
from tests.support.embedded import EmbeddedServer
from tests.support.gate import Gate
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.waiting import until

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
ENSEMBLE_NAMES = ("A", "B")
GATED = """
platform: "ensemble" max_batch_size: 8
input [ { name: "A" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] } ]
ensemble_scheduling { step [
  { model_name: "gate" model_version: -1
    input_map { key: "INPUT0" value: "A" } output_map { key: "OUTPUT0" value: "a" } },
  { model_name: "last" model_version: -1
    input_map { key: "INPUT0" value: "a" } output_map { key: "OUTPUT0" value: "Y" } } ] }
"""
STUCK = """
import os
class TritonPythonModel:
    def initialize(self, args):
        os.open({pipe!r}, os.O_RDONLY)  # until somebody writes, that is: for ever
    def execute(self, requests):
        return [None for _ in requests]
"""


def touch(folder: Path, number: int) -> None:
    os.utime(folder / "config.pbtxt", ns=(number * 10**9, number * 10**9))


class Storm:
    """Threads that infer until they are stopped; every failure is kept."""

    def __init__(self, server: ServerProcess, threads: int, jobs: list[tuple[str, tuple[str, str]]]) -> None:
        self.failures: list[str] = []
        self.answers = 0
        self._stop = threading.Event()
        modules = itertools.cycle([httpclient, grpcclient])
        self._threads = [
            threading.Thread(target=self._run, args=(server, next(modules), jobs[i % len(jobs)]))
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: ServerProcess, module: Any, job: tuple[str, tuple[str, str]]) -> None:
        address = server.http if module is httpclient else server.grpc
        with module.InferenceServerClient(address) as client:
            while not self._stop.is_set():
                try:
                    infer(client, *job)
                    self.answers += 1
                except InferenceServerException as error:
                    self.failures.append(str(error))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(300)


@pytest.mark.slow
def test_no_request_is_lost_in_reloads(tmp_path: Path) -> None:
    for name in ("m", "first"):
        write_model(tmp_path, name, identity_config(extra="dynamic_batching { }"))
    write_model(tmp_path, "second", identity_config())
    write_model(tmp_path, "ens", ENSEMBLE)
    with ServerProcess(tmp_path, *EXPLICIT) as server:
        storm = Storm(server, 8, [("m", ("INPUT0", "INPUT1")), ("ens", ENSEMBLE_NAMES)] * 2)
        with httpclient.InferenceServerClient(server.http) as client:
            for number in range(30):
                for name in ("m", ("first", "second", "ens")[number % 3]):
                    touch(tmp_path / name, number + 1)
                    client.load_model(name)
            before = storm.answers
            while storm.answers < before + 100 and not storm.failures:
                client.is_server_live()
            storm.stop()
            assert storm.failures == []
            for name in ("m", "first", "second", "ens"):
                assert settled(client, name) == [("1", "READY", "")]
            assert client.is_server_ready()


def four(name: str) -> Any:
    tensor = grpcclient.InferInput(name, [1, 4], "INT32")
    tensor.set_data_from_numpy(np.arange(4, dtype=np.int32).reshape(1, 4))
    return tensor


def gated(client: Any, name: str, tensor: str, count: int) -> list[Any]:
    tensors = [four(tensor)]
    answers: list[Any] = []
    for i in range(count):
        client.async_infer(
            name, tensors, callback=lambda result, error: answers.append(error or result), request_id=f"r{i}"
        )
    return answers


def test_unloading_lets_accepted_requests_finish(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "repository", tmp_path / "pipes", extra="")
    write_model(
        tmp_path / "repository",
        "last",
        identity_config(dims="-1", pairs=1, extra="dynamic_batching { max_queue_delay_microseconds: 1000 }"),
    )
    write_model(tmp_path / "repository", "through", GATED)
    with ServerProcess(tmp_path / "repository", *EXPLICIT) as server:
        with (
            httpclient.InferenceServerClient(server.http) as http,
            grpcclient.InferenceServerClient(server.grpc) as client,
        ):
            # one executes, others wait in the queue, and one walks an ensemble whose next step is unloaded
            answers = gated(client, "through", "A", 1)
            gate.started()
            answers_direct = gated(client, "gate", "INPUT0", 3)
            http.unload_model("last")
            assert rows(http, "last") == [("1", "UNLOADING", "")], "the ensemble still needs it"
            assert rows(http, "through") == [("1", "UNLOADING", "")]
            with pytest.raises(InferenceServerException, match="'through' has no available versions"):
                client.infer("through", [four("A")])
            with pytest.raises(InferenceServerException, match="'last' version 1 is not at ready state"):
                client.infer("last", [four("INPUT0")], model_version="1")
            until(lambda: stats(server, "gate")["live"]["accepted"] == 4, "four requests are accepted")
            http.unload_model("gate")
            assert rows(http, "gate") == [("1", "UNLOADING", "")]
            assert not http.is_server_ready()
            gate.go("k" * 8)
            until(lambda: len(answers) == 1 and len(answers_direct) == 3, "every request is answered")
            for answer in answers:
                np.testing.assert_array_equal(
                    answer.as_numpy("Y"), np.arange(4, dtype=np.int32).reshape(1, 4)
                )
            assert not any(isinstance(answer, Exception) for answer in answers_direct)
            for name in ("gate", "last", "through"):
                assert settled(http, name) == [("1", "UNAVAILABLE", "unloaded")]
            assert http.is_server_ready()
            http.load_model("last")
            assert rows(http, "through") == [("1", "READY", "")], "back, with the other model it needs"
            assert rows(http, "gate") == [("1", "READY", "")]
    gate.close()


@pytest.mark.slow
def test_a_load_that_never_ends_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    repository = tmp_path / "repository"
    config = 'backend: "python" ' + identity_config().partition(" ")[2].partition(" ")[2]
    folder = write_model(
        repository, "stuck", config, {"1/model.py": STUCK.format(pipe=str(tmp_path / "pipe"))}
    )
    write_model(repository, "m", identity_config())
    with ServerProcess(repository, "--model-control-mode=explicit") as server:
        outcome: list[str] = []

        def call() -> None:
            outcome.append(refused(load(server, "stuck"), 500))

        thread = threading.Thread(target=call)
        with httpclient.InferenceServerClient(server.http) as client:
            thread.start()
            until(lambda: rows(client, "stuck") == [("1", "LOADING", "")], "it loads")
            client.load_model("m")
            infer(client)
            assert not client.is_server_ready()
            client.unload_model("stuck")
            thread.join(300)
            assert outcome == [
                "Newer operation has been applied to the model lifecycle, current load operation is out-dated."
            ]
            assert rows(client, "stuck") == [("1", "UNAVAILABLE", "unloaded")]
            (folder / "1" / "model.py").write_text(
                "class TritonPythonModel:\n    def execute(self, r): return []\n"
            )
            client.load_model("stuck")
            assert rows(client, "stuck") == [("1", "READY", "")]
            (folder / "1" / "model.py").write_text(STUCK.format(pipe=str(tmp_path / "pipe")))
            assert load(server, "stuck", **{"async": True}).status == 200
            assert rows(client, "stuck") == [("1", "READY", "")], "the old one serves"
        assert server.stop() == 0, "neither stuck thread holds the shutdown up"


def test_duplicates_are_not_loaded(tmp_path: Path) -> None:
    for repository in ("x", "y"):
        write_model(tmp_path / repository, "both", identity_config())
    write_model(tmp_path / "y", "m", identity_config())
    flags = (f"--model-repository={tmp_path / 'y'}", "--exit-on-error=false")
    with ServerProcess(tmp_path / "x", *flags) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            assert client.get_model_repository_index() == [
                {
                    "name": "both",
                    "state": "UNAVAILABLE",
                    "reason": "model appears in two or more repositories",
                },
                {"name": "m", "version": "1", "state": "READY"},
            ]
            text = "explicit model load / unload is not allowed without --model-control-mode=explicit"
            assert refused(post(server, "models/m/unload"), 503) == text


def test_polling(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    settings = {"model_control_mode": "poll", "repository_poll_secs": 3600.0, "strict_readiness": True}
    with EmbeddedServer(tmp_path, exit_on_error=False, **settings) as server:
        manager = server.server.repository

        def poll() -> dict[str, Any]:
            server.run(manager.poll_once)
            return {row["name"]: row for row in server.ask(manager.index, False)}

        first = server.ask(manager.lookup, "m")
        assert poll()["m"]["state"] == "READY" and server.ask(manager.lookup, "m") is first
        write_model(tmp_path, "new", identity_config())
        assert poll()["new"]["state"] == "READY"
        (tmp_path / "m" / "config.pbtxt").write_text("oops")
        assert poll()["m"]["state"] == "READY" and server.ask(manager.lookup, "m") is first
        (tmp_path / "m" / "config.pbtxt").write_text(identity_config(max_batch_size=2))
        poll()
        assert server.ask(manager.lookup, "m").max_batch_size == 2
        write_model(tmp_path, "broken", 'backend: "nosuch"')
        row = poll()["broken"]
        assert row["state"] == "UNAVAILABLE" and "nosuch" in row["reason"]
        (tmp_path / "new" / "config.pbtxt").unlink()
        (tmp_path / "new" / "1").rmdir()
        (tmp_path / "new").rmdir()
        assert "new" not in poll()
        # an ensemble whose model comes later
        write_model(tmp_path, "ens", ENSEMBLE)
        assert poll()["ens"].get("state") != "READY"
        write_model(tmp_path, "first", identity_config())
        write_model(tmp_path, "second", identity_config())
        poll()
        assert poll()["ens"]["state"] == "READY"
