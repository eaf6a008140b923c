"""When answers to traced requests are sent, from the front end to the engine: every trace ends, whatever happens."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio

from neptrio.errors import Overloaded
from neptrio.execution.batch import complete
from neptrio.frontend.sending import Sending
from neptrio.loop.loop_pass import LoopPass
from neptrio.observe.trace_options import TraceOptions
from neptrio.observe.tracer import Tracer
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    Protocol,
    RequestedOutput,
    monotonic_ns,
)
from neptrio.request.numpy_tensor import from_numpy
from neptrio.transport.rest.app import _Waiter
from tests.support.fronts import FrontPair

SENT = 5  # cext/frontend/kinds.pxd
MOST_AWAITED = 16384  # cext/frontend/sending.pyx
EDGES = [0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[FrontPair]:
    made: list[Tracer] = []

    def tracer(loop_pass: LoopPass) -> Tracer:
        options = TraceOptions(file=str(tmp_path / "traces"), level=("TIMESTAMPS",), rate="1")
        made.append(Tracer(options, loop_pass, None))
        return made[0]

    both = FrontPair(tracer=tracer)
    both.tracer = made[0]  # type: ignore[attr-defined]
    both.answers.protocol = Protocol.HTTP_PROTOCOL
    yield both
    trio.run(made[0].close)


def traces(pair: FrontPair) -> list[dict[str, Any]]:
    """The traces that have ended."""
    return [json.loads(text) for text in pair.tracer.last()]  # type: ignore[attr-defined]


def names(trace: dict[str, Any]) -> list[str]:
    """The names of a trace's points, whose times must be in order."""
    times = [point["ns"] for point in trace["timestamps"]]
    assert all(a <= b for a, b in pairwise(times))
    return [point["name"] for point in trace["timestamps"]]


def when(trace: dict[str, Any], name: str) -> int:
    (found,) = [point["ns"] for point in trace["timestamps"] if point["name"] == name]
    return int(found)


def nothing_is_left(pair: FrontPair) -> bool:
    return not pair.engine.awaited.traces and not pair.tracer.open  # type: ignore[attr-defined]


def push(pair: FrontPair, number: int, start: int, end: int) -> None:
    """A front end writes SENT of its own making."""
    layout = pair.layout
    (tail,) = struct.unpack("<Q", pair.shared.read(layout.to_engine, 8))
    entry = struct.pack("<IIQQQ", SENT, 0, number, start, end)
    pair.shared.write(layout.to_engine + 256 + tail % 4096 * 32, entry)
    pair.shared.write(layout.to_engine, struct.pack("<Q", tail + 1))


def engine_has_answered(pair: FrontPair, count: int = 1) -> None:
    """The engine gets `count` requests and answers them; the front end has not looked yet."""
    pair.engine.drain()
    assert len(pair.directory.scheduler.requests) == count
    pair.directory.scheduler.answer()
    pair.loop_pass.end()


def test_the_times_are_those_of_the_front_end(pair: FrontPair) -> None:
    pair.request(id="a")
    engine_has_answered(pair)
    assert traces(pair) == []
    assert len(pair.engine.awaited.traces) == 1
    begun = monotonic_ns()
    pair.front.drain()
    pair.front_pass.end()
    sent = monotonic_ns()
    assert traces(pair) == []
    pair.engine.drain()
    (trace,) = traces(pair)
    assert names(trace)[-3:] == ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert begun <= when(trace, "HTTP_SEND_START") <= when(trace, "HTTP_SEND_END") <= sent
    assert when(trace, "INFER_RESPONSE_COMPLETE") < begun
    assert nothing_is_left(pair)


def test_each_response_has_its_own_times(pair: FrontPair) -> None:
    pair.directory.latest["echo"].decoupled = True
    pair.request()
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    starts = []
    for number in range(3):
        complete(request, InferResponse([]), False)
        if number != 1:  # the first is sent alone, the other two together
            pair.loop_pass.end()
            starts.append(monotonic_ns())
            pair.turn()
    final = InferResponse()
    final.null = True
    complete(request, final, True)
    assert traces(pair) == []
    pair.turn()
    (trace,) = traces(pair)
    found = [point["ns"] for point in trace["timestamps"] if point["name"] == "HTTP_SEND_START"]
    assert len(found) == 3
    assert starts[0] <= found[0] < starts[1] <= found[1] <= found[2]
    assert names(trace).count("HTTP_SEND_END") == names(trace).count("INFER_RESPONSE_COMPLETE") == 3
    assert nothing_is_left(pair)


