"""Walks through ensemble graphs with steps that answer when the test says so."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from neptrio.errors import Internal, InvalidArgument, TritonError
from neptrio.execution.batch import accept, complete
from neptrio.loop.loop_pass import LoopPass
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    ModelCore,
    RequestedOutput,
    Responder,
    Timestamp,
    monotonic_ns,
)
from neptrio.request.numpy_tensor import from_numpy, to_numpy
from neptrio.scheduling.ensemble import EnsembleScheduler
from neptrio.scheduling.waits import Waits
from tests.scheduling.test_ensemble_graph import graph, step

START = int(Timestamp.REQUEST_START)


class Sink(Responder):
    """Collects what the ensemble's caller is sent."""

    def __init__(self) -> None:
        self.responses: list[tuple[Any, bool]] = []
        self.full = False
        self.waiting: list[Callable[[], None]] = []

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        if self.full:
            self.waiting.append(callback)
        return self.full

    def read(self) -> None:
        """The caller reads: there is room."""
        self.full = False
        waiting, self.waiting = self.waiting, []
        for callback in waiting:
            callback()

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        value: Any = "null" if response.null else str(response.error) if response.error else None
        if value is None:
            value = {t.name: int(to_numpy(t)[0]) for t in response.outputs}
        self.responses.append((value, final))


class Steps:
    """Stands where the inference service stands: notes the step requests and answers on demand."""

    def __init__(self) -> None:
        self.calls: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []
        self.refuse: str = ""
        self.inline = False

    def submit(self, request: InferRequest) -> None:
        if request.model_name == self.refuse:
            raise InvalidArgument("no")
        core = ModelCore(request.model_name, "1")
        core.counters = ModelCounters()
        core.decoupled = request.model_name in ("repeat", "again")
        request.model = core
        accept(request)
        self.calls.append(request)
        if self.inline:
            self.answer(request)

    def cancel(self, request: InferRequest) -> None:
        self.cancelled.append(request)

    def value(self, request: InferRequest) -> int:
        return sum(int(to_numpy(t)[0]) for t in request.inputs)

    def answer(self, request: InferRequest, value: int | None = None, final: bool = True) -> None:
        made = self.value(request) + 1 if value is None else value
        complete(request, InferResponse([from_numpy("Y", np.full(4, made, dtype=np.int32))]), final)

    def end(self, request: InferRequest) -> None:
        last = InferResponse()
        last.null = True
        complete(request, last, True)

    def named(self) -> list[str]:
        return [r.model_name for r in self.calls]


class World:
    """An ensemble, its caller and its steps."""

    def __init__(
        self, steps: list[str], outputs: str = "OUT:INT32:4", limit: int = 0, waits: Waits | None = None
    ) -> None:
        self.steps = Steps()
        self.loop_pass = LoopPass()
        made = graph(steps, outputs=outputs)
        loop = SimpleNamespace(loop_pass=self.loop_pass, waits=waits or Waits())
        self.scheduler = EnsembleScheduler(made, self.steps, loop, limit)
        self.core = ModelCore("e", "1")
        self.core.counters = ModelCounters()
        self.core.decoupled = made.decoupled
        self.core.scheduler = self.scheduler

    def send(self, value: int = 1, outputs: list[str] | None = None) -> tuple[InferRequest, Sink]:
        request, sink = InferRequest(), Sink()
        request.model_name = "e"
        request.id = "r"
        request.model = self.core
        request.inputs = [from_numpy("IN", np.full(4, value, dtype=np.int32))]
        request.responder = sink
        if outputs is not None:
            request.outputs = [RequestedOutput(name) for name in outputs]
        accept(request)
        self.scheduler.enqueue(request)
        return request, sink

    def stats(self) -> dict[str, Any]:
        plain: dict[str, Any] = self.core.counters.snapshot()["inference_stats"]
        return plain


DIAMOND = [
    step("double", "X=IN", "Y=A"),
    step("double", "X=A", "Y=L"),
    step("double", "X=A", "Y=R"),
    step("join", "A=L B=R", "Y=OUT"),
]


