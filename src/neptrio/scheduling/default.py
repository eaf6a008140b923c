"""The default scheduler: each request alone, to the least loaded instance, in arrival order."""

from __future__ import annotations

from collections import deque

from neptrio._cext.batch import complete
from neptrio._cext.request import InferRequest, InferResponse
from neptrio.errors import Cancelled
from neptrio.model.instance import InstancePool
from neptrio.scheduling.base import LoopServices, Scheduler, SchedulerStatistics, withdraw
from neptrio.stamps import Stamp

QUEUED = 1
PREPARED = 2
QUEUE_START = int(Stamp.QUEUE_START)


class DefaultScheduler(Scheduler):
    """Serves models without dynamic or sequence batching.

    A cancelled request is answered at once and leaves a gap in the queue that dispatch() steps
    over; gaps are swept out when they are the larger half.
    """

    def __init__(self, pool: InstancePool, loop: LoopServices) -> None:
        self._pool = pool
        self._loop = loop
        self._queue: deque[InferRequest] = deque()
        self._gaps = 0
        self._depth = 2
        pool.on_free = self._freed

    def _freed(self) -> None:
        if self._queue or self._pool.limited:  # a turn that is not wanted is given back
            self._loop.turn.mark(self)

    def enqueue(self, request: InferRequest) -> None:
        request.stamp(QUEUE_START)
        request.state = QUEUED
        request.scheduler = self
        self._queue.append(request)
        self._loop.turn.mark(self)

    def cancel(self, request: InferRequest) -> None:
        if request.state == QUEUED:
            self._gaps += 1
        elif not withdraw(request):
            return
        complete(request, InferResponse(None, Cancelled()), True)
        if self._gaps * 2 > len(self._queue):
            self._queue = deque(waiting for waiting in self._queue if waiting.state == QUEUED)
            self._gaps = 0
        if self._pool.limited:
            self._loop.turn.mark(self)
        self._loop.turn.soon()

    def dispatch(self, now_ns: int) -> None:
        while self._queue:
            request = self._queue[0]
            if request.state != QUEUED:
                self._queue.popleft()
                self._gaps -= 1
                continue
            instance = self._pool.available(self._depth)
            if instance is None:
                break
            self._queue.popleft()
            request.state = PREPARED
            instance.submit([request], "single", now_ns - request.timestamp(QUEUE_START))
        self._pool.settle(bool(self._queue))

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(queued=len(self._queue) - self._gaps, executing=self._pool.executing)
