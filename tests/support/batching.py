"""A dynamic batcher on a clock that only the test moves: without threads, I/O or sleeping."""

from __future__ import annotations

from typing import Any

from neptrio.errors import TritonError
from neptrio.execution.batch import Batch
from neptrio.loop.loop_lag import LoopLag
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    InputSpec,
    ModelCore,
    Responder,
    Tensor,
    Timestamp,
)
from neptrio.scheduling.base import LoopServices
from neptrio.scheduling.dynamic import DynamicScheduler
from neptrio.scheduling.policy import BatchingPolicy

START = 1_000_000_000


class LoopPass:
    """Collects marked schedulers; the bench dispatches them when it ends the pass."""

    def __init__(self) -> None:
        self.marked: list[Any] = []

    def mark(self, dispatcher: Any) -> None:
        self.marked.append(dispatcher)

    mark_later = mark

    def soon(self) -> None:
        pass


class Timer:
    """One pending callback."""

    def __init__(self, when_ns: int, callback: Any) -> None:
        self.when_ns = when_ns
        self.callback = callback

    def cancel(self) -> None:
        self.callback = None


class Timers:
    """Timers that fire when the bench moves its clock past them."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def at(self, when_ns: int, callback: Any) -> Timer:
        timer = Timer(when_ns, callback)
        self.timers.append(timer)
        return timer

    def next(self) -> int | None:
        self.timers = [timer for timer in self.timers if timer.callback is not None]
        return min((timer.when_ns for timer in self.timers), default=None)

    def fire(self, now: int) -> None:
        for timer in list(self.timers):
            if timer.when_ns <= now and timer.callback is not None:
                callback, timer.callback = timer.callback, None
                callback()


class Instance:
    """Runs one batch at a time, in order; the test says when it is finished."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.batches: list[Batch] = []

    @property
    def outstanding(self) -> int:
        return len(self.batches)

    def submit(self, requests: list[InferRequest], close_reason: str, oldest_wait_ns: int) -> None:
        batch = Batch(self.pool.bench.model, requests, close_reason, oldest_wait_ns)
        batch.instance = self
        for request in requests:
            request.batch = batch
        self.batches.append(batch)
        self.pool.bench.note("batch", [r.id for r in requests], close_reason, oldest_wait_ns)

    def withdraw(self, request: InferRequest) -> bool:
        if request.batch not in self.batches[1:]:
            return False
        batch = request.batch
        rest = [other for other in batch.requests if other is not request]
        self.batches.remove(batch)
        if rest:
            self.batches.append(Batch(self.pool.bench.model, rest, batch.close_reason, batch.oldest_wait_ns))
            for other in rest:
                other.batch = self.batches[-1]
            self.batches[-1].instance = self
        else:
            self.pool.on_free()
        return True

    def finish(self, error: TritonError | None = None) -> None:
        """Ends the running batch: its requests are answered."""
        batch = self.batches[0]
        batch.error = error
        batch.responses = [InferResponse([]) for _ in batch.requests]
        batch.deliver()

    def finished(self, batch: Batch) -> None:
        self.batches.remove(batch)
        self.pool.on_free()


class Pool:
    """Stands in for neptrio.execution.instance.InstancePool, with the bench's instances."""

    limited = False

    def __init__(self, bench: Bench, count: int) -> None:
        self.bench = bench
        self.instances = [Instance(self) for _ in range(count)]
        self.on_free: Any = lambda: None

    @property
    def executing(self) -> int:
        return sum(instance.outstanding for instance in self.instances)

    def available(self, limit: int) -> Instance | None:
        best = min(self.instances, key=lambda instance: instance.outstanding)
        return best if best.outstanding < limit else None

    def nearest(self, found: Instance, request: InferRequest) -> Instance:
        return found

    def settle(self, wanting: bool) -> None:
        pass

    def freed(self) -> None:
        self.on_free()


