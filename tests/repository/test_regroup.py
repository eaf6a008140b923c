"""Instance groups and versions that change while a model serves: nothing is swapped, nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.repository.regrouping import (
    CPU,
    EXPLICIT,
    WITNESS,
    Load,
    given,
    groups,
    job,
    lines,
    regroup,
    stats,
    threads_of,
    witness,
)
from tests.sequences.models import rest
from tests.support import onnx_models
from tests.support.control import load, post, refused, rows, settled
from tests.support.embedded import EmbeddedServer
from tests.support.latch import Latch
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

KERNEL = 'extern "C" __global__ void run(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }'


@pytest.fixture(scope="module")
def backends(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("backends") / "repository"
    write_model(repository, "plain", identity_config(dims="16", pairs=1))
    write_model(
        repository,
        "batching",
        identity_config(dims="16", pairs=1, extra="dynamic_batching { max_queue_delay_microseconds: 500 }"),
    )
    write_model(
        repository,
        "onnx",
        'backend: "onnxruntime" max_batch_size: 8 instance_group { kind: KIND_CPU count: 1 } dynamic_batching { }',
        {"1/model.onnx": onnx_models.identity()},
    )
    write_model(
        repository,
        "kernel",
        'backend: "kernel" max_batch_size: 8 input [ { name: "X" data_type: TYPE_INT32 dims: [ 16 ] } ] '
        'output [ { name: "Y" data_type: TYPE_INT32 dims: [ 16 ] } ] instance_group { kind: KIND_CPU } '
        'parameters { key: "kernels" value { string_value: "run<<<1, 16>>>(X, Y)" } }',
        {"1/model.cu": KERNEL},
    )
    witness(repository, "python", "dynamic_batching { }")
    witness(repository, "isolated", 'parameters { key: "isolation" value { string_value: "process" } }')
    with ServerProcess(repository, *EXPLICIT) as process:
        yield process


JOBS = {
    "plain": ("INPUT0", "INT32", 16, "OUTPUT0"),
    "batching": ("INPUT0", "INT32", 16, "OUTPUT0"),
    "onnx": ("X", "FP32", 4, "Y"),
    "kernel": ("X", "INT32", 16, "Y"),
    "python": ("X", "INT32", 4, ""),
    "isolated": ("X", "INT32", 4, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_counts_go_up_and_down_under_load(backends: ServerProcess, name: str) -> None:
    regroup(backends, name, groups(1))
    before, threads = stats(backends, name), threads_of(backends)
    storm = Load(backends, job(name, *JOBS[name]))
    storm.more()
    counts = (2, 4, 1, 2) if name == "isolated" else (4, 1, 2, 5, 2, 4)
    for count in counts:
        regroup(backends, name, groups(count))
        with httpclient.InferenceServerClient(backends.http) as client:
            assert [g["count"] for g in client.get_model_config(name)["instance_group"]] == [count]
        storm.more()
    regroup(backends, name, groups(1))
    answers = storm.stop()
    after = stats(backends, name)
    counted = after["inference_count"] - before["inference_count"]
    assert counted == answers, "statistics began anew, or a request was lost"
    assert after["inference_stats"]["fail"]["count"] == 0
    until(lambda: threads_of(backends) <= threads, lambda: (threads, threads_of(backends)))


@pytest.mark.slow
def test_instances_that_are_kept_are_the_very_same(tmp_path: Path) -> None:
    log = witness(tmp_path / "repository", "m", "instance_group { count: 2 kind: KIND_CPU }")
    explicit = {"model_control_mode": "explicit", "load_model": ("*",)}
    with EmbeddedServer(tmp_path / "repository", **explicit) as server:
        (model,) = server.server.repository.ready_models()
        assert lines(log) == ["1 start m_0_0 of 2", "1 start m_0_1 of 2"]
        regroup(server, "m", [{"count": 4, "kind": CPU, "name": "m_0"}])
        assert lines(log, 2) == ["1 start m_0_2 of 4", "1 start m_0_3 of 4"]
        regroup(server, "m", [{"count": 1, "kind": CPU, "name": "another name"}])
        until(lambda: len(lines(log)) == 7, lambda: lines(log))
        assert lines(log, 4) == ["1 stop m_0_1", "1 stop m_0_2", "1 stop m_0_3"], "the oldest one stays"
        # names of those that are left are not given again, but of those that are gone, which is a moment after the model's
        # own `finalize` wrote the lines above
        server.until(lambda: len(model.pool.all) == 1, "the stopped instances are gone")
        regroup(server, "m", [{"count": 2, "kind": CPU, "name": "m_0"}])
        assert lines(log, 7) == ["1 start m_0_1 of 2"]
        # what differs in more than name and count is another kind of instance
        limited = {"priority": 2, "resources": []}
        regroup(server, "m", [{"count": 2, "kind": CPU, "name": "m_0", "rate_limiter": limited}])
        until(lambda: len(lines(log)) == 12, lambda: lines(log))
        assert lines(log, 8) == [
            "1 start m_0_2 of 2",
            "1 start m_0_3 of 2",
            "1 stop m_0_0",
            "1 stop m_0_1",
        ]


@pytest.mark.slow
def test_instances_that_fail_to_start_change_nothing(tmp_path: Path) -> None:
    log = witness(tmp_path / "repository", "m", "instance_group { count: 1 kind: KIND_CPU }")
    with (
        ServerProcess(tmp_path / "repository", *EXPLICIT) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        storm = Load(server, job("m", "X", "INT32", 4), 2)
        storm.more()
        config = given(client.get_model_config("m"))
        config["instance_group"] = [{"count": 3, "kind": CPU, "name": "m_0"}]
        text = refused(load(server, "m", config=json.dumps(config)), 400)
        assert text.startswith("load failed for model 'm': version 1 is at UNAVAILABLE state: Internal: ")
        assert "no third one today" in text and "model.py" in text
        assert rows(client, "m") == [("1", "READY", "")]
        assert client.get_model_config("m")["instance_group"][0]["count"] == 1
        assert "no third one today" in rest(server, "GET", "/v2/repository/models/m")[1]["last_error"]
        storm.more()
        # the one that came up was finalized again
        until(lambda: "1 stop m_0_1" in lines(log), lambda: lines(log))
        regroup(server, "m", [{"count": 2, "kind": CPU, "name": "m_0"}])
        storm.more()
        answers = storm.stop()
        assert stats(server, "m")["inference_count"] == answers


@pytest.mark.parametrize("count", [1025, 10**9])
def test_absurd_counts_are_refused(tmp_path: Path, count: int) -> None:
    write_model(tmp_path, "m", identity_config())
    write_model(
        tmp_path, "absurd", identity_config(extra=f"instance_group {{ count: {count} kind: KIND_CPU }}")
    )
    with (
        ServerProcess(tmp_path, "--model-control-mode=explicit", "--load-model=m") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        wanted = f"expected at most 1024 instances, got {count}"
        assert wanted in refused(load(server, "absurd"), 400)
        config = given(client.get_model_config("m"))
        config["instance_group"] = groups(count)
        assert wanted in refused(load(server, "m", config=json.dumps(config)), 400)
        assert rows(client, "m") == [("1", "READY", "")]
        assert client.get_model_config("m")["instance_group"][0]["count"] == 1


@pytest.mark.slow
def test_versions_come_and_go_beside_those_that_stay(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    log = witness(repository, "m", "version_policy { specific { versions: [ 1, 2 ] } }", versions=(1, 2, 3))
    with ServerProcess(repository, *EXPLICIT) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            tensor = httpclient.InferInput("X", [1, 4], "INT32")
            tensor.set_data_from_numpy(np.zeros((1, 4), dtype=np.int32))

            def who(version: str = "") -> list[int]:
                found: list[int] = (
                    client.infer("m", [tensor], model_version=version).as_numpy("WHO")[0].tolist()
                )
                return found

            second = who("2")
            first = who("1")
            policy = {"specific": {"versions": [2, 3]}}
            regroup(server, "m", version_policy=policy)
            assert who("2") == second and who()[2] == 3, "version 2 is not the same instance"
            until(lambda: "1 stop m_0" in lines(log), lambda: lines(log))
            assert lines(log) == [
                "1 start m_0 of 1",
                "1 stop m_0",
                "2 start m_0 of 1",
                "3 start m_0 of 1",
            ]
            assert stats(server, "m", "2")["inference_count"] == 2
            # the model's own `finalize` wrote the line above: the server learns that it ended a little later
            until(lambda: rows(client, "m")[0][1] != "UNLOADING", lambda: rows(client, "m"))
            assert [row[:2] for row in rows(client, "m")] == [
                ("1", "UNAVAILABLE"),
                ("2", "READY"),
                ("3", "READY"),
            ]
            assert client.get_model_config("m", "2")["version_policy"] == policy
            # both at once, and a version that stays although the latest one goes
            regroup(server, "m", groups(2), version_policy={"specific": {"versions": [1, 2]}})
            assert who("1") != first and who()[2] == 2
            until(lambda: "3 stop m_0" in lines(log), lambda: lines(log))
            assert stats(server, "m", "2")["inference_count"] == 3
            assert len([line for line in lines(log) if line.startswith("2 start")]) == 2


@pytest.mark.slow
def test_a_new_version_folder_does_not_disturb_the_others(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    log = witness(repository, "m", "version_policy { all { } }")
    with ServerProcess(repository, *EXPLICIT) as server:
        (repository / "m" / "2").mkdir()
        (repository / "m" / "2" / "model.py").write_text(WITNESS)
        assert load(server, "m").status == 200
        assert lines(log) == ["1 start m_0 of 1", "2 start m_0 of 1"]
        # a changed file is a reload of all
        os.utime(repository / "m" / "1" / "model.py", ns=(1, 1))
        assert load(server, "m").status == 200
        until(lambda: len(lines(log)) == 6, lambda: lines(log))


@pytest.mark.slow
def test_an_unload_ends_a_change_that_never_ends(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stuck = WITNESS.replace(
        "        if asked == 3",
        f"        if asked == 2: os.open({str(pipe)!r}, os.O_RDONLY)\n        if asked == 3",
    )
    witness(repository, "m", "instance_group { count: 1 kind: KIND_CPU }")
    (repository / "m" / "1" / "model.py").write_text(stuck)
    with (
        ServerProcess(repository, *EXPLICIT) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        config = given(client.get_model_config("m"))
        config["instance_group"] = groups(2)
        replies: list[Any] = []
        thread = threading.Thread(target=lambda: replies.append(load(server, "m", config=json.dumps(config))))
        thread.start()
        until(
            lambda: "loading" in rest(server, "GET", "/v2/repository/models/m")[1],
            lambda: rest(server, "GET", "/v2/repository/models/m"),
        )
        log = tmp_path / "m.log"
        until(lambda: "of 2" in log.read_text(), log.read_text)
        job("m", "X", "INT32", 4)(httpclient, client)  # the old set serves
        assert post(server, "models/m/unload").status == 200
        thread.join(300)
        assert "out-dated" in refused(replies[0], 500)
        until(lambda: rows(client, "m")[0][1] == "UNAVAILABLE", lambda: rows(client, "m"))
        assert server.stop() == 0


@pytest.mark.slow
def test_an_unload_waits_for_instances_that_are_initialized_for_a_change(tmp_path: Path) -> None:
    """What the model has loaded is released after finalize() of its last instance, also of one that never served."""
    repository = tmp_path / "repository"
    held = WITNESS.replace(
        "        if asked == 3",
        f"        if asked == 2: pathlib.Path({str(tmp_path / 'latch')!r}).read_text()\n        if asked == 3",
    ).replace("import json, os", "import json, os, pathlib")
    in_process = 'parameters { key: "isolation" value { string_value: "none" } }'
    log = witness(repository, "m", in_process + " instance_group { count: 1 kind: KIND_CPU }")
    (repository / "m" / "1" / "model.py").write_text(held)
    with ServerProcess(repository, *EXPLICIT) as server, Latch(tmp_path / "latch") as latch:
        with httpclient.InferenceServerClient(server.http) as client:
            config = given(client.get_model_config("m"))
        config["instance_group"] = [{**config["instance_group"][0], "count": 2}]
        thread = threading.Thread(target=lambda: load(server, "m", config=json.dumps(config)))
        thread.start()
        until(lambda: "1 start m_0_1 of 2" in lines(log), lambda: lines(log))
        assert post(server, "models/m/unload").status == 200
        thread.join(300)
        until(lambda: "1 stop m_0_0" in lines(log), lambda: lines(log))
        with httpclient.InferenceServerClient(server.http) as client:
            for _ in range(50):  # the time in which it would be unloaded
                assert [state for _, state, _ in rows(client, "m")] == ["UNLOADING"]
        latch.open()
        server.until_logged("successfully unloaded 'm' version 1")
        assert "1 stop m_0_1" in lines(log)


@pytest.mark.slow
def test_an_unload_ends_a_change_whose_warm_up_never_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neptrio.execution.instance.BATCHES_SECONDS", 0.5)
    repository = tmp_path / "repository"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    stuck = WITNESS.replace(
        "        answer =",
        f"        if self.name != 'm_0_0': self.write(os.getpid()), os.open({str(pipe)!r}, os.O_RDONLY)\n        answer =",
    )
    sample = 'model_warmup { name: "s" batch_size: 1 inputs { key: "X" value { data_type: TYPE_INT32 dims: [ 1 ] zero_data: true } } }'
    log = witness(repository, "m", f"{sample} instance_group {{ count: 1 kind: KIND_CPU }}")
    (repository / "m" / "1" / "model.py").write_text(stuck)
    explicit = {"model_control_mode": "explicit", "load_model": ("*",)}
    with EmbeddedServer(repository, **explicit) as server:
        with httpclient.InferenceServerClient(server.http) as client:
            config = given(client.get_model_config("m"))
            config["instance_group"] = [{**config["instance_group"][0], "count": 2}]
            thread = threading.Thread(target=lambda: load(server, "m", config=json.dumps(config)))
            thread.start()
            (process,) = until(
                lambda: [int(line.split()[1]) for line in lines(log) if line.split()[1].isdigit()],
                lambda: lines(log),
            )
            client.unload_model("m")
            thread.join(300)
            assert settled(client, "m") == [("1", "UNAVAILABLE", "unloaded")]
        assert not Path(f"/proc/{process}").exists()


@pytest.mark.slow
def test_requests_of_a_retired_instance_finish_where_they_are(tmp_path: Path) -> None:
    """A decoupled model's sender outlives its batch; finalize() waits for the last response."""
    code = """
import os, threading
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.answer, args=(request.get_response_sender(), request.request_id())).start()
    def answer(self, sender, id):
        self.say(f"begin {id} {self.name}")
        with open(PIPE + id) as pipe:
            pipe.read()
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([[1]], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    def say(self, line):
        with open(LOG, "a") as file:
            file.write(line + "\\n")
    def finalize(self):
        self.say(f"stop {self.name}")
"""
    log = tmp_path / "log"
    log.touch()
    code = code.replace("PIPE", repr(str(tmp_path / "pipe"))).replace("LOG", repr(str(log)))
    write_model(
        tmp_path / "repository",
        "m",
        'backend: "python" max_batch_size: 4 input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ] '
        'output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ] '
        "model_transaction_policy { decoupled: true } instance_group { count: 2 kind: KIND_CPU }",
        {"1/model.py": code},
    )
    for id in "ab":
        os.mkfifo(tmp_path / f"pipe{id}")
    with (
        ServerProcess(tmp_path / "repository", *EXPLICIT) as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error or result))
        tensor = grpcclient.InferInput("X", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, 1), dtype=np.int32))
        client.async_stream_infer("m", [tensor], request_id="a")
        until(lambda: "begin a m_0_0" in log.read_text(), log.read_text)
        new = [{"count": 1, "kind": CPU, "name": "m_0", "rate_limiter": {"priority": 3, "resources": []}}]
        regroup(server, "m", new)
        until(lambda: "stop m_0_1" in log.read_text(), log.read_text)
        client.async_stream_infer("m", [tensor], request_id="b")
        until(lambda: "begin b m_0_2" in log.read_text(), log.read_text)
        assert "stop m_0_0" not in log.read_text(), "finalized while a response was due"
        (tmp_path / "pipea").write_text("go")
        until(lambda: len(answers) == 1, lambda: answers)
        assert answers[0].as_numpy("Y")[0, 0] == 1
        until(lambda: "stop m_0_0" in log.read_text(), log.read_text)
        (tmp_path / "pipeb").write_text("go")
        until(lambda: len(answers) == 2, lambda: answers)
        client.stop_stream()


