"""Responses in the order of their requests, whatever order the model answers in."""

from __future__ import annotations

from collections import deque
from typing import Any

from neptrio._cext.request import InferRequest, InferResponse, Responder


class _Place:
    """A request's place in the row and the responses that wait for the ones before it."""

    __slots__ = ("done", "held", "request", "responder")

    def __init__(self, request: InferRequest, responder: Responder) -> None:
        self.request = request
        self.responder = responder
        self.held: list[tuple[InferResponse, bool]] = []
        self.done = False


class InOrder(Responder):
    """Stands between requests and their responders.

    add() gives a request the last place and routes its responses through here. A response leaves at
    once when its request is the first that is not done, and waits for that otherwise; decoupled
    requests hold the place until their final response.
    """

    def __init__(self) -> None:
        self._row: deque[_Place] = deque()
        self._places: dict[InferRequest, _Place] = {}

    def add(self, request: InferRequest) -> None:
        """`request` is answered after every request that was added before it."""
        if request not in self._places:
            place = self._places[request] = _Place(request, request.responder)
            self._row.append(place)
            request.responder = self

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> Any:
        place = self._places[request]
        place.done = final
        if self._row[0] is not place:
            place.held.append((response, final))
            return
        place.responder.respond(request, response, final)
        while self._row and self._row[0].done:
            del self._places[self._row.popleft().request]
            if self._row:
                first = self._row[0]
                held, first.held = first.held, []
                for item, last in held:
                    first.responder.respond(first.request, item, last)

    def __len__(self) -> int:
        return len(self._row)
