"""Answers of a gRPC stream whose outputs workers classify.

The problem: such an answer is ready later than those that come after it, but answers of a request must keep their order.
The choice: while one is with a worker, all later answers of the stream queue up behind it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from neptrio.codec.outputs import selects_slowly
from neptrio.errors import Internal, TritonError
from neptrio.request.infer_request import InferRequest, InferResponse
from neptrio.transport.infer_call import select_later

if TYPE_CHECKING:
    from neptrio.transport.grpc.connection import GrpcConnection

Answer = tuple[InferRequest, InferResponse, bool]


class Selecting:
    """The queue of one stream."""

    def __init__(
        self,
        connection: GrpcConnection,
        respond: Callable[[InferRequest, InferResponse, bool, bool], None],
        hold: Callable[[int], None],
    ) -> None:
        """`respond(request, response, final, selected)` sends an answer; `selected` says that its outputs are chosen.
        `hold(bytes)` counts what the queue holds, and less when it is negative."""
        self._connection = connection
        self._respond = respond
        self._hold = hold
        self._queue: deque[tuple[Answer, int]] = deque()
        self._scope: trio.CancelScope | None = None

    def take(self, request: InferRequest, response: InferResponse, final: bool) -> bool:
        """Whether it takes an answer, because its outputs take long or others wait."""
        if not self._queue and not _slow(request, response):
            return False
        size = sum(tensor.nbytes for tensor in response.outputs or ())
        self._hold(size)
        if request.trace is not None:
            request.trace.hold()
        self._queue.append(((request, response, final), size))
        if len(self._queue) == 1:
            self._scope = trio.CancelScope()
            self._connection.wire.start(self._run, self._scope)
        return True

    async def _run(self, scope: trio.CancelScope) -> None:
        with scope:
            while self._queue:
                (request, response, final), size = self._queue[0]
                slow = _slow(request, response)
                if slow:
                    try:
                        await select_later(self._connection.services, request, response, self._connection)
                    except TritonError as error:
                        response.outputs = None
                        response.error = error.with_traceback(None)
                    except Exception as error:
                        response.outputs = None
                        response.error = Internal(f"internal error: {type(error).__name__}: {error}")
                if not self._queue:  # the stream has ended in the moment in which the answer was ready
                    return
                self._queue.popleft()
                self._hold(-size)
                trace = request.trace
                self._respond(request, response, final, slow)
                if trace is not None:
                    trace.release()
                self._connection.flush_soon()

    def end(self) -> None:
        """The stream has ended: drops what waits, and the stream, which would otherwise live until the collector finds both."""
        if self._scope is not None:
            self._scope.cancel()
        while self._queue:
            (request, _, _), size = self._queue.popleft()
            self._hold(-size)
            if request.trace is not None:
                request.trace.abandon()
                request.trace.release()
        self._respond = self._hold = _nothing


def _nothing(*_: object) -> None:
    """Nobody hears of it any more."""


def _slow(request: InferRequest, response: InferResponse) -> bool:
    return response.error is None and request.outputs is not None and selects_slowly(request, response)
