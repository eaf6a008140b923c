"""Ensembles of real models: batching, decoupling, failure, cancellation, limits inside the steps.

Gated Python models (tests/support/gate.py) hold a step until the test lets it go on.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.support.gate import Gate
from tests.support.repository import write_model
from tests.support.server import ServerProcess
from tests.support.statistics import stats
from tests.support.streams import Answers
from tests.support.waiting import until

IO = (
    'input [ {{ name: "{0}" data_type: TYPE_INT32 dims: [ -1 ] }} ] '
    'output [ {{ name: "{1}" data_type: TYPE_INT32 dims: [ -1 ] }} ] '
)
PLUS = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            values = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            if (values == 13).any():
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError("unlucky number")))
            else:
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values + 1)]))
        return responses
"""
COUNT = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for value in range(int(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy().flat[0])):
                tensor = pb_utils.Tensor("OUTPUT0", np.array([[value]], np.int32))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def ensemble(*models: str, extra: str = "", inputs: str = "IN", outputs: str = "OUT") -> str:
    """A chain: IN -> models[0] -> t0 -> models[1] -> ... -> OUT."""
    names = [inputs, *(f"t{i}" for i in range(len(models) - 1)), outputs]
    steps = []
    for i, model in enumerate(models):
        own = ("IN", "OUT") if model.startswith("chain") else ("INPUT0", "OUTPUT0")
        steps.append(
            f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "{own[0]}" value: "{names[i]}" }} '
            f'output_map {{ key: "{own[1]}" value: "{names[i + 1]}" }} }}'
        )
    return (
        f'platform: "ensemble" max_batch_size: 8 {IO.format(inputs, outputs)} '
        f"ensemble_scheduling {{ step [ {', '.join(steps)} ] {extra} }}"
    )


class Bench:
    """A server with ensembles around one gated step, and calls that can be cancelled."""

    def __init__(self, folder: Path) -> None:
        repository = folder / "repository"
        policy = (
            "dynamic_batching { priority_levels: 3 default_priority_level: 2 "
            "default_queue_policy { default_timeout_microseconds: 3600000000 allow_timeout_override: true } }"
        )
        self.gate = Gate(repository, folder / "gate", extra=policy)
        write_model(
            repository,
            "plus",
            f'backend: "python" max_batch_size: 8 {IO.format("INPUT0", "OUTPUT0")}',
            {"1/model.py": PLUS},
        )
        write_model(
            repository,
            "count",
            f'backend: "python" max_batch_size: 8 {IO.format("INPUT0", "OUTPUT0")} '
            "model_transaction_policy { decoupled: true }",
            {"1/model.py": COUNT},
        )
        write_model(repository, "chain", ensemble("plus", "gate", "plus"))
        write_model(repository, "chain_limited", ensemble("gate", extra="max_inflight_requests: 2"))
        write_model(repository, "chain_plain", ensemble("plus", "plus"))
        write_model(repository, "nested", ensemble("chain_plain", "plus", "chain_plain"))
        write_model(repository, "nested_gate", ensemble("plus", "chain"))
        write_model(repository, "stream", ensemble("plus", "count", "plus"))
        self.server = ServerProcess(repository)
        self.client = grpcclient.InferenceServerClient(self.server.grpc)
        self.calls: dict[str, Any] = {}
        self.outcomes: dict[str, Any] = {}
        self._news = threading.Condition()

    def send(self, model: str, id: str, value: int = 0, **options: Any) -> None:
        def called(result: Any, error: Any) -> None:
            with self._news:
                self.outcomes[id] = error or result
                self._news.notify_all()

        self.calls[id] = self.client.async_infer(model, tensor(value), called, request_id=id, **options)

    def result(self, id: str) -> Any:
        """The answer's values, or the error."""
        with self._news:
            assert self._news.wait_for(lambda: id in self.outcomes, 60), f"no answer for '{id}'"
            outcome = self.outcomes.pop(id)
        return outcome.as_numpy("OUT").tolist() if isinstance(outcome, grpcclient.InferResult) else outcome

    def accepted(self, model: str, count: int) -> None:
        """Waits until that many requests of `model` are under way."""
        until(
            lambda: stats(self.server, model)["live"]["accepted"] == count, f"{count} requests in '{model}'"
        )


def tensor(value: int) -> list[Any]:
    made = grpcclient.InferInput("IN", [1, 1], "INT32")
    made.set_data_from_numpy(np.full((1, 1), value, np.int32))
    return [made]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    bench = Bench(tmp_path_factory.mktemp("steps"))
    yield bench
    bench.client.close()
    bench.server.stop()
    bench.gate.close()


@pytest.fixture
def bench(shared: Bench) -> Iterator[Bench]:
    shared.gate.forget()
    yield shared
    for model in ("gate", "chain", "chain_limited", "nested_gate", "plus", "count"):
        shared.accepted(model, 0)


