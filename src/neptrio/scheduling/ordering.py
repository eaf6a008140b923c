"""preserve_ordering: responses leave in the order in which their requests arrived.

A request gets its place in line when it is enqueued; its responses are held until every earlier request has had
its final one. Requests that never execute (timed out, cancelled) are answered at once and hold nobody up. A
_Place becomes the request's responder and passes responses on to the original one, so models and schedulers know
nothing of the order.

Rules:
 1. Whoever is given a response may come back at once, with a cancellation or a new request. So the line and its places are
    whole whenever a response is handed over, and only one loop hands over: who comes back meanwhile changes the line, and that
    loop goes on with what it finds.
 2. A request with many responses waits for its own client, as without an order. It does not wait for its turn: the first in line
    may need the thread that would wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from neptrio.execution.batch import hand_over
from neptrio.request.infer_request import InferRequest, InferResponse, Responder


class _Place(Responder):
    """A request's place in line. It stands in for the request's responder until the final response."""

    def __init__(self, order: ArrivalOrder, responder: Responder) -> None:
        self.order = order
        self.responder = responder
        self.held: deque[tuple[InferRequest, InferResponse, bool]] = deque()
        self.done = False

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.order.responded(self, request, response, final)

    def wait_for_room(self, request: InferRequest, callback: Callable[[], None]) -> bool:
        return self.responder.wait_for_room(request, callback)


class ArrivalOrder:
    """The line of one model's accepted requests, in order of arrival."""

    def __init__(self) -> None:
        self._line: deque[_Place] = deque()
        self._advancing = False

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
            held, place.held = place.held, deque()
            for earlier in held:  # of a request that is executed again: they come before its answer
                hand_over(place.responder, *earlier)
            self._advance()

    def responded(self, place: _Place, request: InferRequest, response: InferResponse, final: bool) -> None:
        """Takes a response of the request in `place`: sends it if the request is first in line, else holds it."""
        place.done = place.done or final
        place.held.append((request, response, final))
        if self._line[0] is place:
            self._advance()

    def _advance(self) -> None:
        """Hands over what the first in line has, and goes on with the next where that was its last."""
        if self._advancing:
            return
        self._advancing = True
        line = self._line
        try:
            while line:
                first = line[0]
                if first.held:
                    hand_over(first.responder, *first.held.popleft())
                elif first.done:
                    line.popleft()
                else:
                    return
        finally:
            self._advancing = False
