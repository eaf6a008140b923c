"""Branches of an ensemble run side by side; shown by holding them, not by the clock.

    IN -> left -> L -> after -> A --\\
    IN -> right -> R ---------------- join -> OUT

`left`, `right` and `after` are gated (tests/support/gate.py): each says that it has begun and stays until
the test lets it go. Two that have begun while neither was let go do overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.support.gate import Gate
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.waiting import until

JOIN = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            a, b = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("A", "B"))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SUM", a + 10 * b)]))
        return responses
"""
INT = "data_type: TYPE_INT32 dims: [ -1 ]"


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = " ".join(
        f'{kind}_map {{ key: "{own}" value: "{name}" }}'
        for kind, pairs in (("input", inputs), ("output", outputs))
        for own, name in pairs.items()
    )
    return f'{{ model_name: "{model}" model_version: -1 {maps} }}'


class Bench:
    """The server, its three gates, and one client."""

    def __init__(self, folder: Path) -> None:
        repository = folder / "repository"
        self.gates = {name: Gate(repository, folder / name, name) for name in ("left", "right", "after")}
        write_model(
            repository,
            "join",
            f'backend: "python" max_batch_size: 8 input [ {{ name: "A" {INT} }}, {{ name: "B" {INT} }} ] '
            f'output [ {{ name: "SUM" {INT} }} ]',
            {"1/model.py": JOIN},
        )
        steps = [
            step("left", {"INPUT0": "IN"}, {"OUTPUT0": "L"}),
            step("right", {"INPUT0": "IN"}, {"OUTPUT0": "R"}),
            step("join", {"A": "A", "B": "R"}, {"SUM": "OUT"}),
            step("after", {"INPUT0": "L"}, {"OUTPUT0": "A"}),
        ]
        write_model(
            repository,
            "branches",
            f'platform: "ensemble" max_batch_size: 8 input [ {{ name: "IN" {INT} }} ] '
            f'output [ {{ name: "OUT" {INT} }} ] ensemble_scheduling {{ step [ {", ".join(steps)} ] }}',
        )
        self.server = ServerProcess(repository)
        self.client = grpcclient.InferenceServerClient(self.server.grpc)
        self.outcomes: dict[str, Any] = {}

    def send(self, id: str, value: int) -> Any:
        tensor = grpcclient.InferInput("IN", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.full((1, 1), value, np.int32))

        def called(result: Any, error: Any) -> None:
            self.outcomes[id] = error or result

        return self.client.async_infer("branches", [tensor], called, request_id=id)

    def outcome(self, id: str) -> Any:
        until(lambda: id in self.outcomes, f"the answer to '{id}'")
        got = self.outcomes.pop(id)
        return got.as_numpy("OUT").tolist() if isinstance(got, grpcclient.InferResult) else got.message()


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(tmp_path_factory.mktemp("branches"))
    yield made
    made.client.close()
    made.server.stop()
    for gate in made.gates.values():
        gate.close()


def test_branches_overlap_and_a_step_does_not_wait_for_the_other_branch(bench: Bench) -> None:
    left, right, after = (bench.gates[name] for name in ("left", "right", "after"))
    bench.send("one", 4)
    assert (left.started(), right.started()) == (["one"], ["one"]), "both run, nobody was let go"
    left.go()
    assert after.started() == ["one"], "its tensor is there; that 'right' still runs does not matter"
    after.go()
    right.go()
    assert bench.outcome("one") == [[44]]
    assert [gate.reported() for gate in (left, after, right)] == [[], [], []]


def test_requests_overtake_each_other_between_the_branches(bench: Bench) -> None:
    left, right, after = (bench.gates[name] for name in ("left", "right", "after"))
    bench.send("first", 1)
    assert (left.started(), right.started()) == (["first"], ["first"])
    bench.send("second", 2)
    left.go()
    assert (after.started(), left.started()) == (["first"], ["second"]), "a pipeline: two steps, two requests"
    left.go()
    after.go("kk")
    assert after.started() == ["second"]
    right.go("kk")
    assert right.started() == ["second"]
    assert (bench.outcome("first"), bench.outcome("second")) == ([[11]], [[22]])
    for gate, times in ((left, 2), (after, 2), (right, 2)):
        assert [gate.reported() for _ in range(times)] == [[]] * times


def test_a_branch_that_fails_cancels_the_other_while_it_executes(bench: Bench) -> None:
    left, right = bench.gates["left"], bench.gates["right"]
    bench.send("doomed", 1)
    assert (left.started(), right.started()) == (["doomed"], ["doomed"])
    left.go("f")
    told = "in ensemble 'branches', Failed to process the request(s) for model 'left_0', message: ValueError: the whole batch fails"
    assert bench.outcome("doomed").startswith(told)
    right.go("c")  # returns once it is told that its request is cancelled
    assert right.reported() == ["doomed"]
    left.forget()


def test_cancel_reaches_every_branch(bench: Bench) -> None:
    left, right = bench.gates["left"], bench.gates["right"]
    call = bench.send("gone", 1)
    assert (left.started(), right.started()) == (["gone"], ["gone"])
    call.cancel()
    left.go("c")
    right.go("c")
    assert (left.reported(), right.reported()) == (["gone"], ["gone"])
    assert "cancelled" in bench.outcome("gone").lower()
