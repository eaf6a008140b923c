"""Instance groups and versions that change while a model serves: nothing is swapped, nothing is lost."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from tests.repository.test_control import load, post, refused, rows
from tests.sequences.models import Caller, rest, sequence_config
from tests.support import onnx_models
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

EXPLICIT = ("--model-control-mode=explicit", "--load-model=*")
CPU = "KIND_CPU"
# says which instance of which process answered, and writes down what becomes of it
WITNESS = """
import json, os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name = args["model_instance_name"]
        self.version = int(args["model_version"])
        self.log = config["parameters"]["log"]["string_value"]
        asked = sum(group["count"] for group in config["instance_group"])
        self.write(f"start {self.name} of {asked}")
        if asked == 3 and self.name.endswith("_2"):
            raise ValueError("no third one today")

    def write(self, line):
        with open(self.log, "a") as file:
            file.write(f"{self.version} {line}\\n")

    def execute(self, requests):
        answer = np.array([[os.getpid(), id(self) % 2**31, self.version]], dtype=np.int64)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("WHO", answer)]) for _ in requests]

    def finalize(self):
        self.write(f"stop {self.name}")
"""
WITNESS_CONFIG = """
backend: "python" max_batch_size: 4
input [ { name: "X" data_type: TYPE_INT32 dims: [ -1 ] } ]
output [ { name: "WHO" data_type: TYPE_INT64 dims: [ 3 ] } ]
parameters { key: "log" value { string_value: "LOG" } }
"""
KERNEL = 'extern "C" __global__ void run(const int* x, int* y) { y[threadIdx.x] = x[threadIdx.x]; }'


def witness(repository: Path, name: str, extra: str = "", versions: tuple[int, ...] = (1,)) -> Path:
    log = repository.parent / f"{name}.log"
    log.touch()
    text = WITNESS_CONFIG.replace("LOG", str(log)) + extra
    write_model(repository, name, text, {f"{v}/model.py": WITNESS for v in versions}, versions)
    return log


def groups(*counts: int, **more: Any) -> list[dict[str, Any]]:
    return [{"count": count, "kind": CPU, "name": f"g{i}", **more} for i, count in enumerate(counts)]


def regroup(server: ServerProcess, name: str, instance_group: Any = None, **fields: Any) -> None:
    """Loads a model with its own configuration and other instance groups (or other fields)."""
    with httpclient.InferenceServerClient(server.http) as client:
        config = client.get_model_config(name)
        if instance_group is not None:
            config["instance_group"] = instance_group
        reply = load(server, name, config=json.dumps({**given(config), **fields}))
        assert reply.status == 200, reply.body


def given(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration as a client may send it back."""
    return {key: value for key, value in config.items() if value not in ([], {}, "", None)}


