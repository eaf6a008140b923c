"""The default scheduler: each request is a batch of its own, for the least loaded instance, in order of arrival."""

from __future__ import annotations

from neptrio.errors import Cancelled
from neptrio.execution.batch import complete
from neptrio.execution.instance import InstancePool
from neptrio.request.infer_request import InferRequest, InferResponse, RequestState
from neptrio.scheduling.base import LoopServices, Scheduler, SchedulerStatistics, withdraw
from neptrio.scheduling.default_queue import DefaultQueue

QUEUED = int(RequestState.QUEUED)


class DefaultScheduler(DefaultQueue, Scheduler):
    """Serves models without dynamic or sequence batching.

    A cancelled request is answered at once and leaves a gap in the queue, which dispatch() skips. Gaps are
    removed when they are more than half of the queue.
    """

    gaps: int

    def __init__(self, pool: InstancePool, loop: LoopServices) -> None:
        super().__init__(pool, loop.loop_pass)
        pool.on_free = self.freed

    def cancel(self, request: InferRequest) -> None:
        if request.state == QUEUED:
            self.gaps += 1
        elif not withdraw(request):
            return
        complete(request, InferResponse(None, Cancelled()), True)
        if self.gaps * 2 > self.size:
            self.close_gaps()
        if self.pool.limited:
            self.loop_pass.mark(self)
        self.loop_pass.soon()

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(queued=self.size - self.gaps, executing=self.pool.executing)
