"""When front ends send the answers of calls that they pass on whole: every trace ends, whatever a front end says of it."""

from __future__ import annotations

import json
import os
import random
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import trio

from neptrio.errors import Overloaded
from neptrio.execution.admission import Admission
from neptrio.execution.batch import complete
from neptrio.frontend.call_sends import MOST_AWAITED, AwaitedCalls
from neptrio.frontend.verbs import believed
from neptrio.loop.loop_pass import LoopPass
from neptrio.observe.trace_options import TraceOptions
from neptrio.observe.tracer import Tracer
from neptrio.request.infer_request import InferRequest, InferResponse, monotonic_ns
from neptrio.transport.rest.generate import ResponseQueue
from neptrio.transport.rest.times import ELSEWHERE, CallTimes, Traced
from tests.support.fronts import Directory

EDGES = [0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
ROUNDS = int(os.environ.get("NEPTRIO_FUZZ_EXAMPLES", "2000")) // 4


class Engine:
    """The engine's part of it, with a model that answers when the test says so."""

    def __init__(self, file: Path) -> None:
        self.loop_pass = LoopPass()
        options = TraceOptions(file=str(file), level=("TIMESTAMPS",), rate="1")
        self.tracer = Tracer(options, self.loop_pass, None)
        self.directory = Directory()
        self.admission = Admission(self.directory, self.tracer)
        self.awaited = AwaitedCalls()

    def call(self, number: int = 1) -> Call:
        return Call(self, number)

    def tell(self, start: int, end: int, number: int = 1) -> None:
        """The front end writes SENT."""
        self.awaited.told(number, struct.pack("<QQ", start, end))

    def traces(self) -> list[dict[str, Any]]:
        """The traces that have ended."""
        return [json.loads(text) for text in self.tracer.last()]

    def nothing_is_left(self) -> bool:
        return not self.awaited.owed and not self.tracer.open


class Call:
    """A call of the app that a front end has passed on."""

    def __init__(self, engine: Engine, number: int) -> None:
        self.engine = engine
        self.number = number
        self.times = CallTimes({ELSEWHERE: self})
        self.request = InferRequest()

    def begins(self) -> bool:
        return self.engine.awaited.wants(self.number)

    def ends(self, responses: Traced) -> None:
        self.engine.awaited.expect(self.number, responses)

    def submit(self, id: str = "") -> InferRequest:
        admission = self.engine.admission
        request = self.request = InferRequest()
        request.model_name, request.inputs, request.id = "echo", [], id
        admission.find(request, None)
        self.times.stamp(admission, request)
        request.responder = ResponseQueue()
        with self.times.submitting(request):
            admission.submit(request)
        return request

    def answer(self, final: bool = True) -> None:
        """The model gives a response."""
        complete(self.request, InferResponse([]), final)
        self.engine.loop_pass.end()

    def send(self) -> None:
        """The app sends the oldest response."""
        with self.times.sending([(self.request, 1)]):
            pass


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    made = Engine(tmp_path / "traces")
    yield made
    trio.run(made.tracer.close)


def names(trace: dict[str, Any]) -> list[str]:
    """The names of a trace's points, whose times must be in order."""
    times = [point["ns"] for point in trace["timestamps"]]
    assert all(a <= b for a, b in pairwise(times))
    return [point["name"].replace("HTTP_", "") for point in trace["timestamps"]]


def when(trace: dict[str, Any], name: str) -> list[int]:
    return [point["ns"] for point in trace["timestamps"] if point["name"].endswith(name)]


def one_call(engine: Engine) -> Call:
    """A call whose only response the app has sent."""
    call = engine.call()
    call.submit()
    call.answer()
    call.send()
    return call


@pytest.mark.parametrize("released", [False, True], ids=["told before the end", "told after the end"])
def test_the_times_are_those_of_the_front_end(engine: Engine, released: bool) -> None:
    call = one_call(engine)
    if released:
        call.times.over()
        assert engine.traces() == []
    start = monotonic_ns()
    end = monotonic_ns()
    engine.tell(start, end)
    if not released:
        assert engine.traces() == []
        call.times.over()
    (trace,) = engine.traces()
    assert names(trace)[-3:] == ["INFER_RESPONSE_COMPLETE", "SEND_START", "SEND_END"]
    assert (when(trace, "SEND_START"), when(trace, "SEND_END")) == ([start], [end])
    assert engine.nothing_is_left()


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("end", EDGES)
def test_times_that_cannot_be(engine: Engine, start: int, end: int) -> None:
    one_call(engine).times.over()
    answered = monotonic_ns()
    engine.tell(start, end)
    (trace,) = engine.traces()
    if end:
        assert names(trace)[-2:] == ["SEND_START", "SEND_END"]
        (made,) = when(trace, "INFER_RESPONSE_COMPLETE")
        assert made <= answered
        assert made <= when(trace, "SEND_START")[0] <= when(trace, "SEND_END")[0] <= monotonic_ns()
    else:
        assert names(trace)[-1] == "INFER_RESPONSE_COMPLETE"
    assert engine.nothing_is_left()


@pytest.mark.parametrize("payload", [b"", b"\0" * 15, b"\0" * 17])
def test_what_cannot_be_times(engine: Engine, payload: bytes) -> None:
    with pytest.raises(ValueError, match="should tell when an answer was sent"):
        engine.awaited.told(1, payload)


def test_what_nobody_waits_for_means_nothing(engine: Engine) -> None:
    engine.tell(1, monotonic_ns())
    call = engine.call()
    call.submit()
    engine.tell(1, monotonic_ns())
    call.answer()
    call.send()
    engine.tell(1, monotonic_ns(), number=2)
    assert engine.traces() == []
    call.times.over()
    engine.tell(1, monotonic_ns())
    for end in (monotonic_ns(), 2, 0):
        engine.tell(1, end)
    assert names(engine.traces()[0])[-1] == "SEND_END"
    assert engine.nothing_is_left()


def test_responses_that_were_not_sent(engine: Engine) -> None:
    """Of three the app has sent two, and the front end one."""
    call = engine.call()
    call.submit()
    for number in range(3):
        call.answer(number == 2)
    call.send()
    call.send()
    call.times.over()
    engine.tell(monotonic_ns(), monotonic_ns())
    assert engine.traces() == []
    engine.tell(0, 0)
    (trace,) = engine.traces()
    found = names(trace)
    assert [found.count(name) for name in ("INFER_RESPONSE_COMPLETE", "SEND_START", "SEND_END")] == [3, 1, 1]
    assert engine.nothing_is_left()


def test_a_response_that_waits_is_not_sent_with_the_one_before_it(engine: Engine) -> None:
    call = engine.call()
    call.submit()
    call.answer(False)
    call.answer()
    call.send()
    engine.tell(monotonic_ns(), monotonic_ns())
    engine.loop_pass.end()
    assert engine.traces() == []
    call.send()
    call.times.over()
    later = monotonic_ns()
    engine.tell(later, later)
    (trace,) = engine.traces()
    assert when(trace, "SEND_START")[1] == later
    assert engine.nothing_is_left()


def test_a_model_that_goes_on_behind_the_end(engine: Engine) -> None:
    """As after a stop text: the trace ends with its request."""
    call = engine.call()
    call.submit()
    call.answer(False)
    call.send()
    engine.admission.cancel(call.request)
    call.times.over()
    engine.tell(monotonic_ns(), monotonic_ns())
    assert engine.traces() == []
    call.answer()
    (trace,) = engine.traces()
    assert names(trace).count("SEND_END") == 1
    assert engine.nothing_is_left()


def test_a_refused_request(engine: Engine) -> None:
    def enqueue(request: InferRequest) -> None:
        raise Overloaded("the queue is full")

    engine.directory.scheduler.enqueue = enqueue  # type: ignore[method-assign]
    call = engine.call()
    with pytest.raises(Overloaded):
        call.submit()
    engine.loop_pass.end()
    assert engine.traces() == []
    with call.times.answering():
        pass
    call.times.over()
    sent = monotonic_ns()
    engine.tell(sent, sent)
    (trace,) = engine.traces()
    assert trace["error"] == "the queue is full"
    assert names(trace)[-3:] == ["REQUEST_END", "SEND_START", "SEND_END"]
    assert when(trace, "SEND_START") == [sent]
    assert engine.nothing_is_left()


@pytest.mark.parametrize("when_it_ends", ["before the answer", "before the end", "after the end"])
def test_the_front_end_ends(engine: Engine, when_it_ends: str) -> None:
    call = engine.call()
    call.submit()
    call.answer()
    if when_it_ends == "before the answer":
        engine.awaited.gone()
    call.send()
    if when_it_ends == "before the end":
        engine.awaited.gone()
    call.times.over()
    if when_it_ends == "after the end":
        engine.awaited.gone()
    (trace,) = engine.traces()
    assert names(trace)[-1] == "INFER_RESPONSE_COMPLETE"
    assert engine.nothing_is_left()


def test_a_number_that_is_used_again(engine: Engine) -> None:
    one_call(engine).times.over()
    engine.awaited.forget(1)
    (trace,) = engine.traces()
    assert names(trace)[-1] == "INFER_RESPONSE_COMPLETE"
    assert engine.nothing_is_left()


def test_a_front_end_that_never_tells(engine: Engine) -> None:
    """Of so many answers the engine does not wait for more, and all traces end with the front end."""
    for number in range(MOST_AWAITED + 1):
        call = engine.call(number)
        call.submit(str(number))
        call.answer()
        call.send()
        call.times.over()
    (trace,) = engine.traces()
    assert trace["request_id"] == str(MOST_AWAITED)
    assert names(trace)[-1] == "SEND_END"
    assert len(engine.awaited.owed) == MOST_AWAITED
    engine.awaited.gone()
    assert engine.nothing_is_left()


def test_whatever_it_tells(engine: Engine) -> None:
    """Calls with several responses, told of or not in any order: no trace is left, and none has times that cannot be."""
    chance = random.Random(7)
    for _ in range(ROUNDS):
        engine.awaited = AwaitedCalls()
        calls = [engine.call(number) for number in range(3)]
        for call in calls:
            call.submit()
        for _ in range(20):
            call = chance.choice(calls)
            now = monotonic_ns()
            what = chance.randrange(5)
            if what == 0 and call.request.trace is not None:
                call.answer(False)
            elif what == 1:
                call.send()
            elif what == 2:
                start, end = (chance.choice([*EDGES, now - 1000, now]) for _ in range(2))
                engine.tell(start, end, chance.randrange(4))
            elif what == 3 and chance.random() < 0.3:
                call.times.over()
            elif what == 4 and chance.random() < 0.1:
                engine.awaited.forget(call.number)
        for call in calls:
            call.answer()
            call.times.over()
        engine.awaited.gone()
        assert engine.nothing_is_left()
        for trace in engine.traces()[-3:]:
            names(trace)
            assert trace["timestamps"][-1]["ns"] <= monotonic_ns()


@pytest.mark.parametrize("began", [-(2**70), -1, *EDGES, 2**70])
@pytest.mark.parametrize("whole", [-(2**70), -1, *EDGES, 2**70])
def test_receive_times_that_cannot_be(began: int, whole: int) -> None:
    first = monotonic_ns()
    start, end = believed([began, whole], first)
    assert first <= start <= end <= monotonic_ns()


@pytest.mark.parametrize(
    "received", [None, 1, [], [1], [1, 2, 3], [1, 2.5], ["1", "2"], [True, 2], [float("nan"), 1], {"a": 1}]
)
def test_receive_times_that_are_none(received: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        believed(received, 1)
