"""How many batches are prepared ahead of an instance: more of those that are known to be quick."""

from __future__ import annotations

from typing import Any

import pytest

from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch
from neptrio.execution.instance import Instance, InstancePool
from neptrio.loop.mailbox import CompletionQueue
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Responder
from neptrio.scheduling.default import DefaultScheduler
from tests.support.batching import LoopPass

MANY, FEW = 16, 2


class Process(BackendInstance):
    """An instance in a process of its own: batches lie in its ring until the test answers them."""

    overlapping = True

    def __init__(self, deep: bool) -> None:
        self.deep = deep
        self.batches: list[Batch] = []

    def execute(self, batch: Batch) -> None:
        raise AssertionError("batches come through begin()")

    def begin(self, batch: Batch) -> None:
        self.batches.append(batch)

    def answer(self, took_ns: int) -> None:
        batch = self.batches.pop(0)
        batch.compute_start, batch.compute_end = 1, 1 + took_ns
        batch.responses = [InferResponse([]) for _ in batch.requests]
        batch.deliver()


class Nobody(Responder):
    """Takes answers."""

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        pass


class Served:
    """A model with instances, and requests that it is given."""

    def __init__(self, count: int, deep: bool = True) -> None:
        self.model = ModelCore("m", "1")
        self.model.counters = ModelCounters()
        self.pool = InstancePool()
        self.processes = [Process(deep) for _ in range(count)]
        completions = CompletionQueue()
        for number, process in enumerate(self.processes):
            self.pool.instances.append(Instance(f"m_{number}", self.model, process, completions, self.pool))
        loop: Any = type("Loop", (), {"loop_pass": LoopPass()})
        self.scheduler = DefaultScheduler(self.pool, loop)

    def request(self) -> None:
        request = InferRequest()
        request.model, request.responder = self.model, Nobody()
        request.inputs = []
        self.model.inflight += 1
        self.scheduler.enqueue(request)
        self.scheduler.dispatch(0)

    def ahead(self, took_ns: int, rounds: int = 100) -> list[int]:
        """How many batches each instance has when there is work without end and each takes so long."""
        for _ in range(MANY * len(self.processes) + rounds):
            self.request()
        for _ in range(rounds):
            for process in self.processes:
                if process.batches:
                    process.answer(took_ns)
            self.scheduler.dispatch(0)
        for _ in range(MANY * len(self.processes)):
            self.request()
        return [len(process.batches) for process in self.processes]


@pytest.mark.parametrize(
    ("count", "took_us", "expected"),
    [
        (1, 20, MANY),
        (1, 1_000, MANY),
        (1, 6_000, FEW),
        (2, 20, MANY),
        (4, 20, MANY),
        (2, 1_000, FEW),  # a request in line would wait while the other instance is free
        (4, 6_000, FEW),
    ],
)
def test_quick_instances_in_processes_have_many_batches_ahead(
    count: int, took_us: int, expected: int
) -> None:
    assert Served(count).ahead(took_us * 1000) == [expected] * count


def test_several_instances_that_are_no_processes_have_few() -> None:
    assert Served(2, deep=False).ahead(20_000) == [FEW, FEW]


def test_the_slowest_instance_decides() -> None:
    served = Served(2)
    assert served.ahead(20_000) == [MANY, MANY]
    slow = served.processes[1]
    for _ in range(MANY):
        slow.answer(6_000_000)
    while served.processes[0].batches:
        served.processes[0].answer(20_000)
    for _ in range(3 * MANY):
        served.request()
    assert [len(process.batches) for process in served.processes] == [FEW, FEW]