def stats(server: ServerProcess, name: str, version: str = "") -> dict[str, Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        found: dict[str, Any] = client.get_inference_statistics(name, version)["model_stats"][-1]
        return found


class Load:
    """Threads that call a model until they are stopped; every failure is kept."""

    def __init__(self, server: ServerProcess, job: Callable[[Any, Any], None], threads: int = 4) -> None:
        self.failures: list[str] = []
        self.answers = itertools.count()
        self.done = 0
        self._stop = threading.Event()
        modules = itertools.cycle([httpclient, grpcclient])
        self._threads = [
            threading.Thread(target=self._run, args=(server, next(modules), job)) for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, server: ServerProcess, module: Any, job: Callable[[Any, Any], None]) -> None:
        address = server.http if module is httpclient else server.grpc
        with module.InferenceServerClient(address) as client:
            while not self._stop.is_set():
                try:
                    job(module, client)
                    self.done = next(self.answers) + 1
                except (InferenceServerException, AssertionError) as error:
                    self.failures.append(str(error))

    def more(self, count: int = 20) -> None:
        """Waits for `count` further answers."""
        before = self.done
        until(lambda: self.done >= before + count or bool(self.failures), lambda: self.done)
        assert self.failures == []

    def stop(self) -> int:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert self.failures == []
        return next(self.answers)


def threads_of(server: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/task"))


def job(name: str, tensor: str, datatype: str, width: int, output: str = "") -> Callable[[Any, Any], None]:
    array = np.arange(width).astype({"FP32": np.float32, "INT32": np.int32}[datatype]).reshape(1, width)

    def call(module: Any, client: Any) -> None:
        given = module.InferInput(tensor, [1, width], datatype)
        given.set_data_from_numpy(array)
        result = client.infer(name, [given])
        if output:
            assert np.array_equal(result.as_numpy(output), array)

    return call


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


def test_instances_that_are_kept_are_the_very_same(tmp_path: Path) -> None:
    log = witness(tmp_path / "repository", "m", "instance_group { count: 2 kind: KIND_CPU }")
    with ServerProcess(tmp_path / "repository", *EXPLICIT) as server:
        assert lines(log) == ["1 start m_0_0 of 2", "1 start m_0_1 of 2"]
        regroup(server, "m", [{"count": 4, "kind": CPU, "name": "m_0"}])
        assert lines(log, 2) == ["1 start m_0_2 of 4", "1 start m_0_3 of 4"]
        regroup(server, "m", [{"count": 1, "kind": CPU, "name": "another name"}])
        until(lambda: len(lines(log)) == 7, lambda: lines(log))
        assert lines(log, 4) == ["1 stop m_0_1", "1 stop m_0_2", "1 stop m_0_3"], "the oldest one stays"
        # names of those that are left are not given again
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


def lines(log: Path, since: int = 0) -> list[str]:
    """What the model wrote after its first `since` lines, in alphabetical order."""
    return sorted(log.read_text().splitlines()[since:])


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
            until(lambda: "1 stop m_0_0" in lines(log), lambda: lines(log))
            assert lines(log) == [
                "1 start m_0_0 of 1",
                "1 stop m_0_0",
                "2 start m_0_0 of 1",
                "3 start m_0_0 of 1",
            ]
            assert stats(server, "m", "2")["inference_count"] == 2
            assert [row[:2] for row in rows(client, "m")] == [
                ("1", "UNAVAILABLE"),
                ("2", "READY"),
                ("3", "READY"),
            ]
            assert client.get_model_config("m", "2")["version_policy"] == policy
            # both at once, and a version that stays although the latest one goes
            regroup(server, "m", groups(2), version_policy={"specific": {"versions": [1, 2]}})
            assert who("1") != first and who()[2] == 2
            until(lambda: "3 stop m_0_0" in lines(log), lambda: lines(log))
            assert stats(server, "m", "2")["inference_count"] == 3
            assert len([line for line in lines(log) if line.startswith("2 start")]) == 2


def test_a_new_version_folder_does_not_disturb_the_others(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    log = witness(repository, "m", "version_policy { all { } }")
    with ServerProcess(repository, *EXPLICIT) as server:
        (repository / "m" / "2").mkdir()
        (repository / "m" / "2" / "model.py").write_text(WITNESS)
        assert load(server, "m").status == 200
        assert lines(log) == ["1 start m_0_0 of 1", "2 start m_0_0 of 1"]
        # a changed file is a reload of all
        os.utime(repository / "m" / "1" / "model.py", ns=(1, 1))
        assert load(server, "m").status == 200
        until(lambda: len(lines(log)) == 6, lambda: lines(log))


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
        thread.join(20)
        assert "out-dated" in refused(replies[0], 500)
        until(lambda: rows(client, "m")[0][1] == "UNAVAILABLE", lambda: rows(client, "m"))
        assert server.stop() == 0


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


# ------------------------------------------------------------ sequences


def sums(server: ServerProcess, model: str) -> tuple[Caller, Callable[..., int]]:
    caller = Caller(server, "grpc")

    def call(sequence: Any, flags: str, value: int) -> int:
        return int(caller(model, sequence, flags, value)["OUTPUT"])

    return caller, call


def listing(server: ServerProcess, model: str) -> dict[str, Any]:
    status, found = rest(server, "GET", f"/v2/models/{model}/sequences")
    assert status == 200
    return dict(found)


@pytest.fixture(scope="module")
def sequences(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("sequences")
    one = "instance_group { count: 3 kind: KIND_CPU }"
    for name in ("direct", "storm_direct"):
        write_model(repository, name, sequence_config("direct { }", 1, extra=one))
    for name in ("oldest", "storm_oldest"):
        write_model(repository, name, sequence_config("oldest { max_candidate_sequences: 1 }", 4, extra=one))
    with ServerProcess(repository, *EXPLICIT) as process:
        yield process


@pytest.mark.parametrize("model", ["direct", "oldest"])
def test_live_sequences_finish_on_the_instances_they_have(sequences: ServerProcess, model: str) -> None:
    """Three sequences on three instances; then there is one instance, then there are two."""
    caller, call = sums(sequences, model)
    with caller:
        for id in (1, 2, 3):
            assert call(id, "s", id) == id
        regroup(sequences, model, groups(1))
        found = listing(sequences, model)
        assert (found["slots"], found["slots_used"], found["live"]) == (1, 3, 3)
        where = {row["id"]: row["instance"] for row in found["sequences"]}
        for id in (1, 2, 3):
            assert call(id, "", 10) == id + 10, "a live sequence lost its state"
        assert {row["id"]: row["instance"] for row in listing(sequences, model)["sequences"]} == where
        # the fourth one waits until the one instance that is left is free
        late = threading.Thread(target=call, args=(4, "s", 4))
        late.start()
        until(lambda: listing(sequences, model)["backlog"] == 1, lambda: listing(sequences, model))
        for id in (3, 2):
            assert call(id, "e", 100) == id + 110
            assert listing(sequences, model)["backlog"] == 1, "a retired instance gave its slot away"
        assert listing(sequences, model)["slots_used"] == 1
        # a new instance has room for it at once
        regroup(sequences, model, groups(2))
        late.join(20)
        found = listing(sequences, model)
        assert (found["slots"], found["slots_used"], found["backlog"]) == (2, 2, 0)
        assert call(4, "e", 1) == 5 and call(1, "e", 100) == 111
        regroup(sequences, model, groups(3))
        found = listing(sequences, model)
        assert (found["slots"], found["slots_used"], found["sequences"]) == (3, 0, [])


@pytest.mark.parametrize("model", ["storm_direct", "storm_oldest"])
def test_sequences_run_on_through_every_change(sequences: ServerProcess, model: str) -> None:
    numbers = itertools.count(1)
    threads = threads_of(sequences)

    def sequence(module: Any, client: Any) -> None:
        id, total = next(numbers), 0
        length = 2 + id % 5
        for position in range(length):
            tensor = module.InferInput("INPUT", [1, 1], "INT32")
            tensor.set_data_from_numpy(np.array([[id + position]], dtype=np.int32))
            total += id + position
            result = client.infer(
                model,
                [tensor],
                sequence_id=id,
                sequence_start=position == 0,
                sequence_end=position == length - 1,
            )
            assert result.as_numpy("OUTPUT")[0, 0] == total
            assert result.as_numpy("CORRID")[0, 0] == id

    storm = Load(sequences, sequence, 6)
    for count in (1, 4, 2, 1, 3, 2, 5, 1, 4, 3):
        regroup(sequences, model, groups(count))
        storm.more(8)
    done = storm.stop()
    found = listing(sequences, model)
    assert (found["slots"], found["slots_used"], found["live"]) == (3, 0, 0)
    assert stats(sequences, model)["inference_count"] == sum(2 + id % 5 for id in range(1, done + 1))
    until(lambda: threads_of(sequences) <= threads + 2, lambda: (threads, threads_of(sequences)))


def test_a_python_sequence_model_hears_of_the_end_before_it_is_finalized(tmp_path: Path) -> None:
    code = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
    def say(self, line):
        with open(LOG, "a") as file:
            file.write(f"{line} {self.name}\\n")
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[1]], np.int32))]) for _ in requests]
    def on_sequence_end(self, id, reason):
        self.say(f"{id} {reason}")
    def finalize(self):
        self.say("stop")