class Recorder(Responder):
    """Records every answer."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.bench.note("answer", request.id, str(response.error or "ok"))


class Bench:
    """A batcher, its instances and a clock. `events` holds (time since start, what, ...)."""

    def __init__(
        self, policy: BatchingPolicy, instances: int = 1, specs: list[InputSpec] | None = None
    ) -> None:
        self.now = START
        self.events: list[tuple[Any, ...]] = []
        self.model = ModelCore("bench", "1")
        self.model.max_batch_size = policy.max_batch_size
        self.model.set_inputs(specs or [InputSpec("INPUT0", 8, (-1,))])
        self.model.counters = ModelCounters()
        self.loop_pass = LoopPass()
        self.timers = Timers()
        self.pool = Pool(self, instances)
        loop: Any = LoopServices(self.loop_pass, self.timers, None, LoopLag())  # type: ignore[arg-type]
        pool: Any = self.pool
        self.scheduler = self.model.scheduler = DynamicScheduler(self.model, pool, loop, policy)
        self.recorder = Recorder(self)
        self.requests: dict[str, InferRequest] = {}

    def note(self, *event: Any) -> None:
        self.events.append((self.now - START, *event))

    def make(
        self, id: str, size: int = 1, priority: int = 0, timeout_us: int = 0, width: int = 1
    ) -> InferRequest:
        request = InferRequest()
        request.id = id
        request.model = self.model
        request.responder = self.recorder
        request.batch_size = size
        request.priority = priority
        request.timeout_us = timeout_us
        request.inputs = [Tensor("INPUT0", 8, (size, width), bytes(4 * size * width))]
        return request

    def send(self, id: str, *, loop_pass: bool = True, **options: Any) -> bool:
        """Enqueues a request; False when it was refused. Ends the pass unless `loop_pass` is False."""
        return self.enqueue(self.make(id, **options), loop_pass)

    def enqueue(self, request: InferRequest, loop_pass: bool = True) -> bool:
        request.stamp(Timestamp.REQUEST_START, self.now)
        request.stamp(Timestamp.QUEUE_START, self.now)
        self.requests[request.id] = request
        self.model.inflight += 1
        try:
            self.scheduler.enqueue(request)
        except TritonError as error:
            self.model.inflight -= 1
            self.note("refused", request.id, str(error))
            return False
        finally:
            if loop_pass:
                self.end_pass()
        return True

    def cancel(self, id: str) -> None:
        request = self.requests[id]
        if not request.cancelled:
            request.cancelled = True
            self.scheduler.cancel(request)
        self.end_pass()

    def finish(self, instance: int = 0, error: TritonError | None = None) -> None:
        if self.pool.instances[instance].batches:
            self.pool.instances[instance].finish(error)
            self.end_pass()

    def end_pass(self) -> None:
        while self.loop_pass.marked:
            marked, self.loop_pass.marked = self.loop_pass.marked, []
            for dispatcher in marked:
                dispatcher.dispatch(self.now)

    def advance(self, ns: int) -> None:
        """Moves the clock, stopping at every timer on the way."""
        end = self.now + ns
        stops = 0
        while (when := self.timers.next()) is not None and when <= end:
            stops = 0 if when > self.now else stops + 1
            assert stops < 100, f"the timer is set for {when - START} again and again"
            self.now = max(self.now, when)
            self.timers.fire(self.now)
            self.end_pass()
        self.now = end

    def oversleep(self, ns: int) -> None:
        """Moves the clock in one step, like a busy loop: timers that were due on the way fire late, together."""
        self.now += ns
        self.timers.fire(self.now)
        self.end_pass()

    def batches(self) -> list[tuple[list[str], str]]:
        """(request ids, close reason) of every batch so far."""
        return [(event[2], event[3]) for event in self.events if event[1] == "batch"]

    def answers(self) -> list[tuple[str, str]]:
        """(request id, "ok" or the error's text) of every answer so far."""
        return [(event[2], event[3]) for event in self.events if event[1] == "answer"]