def test_requests_of_two_clients_batch_in_a_step(bench: Bench) -> None:
    bench.send("chain", "first", 1)
    assert bench.gate.started() == ["first"]
    with grpcclient.InferenceServerClient(bench.server.grpc) as other:
        outcome: queue.Queue[Any] = queue.Queue()
        other.async_infer(
            "chain", tensor(2), lambda result, error: outcome.put(error or result), request_id="other"
        )
        bench.send("chain", "mine", 3)
        bench.accepted("gate", 3)
        bench.gate.go()
        assert sorted(bench.gate.started()) == ["mine", "other"], "one batch for both"
        bench.gate.go()
        assert outcome.get(timeout=60).as_numpy("OUT").tolist() == [[4]]
    assert (bench.result("first"), bench.result("mine")) == ([[3]], [[5]])


def test_priority_is_carried_into_a_step(bench: Bench) -> None:
    bench.send("nested_gate", "running", 1)
    assert bench.gate.started() == ["running"]
    sizes = [f"low{i}" for i in range(8)]
    for i, id in enumerate(sizes):
        bench.send("nested_gate", id, i, priority=3)
        bench.accepted("gate", i + 2)
    bench.send("nested_gate", "urgent", 50, priority=1)
    bench.accepted("gate", 10)
    bench.gate.go("kkk")
    assert bench.gate.started()[0] == "urgent"
    assert bench.gate.started() == ["low7"], "the last of the low ones was pushed out of the batch"
    assert bench.result("urgent") == [[53]]
    assert [bench.result(id) for id in ["running", *sizes]] == [[[4]], *([[i + 3]] for i in range(8))]


def test_a_timeout_is_carried_into_a_step(bench: Bench) -> None:
    bench.send("chain", "running", 1)
    assert bench.gate.started() == ["running"]
    bench.send("chain", "late", 2, timeout=1000)
    error = bench.result("late")
    assert error.message() == "in ensemble 'chain', Request timeout expired"
    assert error.status() == "StatusCode.UNAVAILABLE"
    bench.gate.go()
    assert bench.result("running") == [[3]]


@pytest.mark.parametrize("model", ["chain", "nested_gate"])
def test_cancel_reaches_a_step_that_executes(bench: Bench, model: str) -> None:
    bench.send(model, "gone", 1)
    assert bench.gate.started() == ["gone"]
    bench.calls["gone"].cancel()
    bench.gate.go("c")  # the model waits until it is told
    assert bench.gate.reported() == ["gone"]
    assert "cancelled" in str(bench.result("gone")).lower()


def test_cancel_reaches_a_step_that_waits(bench: Bench) -> None:
    bench.send("chain", "running", 1)
    assert bench.gate.started() == ["running"]
    bench.send("chain", "gone", 2)
    bench.accepted("gate", 2)
    bench.calls["gone"].cancel()
    bench.accepted("gate", 1)
    bench.accepted("chain", 1)
    bench.gate.go()
    assert bench.gate.reported() == []
    assert bench.result("running") == [[3]]
    assert "cancelled" in str(bench.result("gone")).lower()


def test_a_failing_step_is_named(bench: Bench) -> None:
    with pytest.raises(InferenceServerException) as info:
        bench.client.infer("chain_plain", tensor(12))
    assert info.value.message() == "in ensemble 'chain_plain', unlucky number"
    with pytest.raises(InferenceServerException) as info:
        bench.client.infer("nested", tensor(12))
    assert info.value.message() == ("in ensemble 'nested', in ensemble 'chain_plain', unlucky number")


def test_ensembles_in_ensembles(bench: Bench) -> None:
    assert bench.client.infer("nested", tensor(20)).as_numpy("OUT").tolist() == [[25]]


def test_max_inflight_requests_bounds_a_step(bench: Bench) -> None:
    ids = [f"r{i}" for i in range(7)]
    for i, id in enumerate(ids):
        bench.send("chain_limited", id, i)
        bench.accepted("chain_limited", i + 1)
    seen: list[str] = []
    while len(seen) < len(ids):
        seen += bench.gate.started()
        assert stats(bench.server, "gate")["live"]["accepted"] <= 2
        bench.gate.go()
    assert seen == ids, "the others wait in the order of arrival"
    assert [bench.result(id) for id in ids] == [[[i]] for i in range(7)]


@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_decoupled_step_streams(bench: Bench, count: int) -> None:
    with grpcclient.InferenceServerClient(bench.server.grpc) as client, Answers(client) as answers:
        client.async_stream_infer(
            "stream", tensor(count - 1), request_id="s", enable_empty_final_response=True
        )
        got: list[Any] = []
        while not got or not got[-1].get_response().parameters["triton_final_response"].bool_param:
            got.append(answers.result())
    assert answers.empty()
    # the last data is final, unless the step's end came after it had been sent: then an empty response is
    data = [a for a in got if a.get_response().outputs]
    assert got[: len(data)] == data and len(got) - len(data) <= 1
    assert [a.as_numpy("OUT").tolist() for a in data] == [[[i + 1]] for i in range(count)]
    assert {a.get_response().id for a in got} == {"s"}


def test_unary_calls_refuse_a_decoupled_ensemble(bench: Bench) -> None:
    with pytest.raises(InferenceServerException, match="decoupled"):
        bench.client.infer("stream", tensor(1))
