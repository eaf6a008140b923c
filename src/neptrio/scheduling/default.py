"""The default scheduler: each request alone, to the least loaded instance, in arrival order."""

from __future__ import annotations

from collections import deque

from neptrio._cext.batch import complete
from neptrio._cext.request import InferRequest, InferResponse
from neptrio.errors import Cancelled
from neptrio.model.instance import InstancePool
from neptrio.scheduling.base import LoopServices, Scheduler, SchedulerStatistics
from neptrio.stamps import Stamp

QUEUED = 1
PREPARED = 2
QUEUE_START = int(Stamp.QUEUE_START)


class DefaultScheduler(Scheduler):
    """Serves models without dynamic or sequence batching."""

    def __init__(self, pool: InstancePool, loop: LoopServices) -> None:
        self._pool = pool
        self._loop = loop
        self._queue: deque[InferRequest] = deque()
        pool.on_free = self._freed

    def _freed(self) -> None:
        if self._queue:
            self._loop.turn.mark(self)

    def enqueue(self, request: InferRequest) -> None:
        request.stamp(QUEUE_START)
        request.state = QUEUED
        request.scheduler = self
        self._queue.append(request)
        self._loop.turn.mark(self)

    def cancel(self, request: InferRequest) -> None:
        if request.state == QUEUED:
            self._queue.remove(request)
            complete(request, InferResponse(None, Cancelled()), True)

    def dispatch(self, now_ns: int) -> None:
        while self._queue:
            instance = self._pool.available(2)
            if instance is None:
                return
            request = self._queue.popleft()
            request.state = PREPARED
            instance.submit([request], "single", now_ns - request.timestamp(QUEUE_START))

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(queued=len(self._queue), executing=self._pool.executing)
