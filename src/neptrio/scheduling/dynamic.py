"""The dynamic batcher: requests wait together and are executed as one batch. A request is never split.

The problem: a batch is cheaper than its requests one by one, but no request should wait longer than the model's
owner allows, and limits and deadlines are promises. The choice: the queues and the decision (which requests, how
many, why now) are in cext/scheduling/batch_queue, code without I/O that is told the time. This module connects
it to instances, a timer, errors and the log.

Rules:
 1. Everything happens on the trio thread. Expired requests are refused before a batch is chosen.
 2. A batch is formed when an instance is idle. Where no queue policy needs exactness (no limit, no timeout, no
    priority levels), one batch per instance may be prepared while the instance still works, but only one that
    waiting could not improve: it is full, or cannot reach a preferred size.
 3. The delay counts from the oldest request of the batch. One timer is set to the earlier of the delay's end
    and the earliest deadline.
 4. Before a request is refused because the queue is full, dispatch() runs if it has something to do. So a limit
    counts requests that really wait, whatever the order of events within one loop pass.
 5. A cancelled request leaves at once while it is queued or prepared; the rest of its batch is executed.

Source: docs/protocol/rules.md E2, docs/protocol/observed.md 9; docs/batching.md.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from neptrio.errors import Cancelled, Reason, Unavailable
from neptrio.execution.batch import complete
from neptrio.execution.instance import InstancePool
from neptrio.limits import shown
from neptrio.loop.timers import Timer
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Timestamp, monotonic_ns
from neptrio.scheduling.base import LoopServices, Scheduler, SchedulerStatistics, held_requests, withdraw
from neptrio.scheduling.batch_queue import REASONS, BatchQueue
from neptrio.scheduling.ordering import ArrivalOrder
from neptrio.scheduling.policy import BatchingPolicy

log = logging.getLogger("neptrio.batcher")

QUEUE_START = int(Timestamp.QUEUE_START)


@dataclass(frozen=True)
class DynamicStatistics(SchedulerStatistics):
    """What the batcher holds, and the batches it has formed so far.

    `close_reasons` counts batches by the reason why they were closed; waits are those of the oldest request
    of each batch.
    """

    batches: int
    requests: int
    close_reasons: dict[str, int]
    oldest_wait_ns_sum: int
    oldest_wait_ns_max: int
    rejected_full: int
    rejected_timeout: int
    cancelled: int


FULL_WITHOUT_ID = "[request id: <id_unknown>] Exceeds maximum queue size"
FULL = object()  # for TritonError.alike: transports encode the text of errors with the same object once


class DynamicScheduler(Scheduler):
    """Serves models whose configuration has dynamic_batching."""

    def __init__(
        self, model: ModelCore, pool: InstancePool, loop: LoopServices, policy: BatchingPolicy
    ) -> None:
        self._model = model
        self._pool = pool
        self._loop = loop
        self.policy = policy
        self.queue = BatchQueue(
            policy.max_batch_size,
            policy.preferred,
            policy.delay_ns,
            [(level.max_size, level.timeout_us, level.override, level.delay) for level in policy.levels],
            policy.default_level,
            model.input_specs,
            policy.shape_tensors,
        )
        self._prefetch = not policy.exact and not pool.limited
        self.order = ArrivalOrder() if policy.preserve_ordering else None
        self._timer: Timer | None = None
        self._wake = 0  # when dispatch() is next needed because time passes (ns); 0 = never
        self._noted = False  # dispatch() will be called at the end of this loop pass
        self._flushing = False
        self._last_count = 1
        self._hold = held_requests("TRITONSERVER_DELAY_SCHEDULER")
        if self._hold:
            log.warning(
                "TRITONSERVER_DELAY_SCHEDULER: model '%s' starts once %d requests wait",
                model.name,
                self._hold,
            )
        self.close_reasons = dict.fromkeys(REASONS, 0)
        self._batches = 0
        self._requests = 0
        self._wait_sum = 0
        self._wait_max = 0
        self._rejected_full = 0
        self._rejected_timeout = 0
        self._cancelled = 0
        pool.on_free = self._freed

    # ------------------------------------------------------------ coming and going

    def enqueue(self, request: InferRequest) -> None:
        queue = self.queue
        if not queue.push(request) and (
            not self.catch_up(request.timestamp(QUEUE_START)) or not queue.push(request)
        ):
            raise self._refusal(request.id)
        request.scheduler = self
        self.arrived(request)
        if self._noted:
            return
        self._noted = True
        if queue.weight >= queue.max_batch_size or (self._last_count == 1 and self._model.inflight == 1):
            self._loop.loop_pass.mark(self)
        else:
            self._loop.loop_pass.mark_later(self)

    def arrived(self, request: InferRequest) -> None:
        if self.order is not None:
            self.order.arrived(request)

    def left(self, request: InferRequest) -> None:
        if self.order is not None:
            self.order.skip(request)

    def _refusal(self, id: str) -> Unavailable:
        """The error for a request that finds the queue full. Made cheaply: most are raised when load is highest."""
        self._rejected_full += 1
        if id:
            return Unavailable(
                f"[request id: {shown(id)}] Exceeds maximum queue size", reason=Reason.REJECTED
            )
        error = Unavailable(FULL_WITHOUT_ID, reason=Reason.REJECTED)
        error.alike = FULL
        return error

    def expect_room(self) -> None:
        if self.queue.full and not self._noted and not 0 < self._wake <= monotonic_ns():
            raise self._counted_refusal()

    def _counted_refusal(self) -> Unavailable:
        """As admission counts a request that enqueue() refuses."""
        error = self._refusal("")
        self._model.counters.refused += 1
        self._model.counters.note_error(error, True)
        return error

    def level_of(self, request: InferRequest) -> int:
        levels = len(self.policy.levels)
        return (request.priority if 0 < request.priority <= levels else self.policy.default_level) - 1

    def has_place(self, level: int, beside: int) -> bool:
        most = self.policy.levels[level].max_size
        return not most or self.queue.size_of(level) + beside < most

    def catch_up(self, now_ns: int) -> bool:
        if self._noted or 0 < self._wake <= now_ns:  # the last dispatch() may have left something to do
            self.dispatch(now_ns)
            return True
        return False

    def full(self, request: InferRequest) -> Unavailable:
        return self._refusal(request.id)

    def refused_at(self, request: InferRequest) -> int:
        return self.queue.refused_at(request)

    def expired(self, request: InferRequest) -> None:
        self._rejected_timeout += 1
        super().expired(request)

    def cancel(self, request: InferRequest) -> None:
        if self.queue.remove(request) or withdraw(request):
            self._cancelled += 1
            self.left(request)
            complete(request, InferResponse(None, Cancelled()), True)
            if self.queue.size or self._pool.limited:  # its neighbours may now fit into one batch
                self._mark()
            self._loop.loop_pass.soon()

    def flush(self) -> None:
        self._flushing = True
        self._mark()
        self._loop.loop_pass.soon()

    def stop(self) -> None:
        """Refuses new requests; queued ones are sent without waiting for more."""
        self.flush()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ deciding

    def _mark(self) -> None:
        if not self._noted:
            self._noted = True
            self._loop.loop_pass.mark(self)

    def _freed(self) -> None:
        # with a rate limiter: to give back a grant that is not wanted
        if self.queue.size or self._pool.limited:
            self._mark()

    def _timer_fired(self) -> None:
        self._timer = None
        self._mark()

    def dispatch(self, now_ns: int) -> None:
        """Refuses requests that have expired at `now_ns`, then submits batches while instances are free."""
        self._noted = False
        queue = self.queue
        wake = 0
        wanting = False
        deadline = queue.next_deadline_ns
        if deadline and deadline <= now_ns:
            for request in queue.expire(now_ns):
                self.expired(request)
        if not self._held():
            pool = self._pool
            while queue.size:
                if not queue.decide(now_ns, self._flushing):
                    wake = queue.wake_ns
                    break
                instance = pool.available(1)
                if instance is None and self._prefetch and queue.saturated:
                    instance = pool.available(2)
                if instance is None:
                    wanting = True
                    break
                if pool.limited and not (queue.size and queue.decide(now_ns, self._flushing)):
                    continue  # a grant has answered somebody who cancelled what was chosen
                reason, wait = queue.reason, queue.oldest_wait_ns
                requests = queue.take()
                self._count(requests, reason, wait)
                instance = pool.nearest(instance, requests[0])
                instance.submit(requests, reason, wait)
            pool.settle(wanting)
        deadline = queue.next_deadline_ns
        if deadline and (wake == 0 or deadline < wake):
            wake = deadline
        self._wake = wake
        if wake and (self._timer is None or wake < self._timer.when_ns):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.timers.at(wake, self._timer_fired)

    def _held(self) -> bool:
        """Debugging aid TRITONSERVER_DELAY_SCHEDULER=N: True until N requests have waited at the same time."""
        if self._hold and (self._flushing or self.queue.size >= self._hold):
            self._hold = 0
        return self._hold > 0

    def _count(self, requests: list[InferRequest], reason: str, wait_ns: int) -> None:
        self.close_reasons[reason] += 1
        self._batches += 1
        self._last_count = len(requests)
        self._requests += self._last_count
        self._wait_sum += wait_ns
        if wait_ns > self._wait_max:
            self._wait_max = wait_ns
        if log.isEnabledFor(logging.DEBUG):
            log.debug(
                "model '%s' version %s: batch of %d from %d request(s) closed, %s; its oldest request "
                "waited %d us, %d request(s) still wait",
                self._model.name,
                self._model.version,
                sum(request.batch_size for request in requests),
                self._last_count,
                WORDS[reason],
                wait_ns // 1000,
                self.queue.size,
            )

    def statistics(self) -> DynamicStatistics:
        return DynamicStatistics(
            queued=self.queue.size,
            executing=self._pool.executing,
            batches=self._batches,
            requests=self._requests,
            close_reasons=dict(self.close_reasons),
            oldest_wait_ns_sum=self._wait_sum,
            oldest_wait_ns_max=self._wait_max,
            rejected_full=self._rejected_full,
            rejected_timeout=self._rejected_timeout,
            cancelled=self._cancelled,
        )


WORDS = {
    "full": "full: the next request would not fit or max_batch_size is reached",
    "preferred": "preferred: a preferred batch size is reached or can no longer be",
    "delay": "delay: max_queue_delay_microseconds of its oldest request is over",
    "shape": "shape: the next request's inputs or shapes differ",
    "idle": "idle: an instance is free and no delay is configured",
    "flush": "flush: the model is being unloaded or the server stops",
}
