"""Model instances: a thread each, with a mailbox, and the pool that picks among them.

A native instance that has nothing under way and whose executions have been measured at a few
microseconds runs on the trio thread itself: handing such work to a thread and back costs several
times the work. `inline_executions` says how often that happened.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from neptrio._cext.batch import Batch
from neptrio._cext.mailbox import CompletionQueue, Mailbox, WorkItem
from neptrio._cext.native import run_inline
from neptrio._cext.request import InferRequest, monotonic_ns
from neptrio.backends.base import BackendInstance
from neptrio.errors import TritonError
from neptrio.model.core import ModelCore
from neptrio.scheduling.rate_limiter import RateLimiter, Turnstile

log = logging.getLogger("neptrio.instance")

INLINE_LIMIT_NS = 20_000  # above this the hop to a thread and back is worth its 40 us
EXECUTING = 3


@dataclass(frozen=True)
class InstanceStatistics:
    """What an instance has under way and has done."""

    name: str
    outstanding: int
    executions: int
    inline_executions: int
    prepared_requests: int  # in batches that wait in the mailbox or for a turn
    executing_requests: int  # in batches the instance has taken


class _Call(WorkItem):
    """initialize() or finalize() on the instance's thread."""

    def __init__(self, function: Callable[[], None], done: Callable[[BaseException | None], None]) -> None:
        self._function = function
        self._done = done
        self._error: BaseException | None = None

    def execute(self) -> None:
        try:
            self._function()
        except BaseException as error:
            self._error = error

    def deliver(self) -> None:
        self._done(self._error)


class Instance:
    """One instance: `submit` gives it a batch, `finished` is called when the batch is back."""

    def __init__(
        self,
        name: str,
        model: ModelCore,
        backend: BackendInstance,
        completions: CompletionQueue,
        pool: InstancePool,
    ) -> None:
        self.name = name
        self.backend = backend
        self.outstanding = 0
        self.executions = 0
        self.inline_executions = 0
        self._mean_ns = backend.expected_ns if backend.native else float("inf")
        self._model = model
        self._pool = pool
        self._under_way: deque[Batch] = deque()
        self.turnstile: Turnstile | None = None
        self._without_turn: deque[Batch] = deque()
        self._mailbox = Mailbox(completions)
        self._thread = threading.Thread(target=self._mailbox.run, name=f"instance-{name}", daemon=True)

    @property
    def mailbox(self) -> Mailbox:
        """Where this instance's batches wait; a running GPU batch takes the next one from it."""
        return self._mailbox

    def start(self, done: Callable[[BaseException | None], None]) -> None:
        """Starts the thread and initializes the backend on it; `done(error)` on the trio thread."""
        self._thread.start()
        self._mailbox.submit(_Call(self.backend.initialize, done))

    def stop(self, done: Callable[[BaseException | None], None]) -> None:
        """Finalizes after the last batch and ends the thread; `done(error)` on the trio thread."""
        self._mailbox.submit(_Call(self.backend.finalize, done))
        self._mailbox.close()

    def submit(self, requests: list[InferRequest], close_reason: str, oldest_wait_ns: int) -> None:
        """Executes `requests` as one batch."""
        batch = self._batch(requests, close_reason, oldest_wait_ns)
        self.outstanding += 1
        self._under_way.append(batch)
        if self.turnstile is None:
            self._begin(batch)
        elif self.turnstile.granted:
            self.turnstile.begin()
            self._begin(batch)
        else:  # from a scheduler that does not ask first: the batch waits for its turn
            self._without_turn.append(batch)
            self.turnstile.ask()
            self._pool.serve()

    def on_turn(self) -> None:
        """The rate limiter has given this instance a turn."""
        if self._without_turn and self.turnstile is not None:
            self.turnstile.begin()
            self._begin(self._without_turn.popleft())
        else:
            self._pool.on_free()

    def _begin(self, batch: Batch) -> None:
        if batch.error is not None:
            batch.deliver()
        elif self.backend.overlapping:
            self.backend.begin(batch)
        elif self.outstanding == 1 and self._mean_ns < INLINE_LIMIT_NS and not batch.off_loop:
            self.inline_executions += 1
            run_inline(batch)
            batch.deliver()
        else:
            self._mailbox.submit(batch)

    def _batch(self, requests: list[InferRequest], close_reason: str, oldest_wait_ns: int) -> Batch:
        batch = Batch(self._model, requests, close_reason, oldest_wait_ns)
        batch.instance = self
        try:
            batch = self.backend.prepare(batch)
        except TritonError as error:
            batch.error = error
        except Exception as error:
            batch.error = self.backend.describe_failure(error)
        if batch.error is not None:
            batch.count_execution = False
            batch.compute_start = batch.compute_end = monotonic_ns()
        for request in requests:
            request.batch = batch
        return batch

    def withdraw(self, request: InferRequest) -> bool:
        """Takes a request out of a batch that waits in the mailbox; the batch keeps its place.

        False when the batch has begun. The caller answers the request.
        """
        old = request.batch
        rest = [other for other in old.requests if other is not request]
        if not rest:
            if not self._mailbox.replace(old):
                return False
            self.outstanding -= 1
            self._under_way.remove(old)
            request.batch = None
            self._pool.freed()
            return True
        new = self._batch(rest, old.close_reason, old.oldest_wait_ns)
        if new.error is not None or not self._mailbox.replace(old, new):
            for other in rest:
                other.batch = old
            return False
        self._under_way[self._under_way.index(old)] = new
        request.batch = None
        return True

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        """Tells the backend, on its thread, that a sequence it has worked on is over."""
        backend = self.backend
        if not backend.wants_sequence_end:
            return
        if backend.overlapping:  # in line with begin(), or a successor of the same id might overtake it
            backend.sequence_ended(sequence_id, reason)
        else:
            self._mailbox.submit(_Call(lambda: backend.sequence_ended(sequence_id, reason), self._hook_done))

    def _hook_done(self, error: BaseException | None) -> None:
        if error is not None:
            log.error(
                "the sequence end hook of %s failed: %s", self.name, self.backend.describe_failure(error)
            )

    def finished(self, batch: Batch) -> None:
        """The batch is back on the trio thread and about to be answered."""
        self.outstanding -= 1
        self._under_way.remove(batch)
        self.executions += 1
        if self.backend.native:
            # clipped: a preempted execution must not send a fast model to its thread for long
            took = min(batch.compute_end - batch.compute_start, 5 * INLINE_LIMIT_NS)
            self._mean_ns += (took - self._mean_ns) * 0.1
        if self._pool.on_finished is not None:
            self._pool.on_finished(batch)
        if self.turnstile is not None:
            if self._without_turn:
                self.turnstile.ask()
            self._pool.freed()
            self.turnstile.end()
            return
        self._pool.freed()

    def statistics(self) -> InstanceStatistics:
        """What is under way and what has been done."""
        # batches are taken in the order they were submitted, so those that wait are the last ones
        waiting = self._mailbox.waiting + len(self._without_turn)
        taken = max(0, len(self._under_way) - waiting)
        requests = [len(batch.requests) for batch in self._under_way]
        return InstanceStatistics(
            self.name,
            self.outstanding,
            self.executions,
            self.inline_executions,
            prepared_requests=sum(requests[taken:]),
            executing_requests=sum(requests[:taken]),
        )


