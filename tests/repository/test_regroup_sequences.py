"""Instance groups that change while sequences live: none of them is moved, cut off or forgotten."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.repository.regrouping import (
    CPU,
    EXPLICIT,
    Load,
    groups,
    regroup,
    stats,
    threads_of,
)
from tests.sequences.models import Caller, listing, rest, sequence_config
from tests.support.control import post
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until


def sums(server: ServerProcess, model: str) -> tuple[Caller, Callable[..., int]]:
    caller = Caller(server, "grpc")

    def call(sequence: Any, flags: str, value: int) -> int:
        return int(caller(model, sequence, flags, value)["OUTPUT"])

    return caller, call


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


@pytest.mark.slow
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
        late.join(60)
        found = listing(sequences, model)
        assert (found["slots"], found["slots_used"], found["backlog"]) == (2, 2, 0)
        assert call(4, "e", 1) == 5 and call(1, "e", 100) == 111
        regroup(sequences, model, groups(3))
        found = listing(sequences, model)
        assert (found["slots"], found["slots_used"], found["sequences"]) == (3, 0, [])


@pytest.mark.slow
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


@pytest.mark.slow
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
