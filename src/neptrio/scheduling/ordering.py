"""preserve_ordering: responses leave in the order in which their requests arrived.

A request gets its place in line when it is enqueued; its responses are held until every earlier request has had
its final one. Requests that never execute (timed out, cancelled) are answered at once and hold nobody up. A
_Place becomes the request's responder and passes responses on to the original one, so models and schedulers know
nothing of the order.
"""

from __future__ import annotations

from collections import deque

from neptrio.execution.batch import hand_over
from neptrio.request.infer_request import InferRequest, InferResponse, Responder


class _Place(Responder):
    """A request's place in line. It stands in for the request's responder until the final response."""

    def __init__(self, order: ArrivalOrder, responder: Responder) -> None:
        self.order = order
        self.responder = responder
        self.held: list[tuple[InferRequest, InferResponse, bool]] = []
        self.done = False

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.order.responded(self, request, response, final)


class ArrivalOrder:
    """The line of one model's accepted requests, in order of arrival."""

    def __init__(self) -> None:
        self._line: deque[_Place] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def arrived(self, request: InferRequest) -> None:
        """Adds an accepted request to the end of the line; one that is executed again (iterative) keeps its place."""
        if isinstance(request.responder, _Place):
            return
        place = _Place(self, request.responder)
        self._line.append(place)
        request.responder = place

    def skip(self, request: InferRequest) -> None:
        """The request will not execute: its answer need not wait, and no other waits for it."""
        place = request.responder
        if isinstance(place, _Place):
            place.done = True
            request.responder = place.responder
            self._advance()

    def responded(self, place: _Place, request: InferRequest, response: InferResponse, final: bool) -> None:
        """Takes a response of the request in `place`: sends it if the request is first in line, else holds it."""
        place.done = place.done or final
        if self._line[0] is not place:
            place.held.append((request, response, final))
            return
        hand_over(place.responder, request, response, final)
        if final:
            self._advance()

    def _advance(self) -> None:
        line = self._line
        while line:
            first = line[0]
            held, first.held = first.held, []
            for request, response, final in held:
                hand_over(first.responder, request, response, final)
            if not first.done:
                return
            line.popleft()
