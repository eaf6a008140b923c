"""Loads that return at once, what they are doing, and load times in the index."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.grpc import service_pb2

import neptrio
from neptrio.repository import loads
from tests.repository.test_hostile import PYTHON, WAITING, writer
from tests.support.control import infer, load, post, progress, refused
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def load_at_once(server: ServerProcess, name: str, kind: str) -> None:
    if kind == "http":
        assert load(server, name, **{"async": True}).status == 200
        return
    with grpcclient.InferenceServerClient(server.grpc) as client:
        request = service_pb2.RepositoryModelLoadRequest(model_name=name)
        request.parameters["async"].bool_param = True
        client._client_stub.RepositoryModelLoad(request)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_an_async_load_tells_its_progress(tmp_path: Path, kind: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    repository = tmp_path / "repository"
    code = WAITING.format(pipe=str(tmp_path / "pipe"))
    folder = write_model(repository, "slow", PYTHON, {"1/model.py": code})
    with ServerProcess(repository, "--model-control-mode=explicit") as server:
        assert progress(server, "slow") == {"name": "slow", "versions": []}
        load_at_once(server, "slow", kind)
        writers: list[int] = []
        until(lambda: writer(tmp_path / "pipe", writers), "it initializes")
        first = progress(server, "slow")
        assert first["versions"] == [{"version": "1", "state": "LOADING"}]
        assert first["loading"]["phase"] == "initializing instances" and first["loading"]["waiting"] == 0
        second = progress(server, "slow")
        assert 0 < first["loading"]["elapsed_ns"] < second["loading"]["elapsed_ns"]
        load_at_once(server, "slow", kind)
        assert progress(server, "slow")["loading"]["waiting"] == 1
        os.close(writers.pop())
        until(lambda: "loading" not in progress(server, "slow"), "it serves")
        (row,) = progress(server, "slow")["versions"]
        assert row["state"] == "READY" and row["load_duration_ns"] > 0
        (folder / "1" / "model.py").write_text(
            "class TritonPythonModel:\n    def initialize(self, a):\n        1 / 0\n    def execute(self, r):\n        pass\n"
        )
        load_at_once(server, "slow", kind)
        until(lambda: "last_error" in progress(server, "slow"), "the error is told")
        told = progress(server, "slow")
        assert "ZeroDivisionError" in told["last_error"] and "model.py" in told["last_error"]
        assert told["versions"][0]["state"] == "READY", "the old one serves"


@pytest.mark.slow
def test_warm_up_is_a_phase(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    warm = "model_warmup { name: 'w' batch_size: 1 " + "".join(
        f"inputs {{ key: 'INPUT{i}' value {{ data_type: TYPE_INT32 dims: [ 16 ] zero_data: true }} }} "
        for i in range(2)
    )
    code = WAITING.format(pipe=str(tmp_path / "pipe")).replace(
        "initialize(self, args)", "execute(self, requests)"
    )
    code = code.replace("    def execute(self, requests):\n        return", "        return")
    write_model(tmp_path / "repository", "slow", PYTHON + warm + "}", {"1/model.py": code})
    with ServerProcess(tmp_path / "repository", "--model-control-mode=explicit") as server:
        load_at_once(server, "slow", "http")
        writers: list[int] = []
        until(lambda: writer(tmp_path / "pipe", writers), "it executes the sample")
        assert progress(server, "slow")["loading"]["phase"] == "warming up"
        os.close(writers.pop())
        until(lambda: "loading" not in progress(server, "slow"), "the load has ended")


@pytest.mark.slow
def test_load_times_in_the_index(tmp_path: Path) -> None:
    write_model(tmp_path, "m", identity_config())
    write_model(tmp_path, "n", identity_config())
    before = int(time.time() * 1000)
    with ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server:
        plain = [{"name": "m", "version": "1", "state": "READY"}, {"name": "n"}]
        assert json.loads(post(server, "index").body) == plain
        for path, body in (("index?timings=true", b""), ("index", {"timings": True})):
            row, other = json.loads(post(server, path, body).body)
            assert other == {"name": "n"} and 0 < row["load_duration_ns"] < 60 * 10**9
            assert before <= row["loaded_at"] <= int(time.time() * 1000)
        (row,) = json.loads(post(server, "index", {"timings": True, "ready": True}).body)
        assert row["name"] == "m"
        assert "non-boolean" in refused(post(server, "index", {"timings": "yes"}), 400)
        with httpclient.InferenceServerClient(server.http) as client:
            infer(client)
            assert client.get_model_repository_index() == plain
        with grpcclient.InferenceServerClient(server.grpc) as grpc:
            assert [m.name for m in grpc.get_model_repository_index().models] == ["m", "n"]
            threads = [threading.Thread(target=load, args=(server, "n")) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(300)
        assert progress(server, "n")["versions"][0]["state"] == "READY"


def test_a_load_that_takes_long_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loads, "SLOW_SECONDS", 1e-9)  # it is always too late to wait
    said = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.getMessage().startswith("loading 'waits' since "):
                phases.append(record.getMessage().rpartition(": ")[2])
                if phases[-1] == "initializing instances":
                    said.set()

    phases: list[str] = []
    server = neptrio.Server()

    @server.function
    class waits:
        def __init__(self) -> None:
            assert said.wait(60)

        def __call__(self, x: int) -> int:
            return x

    handler = Heard()
    log = logging.getLogger("neptrio.repository")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        with server.running() as running:
            assert running.model("waits").infer({"x": [2]})["OUTPUT"] == 2
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    order = [
        "waiting for its turn",
        "reading the configuration",
        "loading files",
        "initializing instances",
        "taking over",
    ]
    assert phases == sorted(phases, key=order.index)