def test_a_final_response_without_contents_waits_for_those_before_it(pair: FrontPair) -> None:
    pair.directory.latest["echo"].decoupled = True
    pair.request()
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    complete(request, InferResponse([]), False)
    final = InferResponse()
    final.null = True
    complete(request, final, True)
    pair.loop_pass.end()
    assert traces(pair) == []
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace).count("HTTP_SEND_END") == 1
    assert nothing_is_left(pair)


def test_a_transport_that_sends_later_says_when(pair: FrontPair) -> None:
    def respond(request: InferRequest, response: InferResponse, final: bool) -> None:
        request.trace.defer()
        pair.answers.got.append((response, final))

    pair.answers.respond = respond  # type: ignore[method-assign]
    requests = [pair.request(), pair.request()]
    engine_has_answered(pair, 2)
    pair.turn()
    assert traces(pair) == []
    begun = monotonic_ns()
    sending = requests[0].trace
    assert type(sending) is Sending
    sending.send_one()
    sending.sent_one()
    sending.abandon()  # as the app of the REST routes does in any case
    requests[1].trace.abandon()
    pair.turn()
    sent, left = traces(pair)
    assert begun <= when(sent, "HTTP_SEND_START") <= when(sent, "HTTP_SEND_END")
    assert names(left)[-1] == "INFER_RESPONSE_COMPLETE"
    assert nothing_is_left(pair)


def test_a_client_that_left_before_the_answer_was_sent(pair: FrontPair) -> None:
    """The engine had answered already."""
    request = pair.request()
    engine_has_answered(pair)
    pair.admission.cancel(request)
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace)[-1] == "INFER_RESPONSE_COMPLETE"
    assert nothing_is_left(pair)


def test_a_client_of_the_app_that_left_before_the_answer_was_sent(pair: FrontPair) -> None:
    """The task that waited for the answer is there no more when it comes."""
    pair.answers = _Waiter({})  # type: ignore[assignment]
    request = pair.request()
    engine_has_answered(pair)
    pair.admission.cancel(request)
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace)[-1] == "INFER_RESPONSE_COMPLETE"
    assert nothing_is_left(pair)


def test_a_client_that_left_before_the_answer(pair: FrontPair) -> None:
    request = pair.request()
    pair.engine.drain()
    pair.admission.cancel(request)
    pair.turn()
    pair.directory.scheduler.answer()
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace)[-1] == "REQUEST_END"
    assert nothing_is_left(pair)


def test_a_refused_request(pair: FrontPair) -> None:
    def enqueue(request: InferRequest) -> None:
        raise Overloaded("the queue is full")

    pair.directory.scheduler.enqueue = enqueue  # type: ignore[method-assign]
    pair.request()
    pair.engine.drain()
    pair.loop_pass.end()
    assert traces(pair) == []
    begun = monotonic_ns()
    pair.turn()
    (trace,) = traces(pair)
    assert trace["error"] == "the queue is full"
    assert names(trace)[-3:] == ["REQUEST_END", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert when(trace, "HTTP_SEND_START") >= begun
    assert nothing_is_left(pair)


def test_an_answer_that_cannot_be_printed_is_told_of_once(pair: FrontPair) -> None:
    """The engine answers with an error instead, whose time is the trace's."""
    pair.request()
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    response = InferResponse([])
    response.parameters = {"no": object()}
    complete(request, response, True)
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace)[-3:] == ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
    ((answer, final),) = pair.answers.got
    assert final
    assert "could not be sent" in str(answer.error)
    assert nothing_is_left(pair)


def test_an_answer_that_never_fits(pair: FrontPair) -> None:
    pair.request()
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    complete(request, InferResponse([from_numpy("OUT", np.zeros(1 << 19, np.int32))]), True)
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace)[-1] == "HTTP_SEND_END"
    assert nothing_is_left(pair)


def slow_answer(pair: FrontPair) -> list[Any]:
    """An answer that the engine has and a worker classifies; what select_later() was given."""
    given: list[Any] = []
    pair.engine_host.select_later = lambda *arguments: given.append(arguments)
    wanted = RequestedOutput("OUT")
    wanted.class_count = 1
    pair.request(outputs=[wanted])
    pair.engine.drain()
    (request,) = pair.directory.scheduler.requests
    complete(request, InferResponse([from_numpy("OUT", np.zeros(1 << 17, np.int32))]), True)
    pair.turn()
    assert len(given) == 1
    assert traces(pair) == []
    return given


def test_an_answer_that_a_worker_classifies(pair: FrontPair) -> None:
    ((end, request, response, final),) = slow_answer(pair)
    begun = monotonic_ns()
    end.selected(request, response, final, None)
    pair.turn()
    (trace,) = traces(pair)
    assert names(trace)[-3:] == ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]
    assert begun <= when(trace, "HTTP_SEND_START")
    assert nothing_is_left(pair)