class InstancePool:
    """A model version's instances; the least loaded one is used."""

    def __init__(self) -> None:
        self.instances: list[Instance] = []
        self.on_free: Callable[[], None] = lambda: None
        self._limiter: RateLimiter | None = None
        # told of every batch that is back, before its requests are answered
        self.on_finished: Callable[[Batch], None] | None = None

    @property
    def limited(self) -> bool:
        """The rate limiter gives these instances their turns; nothing is prepared ahead."""
        return self._limiter is not None

    def add(self, instance: Instance, limiter: RateLimiter | None, group: Any, device: int) -> None:
        """Takes a new instance in. Raises InvalidArgument when it could never have a turn."""
        self._limiter = limiter
        self.instances.append(instance)
        if limiter is not None:
            instance.turnstile = limiter.register(group, device, instance.on_turn)

    def clear(self) -> None:
        """Drops every instance."""
        for instance in self.instances:
            if instance.turnstile is not None and self._limiter is not None:
                self._limiter.unregister(instance.turnstile)
                instance.turnstile = None
        self.instances = []

    def serve(self) -> None:
        """Has the rate limiter give the turns it can."""
        if self._limiter is not None:
            self._limiter.serve()

    @property
    def executing(self) -> int:
        """Batches under way, prepared ones included."""
        return sum(instance.outstanding for instance in self.instances)

    def available(self, limit: int) -> Instance | None:
        """The instance with the fewest batches under way, if that is below `limit`.

        Instances that work on several batches at once take that many more.
        """
        if self._limiter is not None:
            return self._with_turn()
        best = None
        for instance in self.instances:
            room = 1 if instance.backend.blocked else limit + instance.backend.capacity - 1
            if instance.outstanding < room and (best is None or instance.outstanding < best.outstanding):
                best = instance
                if best.outstanding == 0:
                    break
        return best

    def _with_turn(self) -> Instance | None:
        """An idle instance that has a turn. All idle ones are in line afterwards."""
        idle = [instance for instance in self.instances if instance.outstanding == 0]
        for instance in idle:
            assert instance.turnstile is not None
            instance.turnstile.ask()
        self.serve()
        for instance in idle:
            if instance.turnstile is not None and instance.turnstile.granted:
                return instance
        return None

    def settle(self, wanting: bool) -> None:
        """A scheduler has dispatched all it can. Unless it still wants instances, unused turns and
        places in the rate limiter's line are given up."""
        if self._limiter is not None and not wanting:
            for instance in self.instances:
                if instance.turnstile is not None and instance.outstanding == 0:
                    instance.turnstile.leave()

    def freed(self) -> None:
        """An instance has room again."""
        self.on_free()
