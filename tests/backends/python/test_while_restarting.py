"""Requests that arrive while a model's process is being started again: another instance executes them, or they wait."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient import http as httpclient
from tritonclient.utils import InferenceServerException

from tests.backends.python.models import config, python_model
from tests.support.server import ServerProcess
from tests.support.slow_models import latch, loads
from tests.support.statistics import stats
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# answers with the number of its process
MODEL = """
import os
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        folder = args["model_repository"]
        with open(folder + "/loads", "a") as loads:
            loads.write("x")
        if os.path.exists(folder + "/latch"):
            with open(folder + "/latch") as held:
                held.read()
        if os.path.exists(folder + "/broken"):
            raise ValueError("the weights are broken")

    def execute(self, requests):
        pid = np.array([os.getpid()], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", pid)]) for _ in requests]
"""
TWO = "instance_group { count: 2 kind: KIND_CPU }\n"
SEQUENCES = """sequence_batching { max_sequence_idle_microseconds: 60000000 control_input { name: "START"
  control { kind: CONTROL_SEQUENCE_START int32_false_true: [ 0, 1 ] } } }
"""


@contextmanager
def served(repository: Path, *flags: str, extra: str = "") -> Iterator[tuple[ServerProcess, Path]]:
    """A server with a model `m`, and the model's folder."""
    folder = python_model(repository, "m", MODEL, config("IN:TYPE_FP32:1", "OUT:TYPE_INT32:1", 0, extra))
    with ServerProcess(repository, *flags, failures="SIGKILL|the weights are broken|'m'") as server:
        yield server, folder


def asked(server: ServerProcess, **options: Any) -> int:
    """The number of the process that has answered."""
    given = httpclient.InferInput("IN", [1], "FP32")
    given.set_data_from_numpy(np.zeros(1, np.float32))
    with httpclient.InferenceServerClient(server.http, network_timeout=60) as client:
        return int(client.infer("m", [given], **options).as_numpy("OUT")[0])


def refused(server: ServerProcess, **options: Any) -> bool:
    """Whether a request is not accepted; one that fails with its process, or is answered, was."""
    try:
        asked(server, **options)
    except InferenceServerException as error:
        return error.status() == "503" and "is not at ready state" in error.message()
    return False


def processes(server: ServerProcess) -> list[int]:
    return [row["pid"] for row in stats(server, "m")["processes"]]


def accepted(server: ServerProcess) -> int:
    return int(stats(server, "m")["live"]["accepted"])


def ready(server: ServerProcess) -> bool:
    with httpclient.InferenceServerClient(server.http) as client:
        return bool(client.is_model_ready("m"))


def kill(server: ServerProcess, folder: Path, pid: int) -> None:
    """Ends a process of the model; the next is being started, and the server knows it. Something holds that up meanwhile."""
    before = loads(folder)
    os.kill(pid, signal.SIGKILL)
    until(lambda: loads(folder) == before + 1)
    until(lambda: not ready(server))


def state(server: ServerProcess) -> dict[str, Any]:
    with httpclient.InferenceServerClient(server.http) as client:
        (row,) = client.get_model_repository_index()
        return dict(row)


def test_they_wait_for_the_next_process(tmp_path: Path) -> None:
    with served(tmp_path) as (server, folder), ThreadPoolExecutor(3) as pool:
        old = asked(server)
        with latch(folder) as held:
            kill(server, folder, old)
            assert state(server)["state"] == "UNAVAILABLE"
            assert "SIGKILL" in state(server)["reason"]
            answers = [pool.submit(asked, server) for _ in range(3)]
            until(lambda: accepted(server) == 3)
            assert not any(answer.done() for answer in answers)
            held.open()
            (new,) = {answer.result(60) for answer in answers}
        assert new != old
        assert processes(server) == [new]
        until(lambda: ready(server))
        assert asked(server) == new


def test_the_queue_policy_holds_meanwhile(tmp_path: Path) -> None:
    batching = "dynamic_batching { default_queue_policy { default_timeout_microseconds: 1000 } }\n"
    folder = python_model(tmp_path, "m", MODEL, config("IN:TYPE_FP32:1", "OUT:TYPE_INT32:1", 4, batching))
    given = httpclient.InferInput("IN", [1, 1], "FP32")
    given.set_data_from_numpy(np.zeros((1, 1), np.float32))
    with (
        ServerProcess(tmp_path, failures="SIGKILL") as server,
        httpclient.InferenceServerClient(server.http) as client,
    ):
        (old,) = processes(server)
        with latch(folder):
            kill(server, folder, old)
            with pytest.raises(InferenceServerException, match="Request timeout expired"):
                client.infer("m", [given])
        until(lambda: ready(server))


def test_another_instance_executes_them(tmp_path: Path) -> None:
    with served(tmp_path, extra=TWO) as (server, folder):
        first, second = processes(server)
        with latch(folder) as held:
            kill(server, folder, first)
            assert {asked(server) for _ in range(20)} == {second}
            held.open()
            until(lambda: ready(server))
        third = (set(processes(server)) - {second}).pop()
        assert third != first
        with ThreadPoolExecutor(8) as pool:  # and then both do

            def both() -> bool:
                return set(pool.map(lambda _: asked(server), range(16))) == {second, third}

            until(both)


def test_an_instance_that_does_not_come_back_gets_none(tmp_path: Path) -> None:
    with served(tmp_path, extra=TWO) as (server, folder):
        first, second = processes(server)
        (folder / "broken").touch()
        os.kill(first, signal.SIGKILL)
        server.until_logged("failed: ValueError: the weights are broken")
        assert not ready(server)
        assert {asked(server) for _ in range(20)} == {second}
        (folder / "broken").unlink()
        until(lambda: ready(server))


STOPS = MODEL.replace(
    "        pid =",
    '        if requests[0].request_id() == "stop":\n            os.kill(os.getpid(), 19)\n        pid =',
)


def stopped(pid: int) -> bool:
    """Whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize("extra", ["", "dynamic_batching { preserve_ordering: true }"])
def test_another_instance_executes_what_was_sent_to_one_that_does_not_come_back(
    tmp_path: Path, extra: str
) -> None:
    folder = python_model(tmp_path, "m", STOPS, config("IN:TYPE_FP32:1", "OUT:TYPE_INT32:1", 0, TWO + extra))
    with (
        ServerProcess(tmp_path, failures="SIGKILL|the weights are broken") as server,
        ThreadPoolExecutor(4) as pool,
    ):
        first, second = processes(server)
        answers = []
        for count in (1, 2):
            answers.append(pool.submit(asked, server, request_id="stop"))
            until(lambda count=count: stopped(first) + stopped(second) == count)
        answers += [pool.submit(asked, server) for _ in range(2)]  # one is sent to each process
        until(lambda: accepted(server) == 4)
        (folder / "broken").touch()
        os.kill(first, signal.SIGKILL)
        server.until_logged("restart of m_0_0 failed")
        os.kill(second, signal.SIGCONT)
        failed = [error for answer in answers if (error := answer.exception(60)) is not None]
        assert len(failed) == 1 and "SIGKILL" in str(failed[0]), "the one that it was executing"
        assert {answer.result() for answer in answers if answer.exception() is None} == {second}
        found = stats(server, "m")
        counts = {name: row["count"] for name, row in found["inference_stats"].items()}
        assert (counts["success"], counts["fail"], found["live"]["accepted"]) == (3, 1, 0)


def test_they_fail_with_the_reason_when_the_next_process_does_not_start(tmp_path: Path) -> None:
    with served(tmp_path) as (server, folder), ThreadPoolExecutor(1) as pool:
        old = asked(server)
        with latch(folder) as held:
            kill(server, folder, old)
            answer: Future[int] = pool.submit(asked, server)
            until(lambda: accepted(server) == 1)
            (folder / "broken").touch()
            held.open()
            with pytest.raises(InferenceServerException, match="the weights are broken"):
                answer.result(60)
        until(lambda: refused(server))
        (folder / "broken").unlink()
        until(lambda: ready(server))
        assert asked(server) != old


@pytest.mark.parametrize("flags", [(), ("--rate-limit=execution_count",)])
def test_an_unload_answers_them_first(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with (
        served(tmp_path, "--model-control-mode=explicit", "--load-model=m", *flags) as (server, folder),
        httpclient.InferenceServerClient(server.http) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        old = asked(server)
        with latch(folder) as held:
            kill(server, folder, old)
            answer = pool.submit(asked, server)
            until(lambda: accepted(server) == 1)
            client.unload_model("m")
            held.open()
            assert answer.result(60) != old
        until(lambda: state(server)["state"] == "UNAVAILABLE" and state(server)["reason"] == "unloaded")


def test_a_model_of_sequences_waits_for_all_of_its_instances(tmp_path: Path) -> None:
    """A sequence belongs to an instance, so no other can execute its requests."""
    with served(tmp_path, extra=TWO + SEQUENCES) as (server, folder), ThreadPoolExecutor(1) as pool:
        old = asked(server, sequence_id=1, sequence_start=True, sequence_end=True)
        with latch(folder) as held:
            kill(server, folder, old)
            answer = pool.submit(asked, server, sequence_id=1, sequence_start=True)
            until(lambda: accepted(server) == 1)
            held.open()
            new = answer.result(60)
        assert new != old
        assert new in processes(server)
        (folder / "broken").touch()
        os.kill(new, signal.SIGKILL)
        until(lambda: refused(server, sequence_id=2, sequence_start=True))


STATE = """state { input_name: "SUM" output_name: "SUM_NOW" data_type: TYPE_FP32 dims: [ 1 ]
  initial_state { name: "zero" data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } }
"""
SUMS = """
import numpy as np

class TritonPythonModel:
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            value = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy()
            kept = pb_utils.get_input_tensor_by_name(request, "SUM")
            before = self.sums.get(request.correlation_id(), 0) if kept is None else kept.as_numpy()
            self.sums[request.correlation_id()] = now = before + value
            outputs = [pb_utils.Tensor("OUT", now.reshape(1)), pb_utils.Tensor("SUM_NOW", now.reshape(1))]
            answers.append(pb_utils.InferenceResponse(outputs[: 1 + (kept is not None)]))
        return answers
"""


@pytest.mark.parametrize("strategy", ["direct", "oldest"])
@pytest.mark.parametrize("implicit", [False, True])
def test_sequences_end_with_the_process_that_keeps_their_state(
    tmp_path: Path, implicit: bool, strategy: str
) -> None:
    extra = SEQUENCES.rstrip()[:-1] + strategy + " {} " + (STATE if implicit else "") + "}\n"
    python_model(tmp_path, "m", SUMS, config("IN:TYPE_FP32:1", "OUT:TYPE_FP32:1", 0, extra))

    def add(value: float, id: int, **options: Any) -> float:
        given = httpclient.InferInput("IN", [1], "FP32")
        given.set_data_from_numpy(np.full(1, value, np.float32))
        return float(client.infer("m", [given], sequence_id=id, **options).as_numpy("OUT")[0])

    with (
        ServerProcess(tmp_path, failures="SIGKILL") as server,
        httpclient.InferenceServerClient(server.http, network_timeout=60) as client,
    ):
        assert add(1, 7, sequence_start=True) == 1
        assert add(2, 7) == 3
        os.kill(processes(server)[0], signal.SIGKILL)
        server.until_logged("m_0 runs again")
        if implicit:
            assert add(3, 7) == 6
        else:
            with pytest.raises(
                InferenceServerException, match="sequence 7 to model 'm' must specify the START"
            ):
                add(3, 7)
            assert add(4, 7, sequence_start=True) == 4
            assert add(5, 7, sequence_end=True) == 9


CALLS_ITSELF = MODEL.replace(
    "        pid =",
    """        if requests[0].parameters().find("self") >= 0:
            inner = pb_utils.InferenceRequest(
                model_name="m", requested_output_names=["OUT"], inputs=[pb_utils.Tensor("IN", np.zeros(1, np.float32))]
            )
            answer = inner.exec()
            if answer.has_error():
                error = pb_utils.TritonError(answer.error().message())
                return [pb_utils.InferenceResponse([], error) for _ in requests]
        pid =""",
)


@pytest.mark.parametrize("queued", [False, True])
def test_a_call_of_its_own_model_does_not_wait_for_an_instance_that_is_given_up(
    tmp_path: Path, queued: bool
) -> None:
    assert CALLS_ITSELF != MODEL
    folder = python_model(tmp_path, "m", CALLS_ITSELF, config("IN:TYPE_FP32:1", "OUT:TYPE_INT32:1", 0, TWO))
    failures = "SIGKILL|the weights are broken|wait for itself"
    with ServerProcess(tmp_path, failures=failures) as server, ThreadPoolExecutor(1) as pool:
        first, second = processes(server)
        with latch(folder) as held:
            kill(server, folder, first)
            if queued:
                answer = pool.submit(asked, server, parameters={"self": True})
                until(lambda: accepted(server) == 2)
            (folder / "broken").touch()
            held.open()
        server.until_logged("failed: ValueError: the weights are broken")
        if not queued:
            answer = pool.submit(asked, server, parameters={"self": True})
        with pytest.raises(InferenceServerException, match="would wait for itself"):
            answer.result(60)
        assert asked(server) == second


def test_a_sequence_that_has_not_begun_is_not_gone_on_with(tmp_path: Path) -> None:
    """Its START fails with the process that does not start, so the next one knows nothing of it."""
    with served(tmp_path, extra=SEQUENCES) as (server, folder), ThreadPoolExecutor(1) as pool:
        old = asked(server, sequence_id=1, sequence_start=True, sequence_end=True)
        with latch(folder) as held:
            kill(server, folder, old)
            answer = pool.submit(asked, server, sequence_id=2, sequence_start=True)
            until(lambda: accepted(server) == 1)
            (folder / "broken").touch()
            held.open()
            with pytest.raises(InferenceServerException, match="the weights are broken"):
                answer.result(60)
        (folder / "broken").unlink()
        until(lambda: ready(server))
        with pytest.raises(InferenceServerException, match="sequence 2 to model 'm' must specify the START"):
            asked(server, sequence_id=2)