def test_what_each_step_took_is_counted_apart() -> None:
    """Three steps have one model; the time is that of the step's own requests."""
    world = World(DIAMOND)
    world.send()
    for took in (1, 20, 300, 4000):  # milliseconds, in the order in which the steps were submitted
        call = next(call for call in world.steps.calls if call.timestamp(START) == 0)
        call.stamp(START, monotonic_ns() - took * 1_000_000)
        world.steps.answer(call)
    rows = world.scheduler.steps()
    assert [(row["model_name"], row["count"], row["failed"]) for row in rows] == [
        ("double", 1, 0),
        ("double", 1, 0),
        ("double", 1, 0),
        ("join", 1, 0),
    ]
    took_ms = [row["sum_ns"] / 1e6 for row in rows]
    for least, most, found in zip((1, 20, 300, 4000), (20, 300, 4000, 60000), took_ms, strict=True):
        assert least <= found < most
    assert [row["sum_ns"] for row in rows] == [row["max_ns"] for row in rows]
    assert [sum(n for _, n in row["histogram"]) for row in rows] == [1] * 4
    world.send()
    complete(world.steps.calls[-1], InferResponse(None, Internal("it broke")), True)
    assert [(row["count"], row["failed"]) for row in world.scheduler.steps()] == [
        (1, 1),
        (1, 0),
        (1, 0),
        (1, 0),
    ]
    world.send()
    world.steps.refuse = "double"
    world.steps.answer(world.steps.calls[-1])
    assert [(row["count"], row["failed"]) for row in world.scheduler.steps()] == [
        (2, 1),
        (1, 1),
        (1, 0),
        (1, 0),
    ]


def test_steps_that_answer_at_once() -> None:
    world = World(DIAMOND)
    world.steps.inline = True
    _, sink = world.send(1)
    assert sink.responses == [({"OUT": 7}, True)]


def test_a_failing_step_fails_the_request_and_cancels_the_rest() -> None:
    world = World(DIAMOND)
    _, sink = world.send()
    world.steps.answer(world.steps.calls[0])
    left, right = world.steps.calls[1:]
    complete(left, InferResponse(None, TritonError("broken")), True)
    assert sink.responses == [("in ensemble 'e', broken", True)]
    assert world.steps.cancelled == [right]
    world.steps.answer(right)
    assert len(sink.responses) == 1 and world.core.inflight == 0
    assert world.stats()["fail"]["count"] == 2, "a failed ensemble request counts twice"


def test_a_step_refused_at_the_door_fails_the_request() -> None:
    world = World(DIAMOND)
    world.steps.refuse = "join"
    world.steps.inline = True
    _, sink = world.send()
    assert sink.responses == [("in ensemble 'e', no", True)]


def test_cancel_reaches_the_steps() -> None:
    world = World(DIAMOND)
    request, sink = world.send()
    world.scheduler.cancel(request)
    assert sink.responses == [("request cancelled", True)]
    assert world.steps.cancelled == [world.steps.calls[0]]
    world.scheduler.cancel(request)
    assert len(sink.responses) == 1


def test_unneeded_steps_do_not_run() -> None:
    world = World(
        [step("double", "X=IN", "Y=A"), step("join", "A=IN B=IN", "Y=B")], outputs="A:INT32:4 B:INT32:4"
    )
    world.steps.inline = True
    _, sink = world.send(5, outputs=["B"])
    assert world.steps.named() == ["join"]
    assert sink.responses == [({"B": 11}, True)]


def test_request_attributes_are_carried() -> None:
    world = World(DIAMOND)
    request = InferRequest()
    request.model_name, request.id, request.model = "e", "r7", world.core
    request.priority, request.parameters, request.timeout_us = 2, {"k": 1}, 60_000_000
    request.sequence_id, request.sequence_start = 9, True
    request.inputs = [from_numpy("IN", np.zeros(4, dtype=np.int32))]
    request.responder = Sink()
    accept(request)
    world.scheduler.enqueue(request)
    child = world.steps.calls[0]
    assert (child.id, child.priority, child.parameters) == ("r7", 2, {"k": 1})
    assert (child.sequence_id, child.sequence_start, child.parent) == (9, True, request)
    assert 0 < child.timeout_us <= 60_000_000


def test_decoupled_step_answers_any_number_of_times() -> None:
    world = World([step("repeat", "X=IN", "Y=A"), step("double", "X=A", "Y=OUT")])
    _, sink = world.send(1)
    repeat = world.steps.calls[0]
    world.steps.answer(repeat, 10, final=False)
    world.steps.answer(repeat, 20, final=False)
    first, second = world.steps.calls[1:]
    world.steps.answer(second)
    assert sink.responses == [], "answers leave in the order of the decoupled responses"
    world.steps.answer(first)
    assert sink.responses == [({"OUT": 11}, False), ({"OUT": 21}, False)]
    world.steps.end(repeat)
    assert sink.responses[2:] == [("null", True)]
    assert world.core.inflight == 0