@pytest.mark.parametrize("finished", [False, True], ids=["worker forgotten", "worker finishes"])
def test_the_front_end_ends_while_a_worker_classifies(pair: FrontPair, finished: bool) -> None:
    ((end, request, response, final),) = slow_answer(pair)
    pair.engine.gone()
    if finished:
        end.selected(request, response, final, None)
    pair.loop_pass.end()
    (trace,) = traces(pair)
    assert names(trace)[-1] == "INFER_RESPONSE_COMPLETE"
    assert nothing_is_left(pair)


@pytest.mark.parametrize("pushed", [False, True], ids=["before it told", "after it told"])
def test_the_front_end_ends(pair: FrontPair, pushed: bool) -> None:
    """What it had told counts, also where the engine has not looked yet."""
    pair.request(id="answered")
    engine_has_answered(pair)
    pair.request(id="under way")
    pair.engine.drain()
    if pushed:
        pair.front.drain()
        pair.front_pass.end()
    pair.engine.gone()
    assert [trace["request_id"] for trace in traces(pair)] == ["answered"]
    pair.directory.scheduler.answer()  # the model goes on, for nobody
    pair.loop_pass.end()
    answered, under_way = traces(pair)
    assert ("HTTP_SEND_END" in names(answered)) is pushed
    assert names(under_way)[-1] == "REQUEST_END"
    assert nothing_is_left(pair)


@pytest.mark.parametrize("start", EDGES)
@pytest.mark.parametrize("end", EDGES)
def test_times_that_cannot_be(pair: FrontPair, start: int, end: int) -> None:
    pair.request()
    engine_has_answered(pair)
    answered = monotonic_ns()
    push(pair, 1, start, end)
    pair.engine.drain()
    (trace,) = traces(pair)
    found = names(trace)
    if end:
        assert found[-2:] == ["HTTP_SEND_START", "HTTP_SEND_END"]
        made = when(trace, "INFER_RESPONSE_COMPLETE")
        assert made <= answered
        assert made <= when(trace, "HTTP_SEND_START") <= when(trace, "HTTP_SEND_END") <= monotonic_ns()
    else:
        assert found[-1] == "INFER_RESPONSE_COMPLETE"
    assert nothing_is_left(pair)


def test_what_nobody_waits_for_means_nothing(pair: FrontPair) -> None:
    pair.request()
    pair.engine.drain()
    push(pair, 1, 1, monotonic_ns())  # before there is an answer
    push(pair, 99, 1, 2)
    pair.engine.drain()
    pair.directory.scheduler.answer()
    pair.loop_pass.end()
    assert traces(pair) == []
    for end in (monotonic_ns(), 2, 0):
        push(pair, 1, 1, end)
    pair.engine.drain()
    (trace,) = traces(pair)
    assert names(trace)[-1] == "HTTP_SEND_END"
    assert pair.violations == []
    assert nothing_is_left(pair)


def test_a_number_that_is_used_again(pair: FrontPair) -> None:
    """The front end owes a time, and never tells: the trace ends, if late."""
    for id in ("first", "second"):
        pair.request(id=id)
        (tail,) = struct.unpack("<Q", pair.shared.read(pair.layout.to_engine, 8))
        at = pair.layout.to_engine + 256 + (tail - 1) % 4096 * 32 + 8
        pair.shared.write(at, struct.pack("<Q", 7))
        engine_has_answered(pair)
    (first,) = traces(pair)
    assert first["request_id"] == "first"
    assert names(first)[-1] == "INFER_RESPONSE_COMPLETE"
    push(pair, 7, 1, monotonic_ns())
    pair.engine.drain()
    assert names(traces(pair)[1])[-1] == "HTTP_SEND_END"
    assert nothing_is_left(pair)


def test_a_front_end_that_never_tells(pair: FrontPair) -> None:
    """Of so many requests the engine does not wait for more, and all traces end with the front end."""
    for _ in range(MOST_AWAITED):
        pair.request()
        pair.engine.drain()
        pair.directory.scheduler.answer()
    pair.loop_pass.end()
    assert traces(pair) == []
    pair.request(id="one more")
    pair.engine.drain()
    pair.directory.scheduler.answer()
    pair.loop_pass.end()
    (trace,) = traces(pair)
    assert trace["request_id"] == "one more"
    assert names(trace)[-1] == "HTTP_SEND_END"
    assert len(pair.engine.awaited.traces) == MOST_AWAITED
    pair.engine.gone()
    assert nothing_is_left(pair)


def test_untraced_requests_owe_nothing() -> None:
    pair = FrontPair()
    request = pair.request()
    engine_has_answered(pair)
    pair.turn()
    assert request.trace is None
    assert pair.front.statistics()["sent"] == 1, "the request, and nothing behind its answer"