LIMITED = """
instance_group [ { count: 2 kind: KIND_CPU rate_limiter { resources [ { name: "R" count: 1 } ] } } ]
parameters { key: "execute_delay_ms" value { string_value: "1" } }
"""


def limited(*counts: int, amount: int = 1) -> list[dict[str, Any]]:
    resources = [{"name": "R", "count": amount}]
    return groups(*counts, rate_limiter={"resources": resources, "priority": 1})


@pytest.mark.slow
@pytest.mark.parametrize("batching", ["", "dynamic_batching { }"], ids=["default", "dynamic"])
def test_the_rate_limiter_follows(tmp_path: Path, batching: str) -> None:
    write_model(tmp_path, "m", identity_config(pairs=1, extra=LIMITED + batching))
    write_model(tmp_path, "other", identity_config(pairs=1, extra=LIMITED))
    with (
        ServerProcess(
            tmp_path, *EXPLICIT, "--rate-limit=execution_count", "--rate-limit-resource=R:2"
        ) as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        calls = itertools.cycle([job(name, "INPUT0", "INT32", 16, "OUTPUT0") for name in ("m", "other")])
        storm = Load(server, lambda module, client: next(calls)(module, client))
        for number in range(12):
            regroup(server, "m", limited(1 + number % 3, amount=1 + number % 2))
            storm.more(10)
        # more than there will ever be: the old set stays
        config = given(client.get_model_config("m"))
        config["instance_group"] = limited(1, amount=3)
        assert 'Resource count for "R" is limited to 2' in refused(
            load(server, "m", config=json.dumps(config)), 400
        )
        storm.more()
        storm.stop()