def test_two_decoupled_steps_in_a_row() -> None:
    world = World(
        [step("repeat", "X=IN", "Y=A"), step("repeat", "X=A", "Y=B"), step("join", "A=A B=B", "Y=OUT")]
    )
    _, sink = world.send(1)
    outer = world.steps.calls[0]
    world.steps.answer(outer, 100, final=False)
    world.steps.answer(outer, 200, final=True)
    inner = world.steps.calls[1:3]
    world.steps.answer(inner[0], 1, final=False)
    world.steps.answer(inner[1], 2, final=True)
    world.steps.answer(inner[0], 3, final=True)
    joins = [r for r in world.steps.calls if r.model_name == "join"]
    assert sorted(world.steps.value(r) for r in joins) == [101, 103, 202]
    for join in joins:
        world.steps.answer(join)
    assert sorted(r[0]["OUT"] for r in sink.responses) == [102, 104, 203]
    assert [final for _, final in sink.responses] == [False, False, True]


def test_a_branch_beside_the_decoupled_step_runs_once() -> None:
    world = World(
        [step("repeat", "X=IN", "Y=A"), step("double", "X=IN", "Y=B"), step("join", "A=A B=B", "Y=OUT")]
    )
    _, sink = world.send(1)
    repeat, beside = world.steps.calls
    world.steps.answer(repeat, 10, final=False)
    world.steps.answer(repeat, 20, final=True)
    assert len(world.steps.calls) == 2, "the joins wait for the branch"
    world.steps.answer(beside)  # B = 2
    joins = world.steps.calls[2:]
    assert [world.steps.value(r) for r in joins] == [12, 22]
    for join in joins:
        world.steps.answer(join)
    assert sink.responses == [({"OUT": 13}, False), ({"OUT": 23}, True)]


def test_a_cancelled_walk_gives_its_waiting_place_up() -> None:
    world = World([step("double", "X=IN", "Y=OUT")], limit=1)
    world.send(0)
    waiting, sink = world.send(1)
    world.scheduler.cancel(waiting)
    assert sink.responses == [("request cancelled", True)]
    world.steps.answer(world.steps.calls[0])
    world.loop_pass.end()
    assert len(world.steps.calls) == 1
    assert world.scheduler.statistics().executing == 0


@pytest.mark.parametrize("count", [200])
def test_long_decoupled_runs_keep_no_frames(count: int) -> None:
    world = World([step("repeat", "X=IN", "Y=A"), step("double", "X=A", "Y=OUT")])
    request, sink = world.send()
    repeat = world.steps.calls[0]
    for i in range(count):
        world.steps.answer(repeat, i, final=False)
        world.steps.answer(world.steps.calls[-1])
    walk = request.scheduler_data
    assert len(sink.responses) == count and walk.root.below == [] and not walk.answers


def test_a_decoupled_step_waits_for_the_client() -> None:
    world = World([step("repeat", "X=IN", "Y=OUT")])
    _, sink = world.send()
    repeat, woken = world.steps.calls[0], []
    world.steps.answer(repeat, 0, final=False)
    assert not repeat.responder.wait_for_room(repeat, lambda: woken.append(0))
    sink.full = True
    for i in (1, 2):  # senders of several threads: the client is asked once
        world.steps.answer(repeat, i, final=False)
        assert repeat.responder.wait_for_room(repeat, lambda i=i: woken.append(i))
    assert len(sink.waiting) == 1 and woken == []
    sink.read()
    assert woken == [1, 2]
    assert not repeat.responder.wait_for_room(repeat, lambda: woken.append(3))


def test_a_client_that_is_told_at_once_leaves_no_step_waiting() -> None:
    world = World([step("repeat", "X=IN", "Y=OUT")])
    _, sink = world.send()
    repeat = world.steps.calls[0]

    def at_once(request: InferRequest, callback: Callable[[], None]) -> bool:
        callback()
        return True

    sink.wait_for_room = at_once  # type: ignore[method-assign]
    world.steps.answer(repeat, 0, final=False)
    assert not repeat.responder.wait_for_room(repeat, lambda: None)


