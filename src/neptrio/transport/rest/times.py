"""When a request came and when its responses were sent, for the traces of a call of the app, and which requests it has
submitted, for the access log.

The problem: the app knows which responses an answer or a piece of a stream has, and when it gives them to send(). Without
front ends that sends them. With front ends it passes them on, and the client gets them from another process, which also
received the request. The choice: an object for each call that the app tells of responses; a response counts as sent when
it was given to send(), and when the request came the ASGI scope may say (RECEIVED).

Rules:
 1. A response that does not become bytes of its own counts as sent with the bytes that stand for it.
 2. The traces of a call are released with over(), or when the call ends: what was not sent by then never will be.
 3. Between answering() and the end no request is held, only its trace: a slow client would keep the model's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from neptrio.errors import TritonError
from neptrio.execution.admission import Admission
from neptrio.observe.trace import Trace
from neptrio.request.infer_request import InferRequest, monotonic_ns
from neptrio.service.access_log import AccessRecord

# keys of an ASGI scope
TIMES = "neptrio.times"  # the CallTimes
RECEIVED = "neptrio.received"  # when the first byte came and when the request was whole; 0: not known
ACCESS = "neptrio.access"  # the AccessRecord, where there is an access log

Traced = list[tuple[Trace, int]]  # and how many of the oldest responses to its request that are not sent


class CallTimes:
    """The times of one call of the app."""

    def __init__(self, scope: dict[str, Any]) -> None:
        began, self._whole = scope.get(RECEIVED, (0, 0))
        self._access: AccessRecord | None = scope.get(ACCESS)
        self.began = began or monotonic_ns()
        self._requests: list[InferRequest] = []  # that this call has submitted
        self._traces: list[Trace] = []  # that are to be released
        self._answer: Traced = []

    # ------------------------------------------------------------ received

    def came(self) -> None:
        """The request is whole."""
        self._whole = self._whole or monotonic_ns()

    @property
    def whole(self) -> int:
        """When the request was whole."""
        return self._whole or monotonic_ns()

    def stamp(self, admission: Admission, request: InferRequest) -> None:
        """Tells admission when a request came."""
        admission.received_at(request, self.began, self.whole)

    # ------------------------------------------------------------ sent

    @contextmanager
    def submitting(self, request: InferRequest) -> Iterator[None]:
        """While the block runs a request is submitted. One that is refused is told of when the answer is sent."""
        self._requests.append(request)
        try:
            yield
        except TritonError:
            if request.trace is not None:
                request.trace.defer()
                self.answers(request)
            raise
        finally:
            if self._access is not None:
                self._access.asks(request)

    def answers(self, request: InferRequest, count: int = 1) -> None:
        """The answer that the call ends with has so many responses to a request."""
        if request.trace is not None:
            self._answer.append((request.trace, count))

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While the block runs that answer is sent."""
        answer, self._answer = self._answer, []
        self._let_go()
        with self._sending(answer):
            yield

    @contextmanager
    def sending(self, request: InferRequest | None, count: int = 1) -> Iterator[None]:
        """While the block runs bytes are sent that stand for so many responses to a request."""
        trace = None if request is None else request.trace
        with self._sending([(trace, count)] if count and trace is not None else []):
            yield

    @contextmanager
    def _sending(self, responses: Traced) -> Iterator[None]:
        for trace, _ in responses:
            trace.send_one()
        yield
        for trace, count in responses:
            trace.sent_one(count)

    def over(self) -> None:
        """No more responses are sent."""
        self._let_go()
        traces, self._traces = self._traces, []
        for trace in traces:
            trace.abandon()

    def _let_go(self) -> None:
        requests, self._requests = self._requests, []
        self._traces += [request.trace for request in requests if request.trace is not None]
