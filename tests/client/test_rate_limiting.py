"""--rate-limit as an operator sees it: resources shared by models, refusals at load."""

from __future__ import annotations

import os
import queue
import select
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.backends.python.models import isolated
from tests.sequences.models import Caller, flags, rest, sequence_config, tensors
from tests.support.gate import Gate
from tests.support.repository import identity_config, write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def limited(priority: int = 1, count: int = 1) -> str:
    resource = f'resources [ {{ name: "licence" global: true count: {count} }} ]'
    return (
        f"instance_group [ {{ rate_limiter {{ priority: {priority} {resource} }} }} ] dynamic_batching {{ }} "
    )


def tensor() -> list[Any]:
    made = grpcclient.InferInput("INPUT0", [1, 2], "INT32")
    made.set_data_from_numpy(np.zeros((1, 2), np.int32))
    return [made]


@pytest.mark.slow
def test_models_share_a_resource_and_take_turns_by_priority(tmp_path: Path) -> None:
    """One licence, two models with ten requests each: the favoured one gets two turns of three."""
    repository = tmp_path / "repository"
    gates = {
        name: Gate(repository, tmp_path / name, name, limited(priority), size=1)
        for name, priority in (("favoured", 1), ("other", 2))
    }
    done = threading.Semaphore(0)
    order: list[str] = []
    with (
        ServerProcess(repository, "--rate-limit=execution_count") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        sent = 0

        def callback(name: str) -> Any:
            def called(result: Any, error: Any) -> None:
                assert error is None
                done.release()

            return called

        client.async_infer("favoured", tensor(), callback("favoured"))
        gates["favoured"].started()  # it has the licence; everything else comes behind it
        for name in gates:
            for _ in range(9):
                client.async_infer(name, tensor(), callback(name))
                sent += 1
        for name in gates:  # both are in line once the server has seen all of it
            client.get_inference_statistics(name)
        gates["favoured"].go()
        waiting: Any = None
        for _ in range(sent):
            waiting = _whoever_starts(gates)
            order.append(waiting)
            gates[waiting].go()
        for _ in range(sent + 1):
            assert done.acquire(timeout=60)
    for gate in gates.values():
        gate.close()
    assert sorted(order) == ["favoured"] * 9 + ["other"] * 9
    head = order[:12]
    assert (head.count("favoured"), head.count("other")) in {(8, 4), (7, 5)}, order


def _whoever_starts(gates: dict[str, Gate]) -> str:
    ready, _, _ = select.select([gate.fileno() for gate in gates.values()], [], [], 60)
    (name,) = [name for name, gate in gates.items() if gate.fileno() in ready]
    gates[name].started()
    return name


@pytest.mark.slow
def test_a_resource_that_can_never_suffice_fails_the_load(tmp_path: Path) -> None:
    write_model(tmp_path, "greedy", identity_config(extra=limited(count=4)))
    with pytest.raises(
        AssertionError, match=r'Resource count for "licence" is limited to 3 .* minimum required count is 4'
    ):
        ServerProcess(tmp_path, "--rate-limit=execution_count", "--rate-limit-resource=licence:3:global")


def test_unlimited_models_go_on_beside_limited_ones(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    gate = Gate(repository, tmp_path / "gate", "gate", limited())
    write_model(repository, "plain", identity_config(dims="-1", pairs=1))
    with (
        ServerProcess(repository, "--rate-limit=execution_count") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        done = threading.Semaphore(0)
        client.async_infer("gate", tensor(), lambda result, error: done.release())
        gate.started()
        for _ in range(3):
            client.infer("plain", tensor())
        gate.go()
        assert done.acquire(timeout=60)
    gate.close()


CALLING = """
import os

class TritonPythonModel:
    def execute(self, requests):
        with open("{folder}/began", "wb"), open("{folder}/go", "rb"):
            pass
        answers = []
        for request in requests:
            inner = pb_utils.InferenceRequest(
                model_name="plain", inputs=request.inputs(), requested_output_names=["OUTPUT0"]).exec()
            answers.append(pb_utils.InferenceResponse(inner.output_tensors()))
        return answers
"""


@pytest.mark.slow
def test_a_call_to_a_model_that_needs_nothing_passes_those_in_line(tmp_path: Path) -> None:
    """`calling` holds the licence and calls `plain`; `gate` is first in line, and waits for the licence."""
    repository = tmp_path / "repository"
    for name in ("began", "go"):
        os.mkfifo(tmp_path / name)
    ports = (
        'input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ] '
        'output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ -1 ] } ]'
    )
    text = f'backend: "python" max_batch_size: 1 {ports} {limited()}'
    isolated(repository, "calling", CALLING.replace("{folder}", str(tmp_path)), text)
    gate = Gate(repository, tmp_path / "gate", "gate", limited())
    write_model(repository, "plain", identity_config(dims="-1", pairs=1))
    with (
        ServerProcess(repository, "--rate-limit=execution_count") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
    ):
        done: queue.Queue[Any] = queue.Queue()
        client.async_infer("calling", tensor(), lambda result, error: done.put(("calling", error)))
        with open(tmp_path / "began", "rb"):
            pass
        client.async_infer("gate", tensor(), lambda result, error: done.put(("gate", error)))
        client.get_inference_statistics("gate")  # it is in line once the server has seen all of it
        with open(tmp_path / "go", "wb"):
            pass
        assert done.get(timeout=60) == ("calling", None)
        gate.started()
        gate.go()
        assert done.get(timeout=60) == ("gate", None)
    gate.close()


@pytest.mark.parametrize("strategy", ["direct { }", "oldest { max_candidate_sequences: 4 }"])
def test_a_sequence_that_waits_for_its_turn_is_cancelled_at_once(tmp_path: Path, strategy: str) -> None:
    """The one that shared its batch goes on, and nobody keeps a turn that is not wanted."""
    repository = tmp_path / "repository"
    gate = Gate(repository, tmp_path / "gate", "gate", limited())
    turn = limited().partition("dynamic_batching")[0]
    write_model(repository, "sums", sequence_config(strategy, 4, extra=turn))
    with (
        ServerProcess(repository, "--rate-limit=execution_count") as server,
        grpcclient.InferenceServerClient(server.grpc) as client,
        Caller(server, "grpc") as call,
    ):
        answers: queue.Queue[Any] = queue.Queue()

        def hold() -> None:
            client.async_infer("gate", tensor(), lambda result, error: answers.put(error or result))
            gate.started()

        def send(id: int, value: int) -> Any:
            return client.async_infer(
                "sums",
                tensors(grpcclient, value),
                lambda result, error: answers.put(error or int(result.as_numpy("OUTPUT").flat[0])),
                sequence_id=id,
                **flags("s"),
            )

        def counts() -> tuple[int, int, int]:
            row = rest(server, "GET", "/v2/models/sums/stats?live=true")[1]["model_stats"][0]
            listing = rest(server, "GET", "/v2/models/sums/sequences")[1]
            return row["live"]["accepted"], row["inference_stats"]["fail"]["count"], listing["slots_used"]

        hold()
        gone, _ = send(1, 10), send(2, 20)
        until(lambda: counts() == (2, 0, 2), "both wait for the turn of the gate to end")
        gone.cancel()
        assert answers.get(timeout=60).status() == "StatusCode.CANCELLED"
        until(lambda: counts() == (1, 1, 1), "it is answered, and its slot is free")
        send(3, 30)
        until(lambda: counts() == (2, 1, 2), "another has it")
        gate.go()
        assert {answers.get(timeout=60) for _ in range(3)} > {20, 30}
        assert [call("sums", id, "e", 1)["OUTPUT"] for id in (2, 3)] == [21, 31]
        assert call("sums", 1, "se", 5)["OUTPUT"] == 5
        # all who wait leave
        hold()
        alone = send(4, 40)
        until(lambda: counts() == (1, 1, 1), "it waits")
        alone.cancel()
        assert answers.get(timeout=60).status() == "StatusCode.CANCELLED"
        until(lambda: counts() == (0, 2, 0), "nothing is left")
        gate.go()
        answers.get(timeout=60)
        for _ in range(2):
            hold()
            gate.go()
            answers.get(timeout=60)
        assert call("sums", 5, "se", 5)["OUTPUT"] == 5
    gate.close()
