"""Sequences under load: the accounts add up in every snapshot, and the rate limiter is obeyed."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritonclient.utils import InferenceServerException

from tests.sequences.models import Caller, rest, sequence_config
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats

STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
PARAMETER = 'parameters {{ key: "{}" value {{ string_value: "{}" }} }}'
STRATEGIES = {
    "direct": "direct { }",
    "direct_waits": "direct { max_queue_delay_microseconds: 2000 minimum_slot_utilization: 0.7 }",
    "oldest": "oldest { max_candidate_sequences: 6 max_queue_delay_microseconds: 500 }",
    "oldest_ordered": "oldest { max_candidate_sequences: 6 preserve_ordering: true }",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    repository = tmp_path_factory.mktemp("storm")
    for name, strategy in STRATEGIES.items():
        slow = PARAMETER.format("execute_delay_ms", "1") + PARAMETER.format("fail_value", "-1")
        write_model(
            repository,
            name,
            sequence_config(strategy, 4, extra=slow + "instance_group { count: 2 kind: KIND_CPU }"),
        )
    with ServerProcess(repository) as process:
        yield process


def places(got: dict[str, Any]) -> int:
    return sum(int(b["batch_size"] * b["compute_infer"]["count"]) for b in got["batch_stats"])


def check(got: dict[str, Any]) -> None:
    """What must hold in every snapshot, whatever is going on."""
    inference = got["inference_stats"]
    counts = {key: value["count"] for key, value in inference.items()}
    for stage in STAGES:
        assert counts[stage] == counts["success"] == got["percentiles"][stage]["count"]
    assert counts["success"] == got["inference_count"]
    assert inference["success"]["ns"] >= sum(inference[stage]["ns"] for stage in STAGES)
    assert sum(b["compute_infer"]["count"] for b in got["batch_stats"]) == got["execution_count"]
    assert places(got) >= got["inference_count"]
    held, made = got["live"], got["accounts"]
    assert held["accepted"] == held["queued"] + held["prepared"] + held["executing"]
    assert made["accepted"] == made["answered"] + made["failed"] + made["cancelled"] + held["accepted"]
    assert (held["inflight_bytes"] > 0) == (held["accepted"] > 0)


@pytest.mark.slow
@pytest.mark.parametrize("model", STRATEGIES)
def test_snapshots_are_consistent_during_a_storm(server: ServerProcess, model: str) -> None:
    """More sequences than slots, failing requests, refused ones; a reader checks all the while."""
    totals = {"answered": 0, "failed": 0, "refused": 0}
    lock = threading.Lock()
    problems: list[str] = []

    def load(seed: int) -> None:
        chance = random.Random(seed)
        own = dict.fromkeys(totals, 0)
        with Caller(server, "grpc" if seed % 2 else "http") as call:
            for round_ in range(12):
                id, total, length = seed * 1000 + round_ + 1, 0, chance.randint(2, 6)
                for position in range(length):
                    flags = "s" * (position == 0) + "e" * (position == length - 1)
                    value = -1 if chance.random() < 0.1 else chance.randint(1, 9)
                    try:
                        got = call(model, id, flags, value)
                    except InferenceServerException as error:
                        own["failed"] += 1
                        if value != -1:
                            problems.append(str(error))
                        total = 0 if position == 0 else total
                        continue
                    own["answered"] += 1
                    total += value
                    if (got["OUTPUT"], got["CORRID"]) != (total, id):
                        problems.append(f"{id}: {got} instead of {total}")
                try:
                    call(model, id, "", 1)
                    problems.append("a request was taken for a sequence that has ended")
                except InferenceServerException:
                    own["refused"] += 1
        with lock:
            for key, count in own.items():
                totals[key] += count

    threads = [threading.Thread(target=load, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    polls = 0
    while any(thread.is_alive() for thread in threads):
        check(stats(server, model, "percentiles=50&live=true"))
        polls += 1
    assert polls > 1 and problems == []
    got = stats(server, model, "percentiles=50&live=true")
    check(got)
    status, listing = rest(server, "GET", f"/v2/models/{model}/sequences")
    assert status == 200
    assert (listing["live"], listing["slots_used"], listing["backlog"]) == (0, 0, 0)
    assert got["inference_count"] == totals["answered"]
    assert got["inference_stats"]["fail"]["count"] == totals["failed"] > 0
    assert totals["refused"] == 16 * 12
    assert places(got) == got["inference_count"] + totals["failed"] + listing["null_requests"]
    assert (listing["null_requests"] > 0) == model.startswith("direct")


EXCLUSIVE = """
import os
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.name = args["model_instance_name"]
        self.sums = {}
        self.log = os.open(LOG, os.O_WRONLY | os.O_APPEND)

    def execute(self, requests):
        os.write(self.log, f"begin {self.name}\\n".encode())
        responses = []
        for request in requests:
            id = request.correlation_id()
            value = int(pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()[0, 0])
            if id:
                if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                    self.sums[id] = 0
                self.sums[id] += value
            output = np.array([[self.sums.get(id, 0)]], np.int32)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", output)]))
        os.write(self.log, f"end {self.name}\\n".encode())
        return responses
"""


@pytest.mark.slow
def test_sequences_take_their_turns(tmp_path: Path) -> None:
    """Direct and oldest share one resource: two instances each, never two executions at once."""
    log = tmp_path / "log"
    log.touch()
    limits = 'instance_group { count: 2 kind: KIND_CPU rate_limiter { resources { name: "R" count: 1 } } }'
    for name, strategy in (("direct", "direct { }"), ("oldest", "oldest { max_candidate_sequences: 4 }")):
        write_model(
            tmp_path / "repository",
            name,
            'backend: "python" max_batch_size: 2 input [ { name: "INPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
            'output [ { name: "OUTPUT" data_type: TYPE_INT32 dims: [ 1 ] } ] '
            f"sequence_batching {{ max_sequence_idle_microseconds: 60000000 {strategy} }} {limits}",
            {"1/model.py": EXCLUSIVE.replace("LOG", repr(str(log)))},
        )
    problems: list[str] = []
    together = threading.Barrier(12)  # so that both instances get sequences

    def load(server: ServerProcess, seed: int) -> None:
        model = ("direct", "oldest")[seed % 2]
        with Caller(server, "grpc" if seed % 3 else "http") as call:
            together.wait(60)
            for round_ in range(4):
                id = seed * 100 + round_ + 1
                for position in range(5):
                    flags = "s" * (position == 0) + "e" * (position == 4)
                    got = call(model, id, flags, position + id)["OUTPUT"]
                    if got != sum(p + id for p in range(position + 1)):
                        problems.append(f"{id} at {position}: {got}")

    with ServerProcess(
        tmp_path / "repository", "--rate-limit=execution_count", "--rate-limit-resource=R:1"
    ) as server:
        threads = [threading.Thread(target=load, args=(server, i)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert problems == []
        for name in ("direct", "oldest"):
            _, listing = rest(server, "GET", f"/v2/models/{name}/sequences")
            assert (listing["slots_used"], listing["live"], listing["backlog"]) == (0, 0, 0)
            assert stats(server, name)["inference_count"] == 6 * 4 * 5
    lines = log.read_text().splitlines()
    assert len(lines) >= 2 * 4 * 5
    for begin, end in zip(lines[::2], lines[1::2], strict=True):
        assert begin.startswith("begin ") and end == begin.replace("begin", "end"), "two executions at once"
    assert {line.split()[1] for line in lines} == {f"{m}_0_{i}" for m in ("direct", "oldest") for i in (0, 1)}
