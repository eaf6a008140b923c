"""preserve_ordering: who may answer when, with one response each and with many."""

from __future__ import annotations

from neptrio.request.infer_request import InferRequest, InferResponse, Responder
from neptrio.scheduling.ordering import ArrivalOrder


class Heard(Responder):
    def __init__(self) -> None:
        self.events: list[tuple[str, bool]] = []

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.events.append((request.id, final))


class Line:
    def __init__(self, *ids: str) -> None:
        self.order, self.heard = ArrivalOrder(), Heard()
        self.requests: dict[str, InferRequest] = {}
        for id in ids:
            request = self.requests[id] = InferRequest()
            request.id, request.responder = id, self.heard
            self.order.arrived(request)

    def respond(self, id: str, final: bool = True) -> list[tuple[str, bool]]:
        """Answers a request; what has been let through since the last call."""
        request, before = self.requests[id], len(self.heard.events)
        request.responder.respond(request, InferResponse([]), final)
        return self.heard.events[before:]


def test_the_first_in_line_lets_the_rest_through() -> None:
    line = Line("a", "b", "c")
    assert line.respond("c") == line.respond("b") == []
    assert line.respond("a") == [("a", True), ("b", True), ("c", True)]
    assert len(line.order) == 0


def test_responses_of_the_first_flow_and_those_of_others_wait_for_its_last() -> None:
    line = Line("a", "b")
    assert line.respond("a", False) == [("a", False)]
    assert line.respond("b", False) == []
    assert line.respond("a", False) == [("a", False)]
    assert line.respond("a") == [("a", True), ("b", False)]
    assert line.respond("b", False) == [("b", False)]
    assert line.respond("b") == [("b", True)]
    assert len(line.order) == 0


def test_one_who_leaves_lets_the_rest_through_and_answers_at_once() -> None:
    line = Line("a", "b", "c")
    assert line.respond("b") == []
    line.order.skip(line.requests["a"])
    assert line.heard.events == [("b", True)]
    assert line.respond("a") == [("a", True)], "its own answer is not held"
    assert line.respond("c") == [("c", True)]


def test_one_who_comes_again_keeps_his_place() -> None:
    line = Line("a", "b")
    line.order.arrived(line.requests["a"])
    assert line.respond("b") == []
    assert line.respond("a") == [("a", True), ("b", True)]


class Broken(Heard):
    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if response.error is None:
            raise RuntimeError("no room")
        super().respond(request, response, final)


def test_a_responder_that_raises_hears_why_and_holds_up_nobody() -> None:
    line = Line("a", "b", "c")
    line.order = ArrivalOrder()
    broken = Broken()
    for request in line.requests.values():
        request.responder = broken if request.id == "b" else line.heard
        line.order.arrived(request)
    assert line.respond("b") == line.respond("c") == []
    assert line.respond("a") == [("a", True), ("c", True)]
    assert broken.events == [("b", True)]
    assert len(line.order) == 0
