"""Clients that come back while they are answered: they cancel others, or send more, in the middle of a scheduler's work."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from neptrio.errors import TritonError
from neptrio.execution.batch import Batch, complete
from neptrio.execution.instance import Instance
from neptrio.request.infer_request import InferRequest, InferResponse, RequestState, Responder
from neptrio.scheduling import sequence_slots as slots
from neptrio.scheduling.sequence import SequenceScheduler
from tests.execution.test_ahead import Process, Served


class Heard(Responder):
    def __init__(self, *then: Any) -> None:
        self.answers: list[str] = []
        self.then = then

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.answers.append("ok" if response.error is None else str(response.error))
        for function in self.then:
            function()


def request(served: Served, heard: Heard) -> InferRequest:
    made = InferRequest()
    made.model, made.responder, made.inputs = served.model, heard, []
    served.model.inflight += 1
    return made


class Refusing(Process):
    """Cannot begin a batch."""

    def begin(self, batch: Batch) -> None:
        raise OSError(24, "Too many open files")


def test_a_batch_that_cannot_begin_fails_and_frees_its_place() -> None:
    served = Served(1)
    instance = Instance(
        "m_0", served.model, Refusing(False), served.pool.instances[0].mailbox.completions, served.pool
    )
    served.pool.instances = [instance]
    heard = Heard()
    served.scheduler.enqueue(request(served, heard))
    served.scheduler.dispatch(0)
    for item in instance.mailbox.completions.drain():
        item.deliver()
    assert len(heard.answers) == 1 and "Too many open files" in heard.answers[0]
    assert (instance.outstanding, instance.under_way, served.model.inflight) == (0, [], 0)


def test_a_grant_that_answers_whom_cancels_the_next_takes_nobody_else() -> None:
    """A grant of the rate limiter may begin another model's batch, and that one's client may cancel what waits here."""
    served = Served(1)
    heard = [Heard() for _ in range(4)]
    requests = [request(served, one) for one in heard]
    for one in requests:
        served.scheduler.enqueue(one)

    class Limiter:
        def serve(self) -> None:
            if requests[0].state == RequestState.QUEUED:
                for gone in requests[:3]:
                    gone.cancelled = True
                    served.scheduler.cancel(gone)

    instance = served.pool.instances[0]
    instance.claim = SimpleNamespace(  # type: ignore[assignment]
        granted=True, ask=lambda: None, begin=lambda: None, end=lambda: None, leave=lambda: None
    )
    served.pool.limiter = Limiter()  # type: ignore[assignment]
    served.scheduler.dispatch(0)
    served.processes[0].answer(1)
    assert [one.answers for one in heard] == [["request cancelled"]] * 3 + [["ok"]]
    assert served.scheduler.statistics().queued == 0


def test_effects_are_carried_out_in_their_order() -> None:
    done: list[str] = []

    class Scheduler(SequenceScheduler):
        def form(self, index: int, instance: Instance, now_ns: int) -> None:
            pass

        def _ended(self, sequence: Any) -> None:
            done.append(f"{sequence} ended")

        def _drained(self, index: int) -> None:
            done.append(f"{index} drained")

    served = Served(1)
    table: Any = SimpleNamespace(effects=[])
    scheduler = Scheduler.__new__(Scheduler)
    scheduler.table, scheduler._effects = table, deque()
    scheduler._loop = SimpleNamespace(loop_pass=SimpleNamespace(mark=lambda _: None))  # type: ignore[assignment]

    def back() -> (
        None
    ):  # the client's other request is cancelled: its sequence ends, and the last one of the instance
        done.append("answered")
        table.effects.append((slots.DRAINED, 0))
        scheduler._act()

    table.effects = [(slots.CANCELLED, request(served, Heard(back))), (slots.ENDED, "first")]
    scheduler._act()
    assert done == ["answered", "first ended", "0 drained"]


def test_who_comes_back_while_a_line_is_begun_stands_behind_it() -> None:
    served = Served(1, deep=False)
    instance, process = served.pool.instances[0], served.processes[0]
    batches = [instance.make_batch([request(served, Heard())], "single", 0) for _ in range(3)]
    failing = instance.make_batch([request(served, Heard(lambda: instance.begin(batches[2])))], "single", 0)
    failing.error = TritonError("its inputs could not be copied")
    instance.under_way = [failing, *batches]
    instance.outstanding = 4
    instance.line = deque(batches[:2])
    instance.begin_line(failing)
    assert process.batches == batches
    assert instance.line is None


def test_a_response_that_cannot_be_accounted_for_is_answered_with_an_error() -> None:
    served = Served(1)
    heard = Heard()
    made = request(served, heard)

    def broken(outputs: Any) -> Any:
        raise ValueError("no such shape")

    served.model.reshape_outputs = broken
    response = InferResponse([])
    response.outputs = [SimpleNamespace()]  # type: ignore[list-item]
    complete(made, response, True)
    assert heard.answers == ["the response of model 'm' could not be made: ValueError: no such shape"]
    assert served.model.inflight == 0