def sends_at_once(world: World, count: int) -> tuple[Any, list[str]]:
    """The first step, which has sent so many responses and waited for none, and who was called back."""
    sender, woken = world.steps.calls[0], list[str]()
    for i in range(count):
        world.steps.answer(sender, i, final=False)
        assert not sender.responder.wait_for_room(sender, lambda: woken.append("early"))
    return sender, woken


def test_a_decoupled_step_waits_for_the_steps_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neptrio.scheduling.ensemble.WALK_BYTES", 2500)  # two responses
    world = World([step("repeat", "X=IN", "Y=A"), step("double", "X=A", "Y=OUT")])
    _, sink = world.send()
    repeat, woken = sends_at_once(world, 2)
    world.steps.answer(repeat, 2, final=False)
    assert repeat.responder.wait_for_room(repeat, lambda: woken.append("now"))
    world.steps.answer(world.steps.calls[2])  # the second: the first is not answered, so both stay
    assert woken == [] and sink.responses == []
    world.steps.answer(world.steps.calls[1])
    assert woken == ["now"] and len(sink.responses) == 2


def test_a_later_step_does_not_wait_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """These wait until it has ended."""
    monkeypatch.setattr("neptrio.scheduling.ensemble.WALK_BYTES", 2500)  # two responses
    steps = [step("repeat", "X=IN", "Y=A"), step("again", "X=A", "Y=B"), step("double", "X=B", "Y=OUT")]
    world = World(steps)
    _, sink = world.send()
    repeat, woken = world.steps.calls[0], []
    for i in range(4):
        world.steps.answer(repeat, i, final=False)
    assert repeat.responder.wait_for_room(repeat, lambda: woken.append("repeat"))
    again = world.steps.calls[1]
    for i in range(2):
        world.steps.answer(again, i, final=False)
        assert not again.responder.wait_for_room(again, lambda: woken.append("early"))
    world.steps.answer(again, 2, final=False)
    assert again.responder.wait_for_room(again, lambda: woken.append("again")), "for what comes behind it"
    world.steps.answer(world.steps.calls[-3])
    assert woken == ["again"] and len(sink.responses) == 1
    for call in world.steps.calls[-2:]:
        world.steps.answer(call)
    for call in world.steps.calls[1:4]:
        world.steps.end(call)
    assert woken == ["again", "repeat"]


def test_one_that_later_steps_wait_for_waits_for_the_client_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neptrio.scheduling.ensemble.WALK_BYTES", 2500)  # two responses
    world = World([step("repeat", "X=IN", "Y=A"), step("repeat", "X=A", "Y=OUT")])
    _, sink = world.send()
    repeat, woken = sends_at_once(world, 4)
    sink.full = True
    assert repeat.responder.wait_for_room(repeat, lambda: woken.append("now"))
    sink.read()
    assert woken == ["now"]


def test_two_ensembles_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neptrio.scheduling.ensemble.WALK_BYTES", 2500)  # two responses
    waits = Waits()
    one, other = (
        World([step(first, "X=IN", "Y=A"), step(then, "X=A", "Y=OUT")], waits=waits)
        for first, then in (("repeat", "again"), ("again", "repeat"))
    )
    for world in (one, other):
        world.send()
    first, woken = sends_at_once(one, 2)
    one.steps.answer(first, 2, final=False)
    assert first.responder.wait_for_room(first, lambda: woken.append("now"))
    second, _ = sends_at_once(other, 6)
    for call in one.steps.calls[1:4]:
        one.steps.answer(call)
    assert woken == ["now"]
    other.steps.answer(second, 6, final=False)
    assert second.responder.wait_for_room(second, lambda: None), "the first has what it waited for"


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_the_end_of_a_walk_wakes_its_senders(how: str) -> None:
    world = World([step("repeat", "X=IN", "Y=A"), step("double", "X=A", "Y=OUT")])
    request, sink = world.send()
    repeat, woken = world.steps.calls[0], []
    sink.full = True
    world.steps.answer(repeat, 0, final=False)
    assert repeat.responder.wait_for_room(repeat, lambda: woken.append(len(world.steps.cancelled)))
    if how == "cancel":
        world.scheduler.cancel(request)
    else:
        complete(world.steps.calls[1], InferResponse(None, InvalidArgument("no")), True)
    assert woken == [len(world.steps.cancelled)] and woken[0]  # the steps are told first
    sink.read()
    assert len(woken) == 1