"""
    log = tmp_path / "log"
    log.touch()
    write_model(
        tmp_path / "repository",
        "m",
        'backend: "python" max_batch_size: 1 input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ -1 ] } ] '
        'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
        "sequence_batching { max_sequence_idle_microseconds: 60000000 direct { } } "
        "instance_group { count: 3 kind: KIND_CPU }",
        {"1/model.py": code.replace("LOG", repr(str(log)))},
    )
    with ServerProcess(tmp_path / "repository", *EXPLICIT) as server:
        caller, call = sums(server, "m")
        with caller:
            for id in (1, 2, 3):
                call(id, "s", 0)
            regroup(server, "m", [{"count": 1, "kind": CPU, "name": "m_0"}])
            call(2, "e", 0)
            until(lambda: "stop m_0_1" in log.read_text(), log.read_text)
            assert log.read_text().splitlines() == ["2 ended m_0_1", "stop m_0_1"]
            assert rest(server, "POST", "/v2/models/m/sequences/3/end")[0] == 200
            until(lambda: "stop m_0_2" in log.read_text(), log.read_text)
            assert log.read_text().splitlines()[2:] == ["3 evicted m_0_2", "stop m_0_2"]
            regroup(server, "m", [{"count": 2, "kind": CPU, "name": "m_0"}])
            regroup(server, "m", [{"count": 1, "kind": CPU, "name": "m_0", "rate_limiter": {"priority": 2}}])
            call(1, "", 0)
            assert post(server, "models/m/unload").status == 200
            until(lambda: "unloaded" in log.read_text(), log.read_text)
            until(lambda: log.read_text().count("stop m_0") == 5, log.read_text)
            lines = log.read_text().splitlines()  # the other instances end at the same time
            assert lines.index("1 unloaded m_0_0") < lines.index("stop m_0_0")
