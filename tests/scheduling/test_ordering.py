"""preserve_ordering: who may answer when, with one response each and with many."""

from __future__ import annotations

from collections.abc import Callable

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


def test_who_sends_much_waits_for_his_own_client() -> None:
    class Behind(Heard):
        def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
            return request.id == "a"

    line = Line("a", "b")
    line.order, line.heard = ArrivalOrder(), Behind()
    waits = {}
    for id, request in line.requests.items():
        request.responder = line.heard
        line.order.arrived(request)
        waits[id] = request.responder.wait_for_room(request, lambda: None)
    assert waits == {"a": True, "b": False}


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


class Leaves(Heard):
    """Has another request leave the line when it is answered, as a client that cancels all it has."""

    def __init__(self, line: Line, other: str) -> None:
        super().__init__()
        self.line, self.other = line, other

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        super().respond(request, response, final)
        self.line.order.skip(self.line.requests[self.other])


def test_who_leaves_while_another_is_answered_takes_nobody_with_him() -> None:
    line = Line("a", "b")
    leaving = Leaves(line, "c")
    b = line.requests["b"]
    b.responder.responder = leaving  # type: ignore[attr-defined]
    for id in ("c", "d", "e"):
        request = line.requests[id] = InferRequest()
        request.id, request.responder = id, line.heard
        line.order.arrived(request)
    assert line.respond("b") == line.respond("e") == []
    assert line.respond("a") == [("a", True)]
    assert leaving.events == [("b", True)]
    assert len(line.order) == 2
    assert line.respond("d") == [("d", True), ("e", True)]
    assert len(line.order) == 0


def test_who_responds_while_he_is_answered_keeps_his_order() -> None:
    line = Line("a", "b")

    class Again(Heard):
        def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
            super().respond(request, response, final)
            if len(self.events) == 1:
                line.respond("b", True)

    again = Again()
    line.requests["b"].responder.responder = again  # type: ignore[attr-defined]
    line.respond("b", False)
    line.respond("b", False)
    line.respond("a")
    assert again.events == [("b", False), ("b", False), ("b", True)]
    assert len(line.order) == 0


def test_what_was_held_of_one_who_leaves_comes_before_its_answer() -> None:
    line = Line("a", "b")
    assert line.respond("b", False) == []
    line.order.skip(line.requests["b"])
    assert line.heard.events == [("b", False)]
    assert line.respond("b") == [("b", True)]
    assert line.respond("a") == [("a", True)]
    assert len(line.order) == 0
