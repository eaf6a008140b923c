"""Model instances, each with a thread and a mailbox, and the pool that picks one for a batch.

A native instance runs a batch on the trio thread itself when nothing of it is under way and its executions
have been measured at a few microseconds: handing such a batch to a thread and back would cost several times
that. `inline_executions` counts these batches.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import trio

from neptrio.config.groups import Placement
from neptrio.errors import TritonError
from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch
from neptrio.execution.input_fetch import InputFetch
from neptrio.execution.instance_core import InstanceCore, PoolCore
from neptrio.execution.rate_limiter import RateLimiter
from neptrio.execution.traced_inputs import TracedInputs
from neptrio.foreign import text_of
from neptrio.loop import threads
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.mailbox import CompletionQueue, WorkItem
from neptrio.request.infer_request import InferRequest, ModelCore, RequestState

log = logging.getLogger("neptrio.instance")

DONE = int(RequestState.DONE)
# how long instances that are to end are waited for whose executions have answered all they were given, or whose answers nobody
# awaits; after that finalize() is called, which kills a process that hangs
BATCHES_SECONDS = 30.0


@dataclass(frozen=True)
class InstanceStatistics:
    """An instance's batches under way and its executions so far."""

    name: str
    outstanding: int
    executions: int
    inline_executions: int
    prepared_requests: int  # in batches that wait in the mailbox or for a grant of the rate limiter
    executing_requests: int  # in batches that the instance has begun


class _Call(WorkItem):
    """A call of initialize() or finalize() on the instance's thread."""

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
        done, error = self._done, self._error
        del self._done, self._error  # the error's traceback refers to this call, and `done` to the error
        done(error)


class Instance(InstanceCore):
    """One instance. submit() gives it a batch, finished() is called when the batch comes back."""

    def __init__(
        self,
        name: str,
        model: ModelCore,
        backend: BackendInstance,
        completions: CompletionQueue,
        pool: InstancePool,
    ) -> None:
        super().__init__(name, model, backend, completions, pool)
        self.awaiting_grant: deque[Batch] = deque()
        self.placement: Placement | None = None  # which instance group and device it was made for
        self.kept = False  # it is retired, but live sequences keep it
        self.overdue = False  # it is finalized whatever it has under way
        self.stopping = False
        self._thread = threads.make(self.mailbox.run, name=f"instance-{name}")

    @property
    def passive(self) -> bool:
        """It is initialized and finalized as the others, and executes nothing."""
        return self.placement is not None and bool(self.placement.group.passive)

    def begin_thread(self) -> None:
        """Starts the thread, which waits until the kernel has run it: milliseconds where all cores are busy, so the loop has
        another thread call this. Raises NoThread."""
        threads.begin(self._thread)

    def start(self, done: Callable[[BaseException | None], None]) -> None:
        """Initializes the backend on the thread, which is started if need be; calls `done(error)` on the trio thread."""
        try:
            if self._thread.ident is None:
                self.begin_thread()
        except threads.NoThread as error:
            done(error)
            return
        self.mailbox.submit(_Call(self.backend.initialize, done))

    def stop(self, done: Callable[[BaseException | None], None]) -> None:
        """Finalizes the backend after the last batch and ends the thread; calls `done(error)` on the trio thread. A thread
        that hangs is left behind."""
        if self._thread.ident is None:  # it could not be started
            self.mailbox.close()
            done(None)
            return
        if self.backend.hangs:
            log.warning("an execution of %s has not returned: its thread is left behind", self.name)
            self.mailbox.close()
            done(None)
            return
        self.mailbox.submit(_Call(self.backend.finalize, done))
        self.mailbox.close()

    def on_grant(self) -> None:
        """Called when the rate limiter gives this instance a grant: begins the batch that waits for one."""
        if self.awaiting_grant and self.claim is not None:
            self.claim.begin()
            self.begin(self.awaiting_grant.popleft())
        else:
            self.pool.on_free()

    def fetch(self, batch: Batch) -> None:
        InputFetch(self, batch).start()

    def await_copies(self, batch: Batch) -> None:
        TracedInputs(self, batch).start()

    def begin_line(self, batch: Batch) -> None:
        """Begins a batch that has waited for copies, and those in line behind it. What comes in meanwhile, from a client
        that is answered here, gets in line too."""
        line = self.line
        assert line is not None
        while True:
            self.start_batch(batch)
            if self.line is not line:  # this one has to wait in turn
                assert self.line is not None
                self.line.extend(line)
                return
            if not line:
                self.line = None
                return
            batch = line.popleft()

    def withdraw(self, request: InferRequest) -> bool:
        """Takes a request out of a batch that has not begun; the rest of the batch keeps its place in line.

        Returns False when the batch has begun. The caller answers the request.
        """
        old = request.batch
        rest = [other for other in old.requests if other is not request]
        if not rest:
            if not self.mailbox.replace(old):
                return False
            self.outstanding -= 1
            self.under_way.remove(old)
            request.batch = None
            self.give_back()
            return True
        new = self.make_batch(rest, old.close_reason, old.oldest_wait_ns)
        if new.error is not None or not self.mailbox.replace(old, new):
            for other in rest:
                other.batch = old
            return False
        self.under_way[self.under_way.index(old)] = new
        request.batch = None
        return True

    def sequence_ended(self, sequence_id: int | str, reason: str) -> None:
        """Tells the backend, on the instance's thread, that a sequence it has worked on is over."""
        backend = self.backend
        if not backend.wants_sequence_end:
            return
        if backend.overlapping:  # after earlier batches, and before those of a new sequence with the same id
            backend.sequence_ended(sequence_id, reason)
        else:
            self.mailbox.submit(_Call(lambda: backend.sequence_ended(sequence_id, reason), self._hook_done))

    def _hook_done(self, error: BaseException | None) -> None:
        if error is not None:
            log.error(
                "the sequence end hook of %s failed: %s", self.name, self.backend.describe_failure(error)
            )

    def statistics(self) -> InstanceStatistics:
        """The current numbers."""
        # batches begin in the order they were submitted, so the ones that wait are the last ones
        waiting = self.mailbox.waiting + len(self.awaiting_grant) + self.backend.ahead + len(self.line or ())
        taken = max(0, len(self.under_way) - waiting)
        # A decoupled request may have its final response before its batch is back, and null requests of the
        # sequence batcher are not counted as requests.
        requests = [
            sum(r.state != DONE and r.collect_statistics for r in batch.requests) for batch in self.under_way
        ]
        return InstanceStatistics(
            self.name,
            self.outstanding,
            self.executions,
            self.inline_executions,
            prepared_requests=sum(requests[taken:]),
            executing_requests=sum(requests[:taken]),
        )


def _nobody(instance: Instance, error: TritonError | None = None) -> None:
    """Nobody keeps a record per instance."""


class InstancePool(PoolCore):
    """A model version's instances; a batch goes to the one with the fewest batches under way.

    A retired instance gets no new batches. When it has finished what it has (batches, responses that a response
    sender of its model may still send, live sequences), it is finalized.

    The pool has every instance from the moment it is made to the end of its finalize(), also those of a change in place that is
    not carried out: stop() returns after the last of them.
    """

    instances: list[Instance]

    def __init__(self, loop_pass: LoopPass | None = None) -> None:
        self._private = False  # the limiter is this model's own: share()
        self.passive: list[Instance] = []  # they are never given a batch, and no scheduler knows of them
        self.retiring: list[Instance] = []
        self.joining: list[Instance] = []  # made for a change in place that is not carried out yet
        self.unwanted: list[Instance] = []  # of a change that was given up: they only wait to be finalized
        # Set by schedulers that keep a record per instance. on_retired may set the instance's `kept`.
        self.on_added: Callable[[Instance], None] = _nobody
        self.on_retired: Callable[[Instance], None] = _nobody
        # its process is gone, with what it kept
        self.on_lost: Callable[[Instance, TritonError], None] = _nobody
        self.gone = (
            trio.Event()
        )  # set when a retired instance has been finalized; each time there is a new event
        self._loop_pass = loop_pass

    @property
    def limited(self) -> bool:
        """True when a rate limiter grants executions; then no batches are prepared in advance."""
        return self.limiter is not None

    def add(self, instance: Instance, limiter: RateLimiter | None, group: Any, device: int) -> None:
        """Adds a new instance. Raises InvalidArgument when the rate limiter could never grant it an execution."""
        self.limiter = limiter
        (self.passive if instance.passive else self.instances).append(instance)
        self.register(instance, group, device)

    def register(self, instance: Instance, group: Any, device: int) -> None:
        """Registers the instance with the rate limiter, if there is one. Raises InvalidArgument."""
        if self.limiter is not None and not instance.passive:
            group = type(group)() if self._private else group
            instance.claim = self.limiter.register(group, device, instance.on_grant)

    def share(self, instances: Iterable[Instance]) -> None:
        """Lets only one at a time execute of those on a device that are exclusive (rate_limiter.py, rule 6). Called with
        instances that are initialized, before they are given batches."""
        serving = [instance for instance in instances if not instance.passive]
        sharing = [instance for instance in serving if instance.backend.exclusive]
        if not sharing:
            return
        if self.limiter is None:
            assert self._loop_pass is not None
            self.limiter, self._private = RateLimiter(self._loop_pass), True
        for instance in {*self.instances, *self.retiring, *serving}:
            place = instance.placement
            assert place is not None
            if instance in sharing or instance.claim is None:
                self.unregister(instance)
                own = f"execution lock of {instance.model.name}" if instance in sharing else ""
                group = type(place.group)() if self._private else place.group
                instance.claim = self.limiter.register(group, place.device, instance.on_grant, own)

    def unregister(self, instance: Instance) -> None:
        """Undoes register()."""
        if instance.claim is not None and self.limiter is not None:
            self.limiter.unregister(instance.claim)
            instance.claim = None

    def drop(self, instance: Instance) -> None:
        """Nobody uses that instance any more."""
        self.unregister(instance)
        instance.backend.let_go()

    def clear(self) -> None:
        """Drops every instance, and the scheduler that the pool tells of them."""
        for instance in self.all:
            self.drop(instance)
        self.instances, self.passive, self.retiring = [], [], []
        self.on_free = self.on_finished = None  # type: ignore[assignment]
        self.on_added = self.on_retired = self.on_lost = _nobody
        self._tell_gone()

    @property
    def all(self) -> list[Instance]:
        """The instances that serve, the passive ones, and the retired ones that are not finalized."""
        return self.instances + self.passive + self.retiring

    def exchange(self, added: list[Instance], retired: list[Instance]) -> None:
        """Adds those of `joining` and retires others: new ones serve from now on, retired ones get no new batches. Does not
        wait."""
        for instance in added:
            self.joining.remove(instance)
            if instance.passive:
                self.passive.append(instance)
            else:
                self.instances.append(instance)
                self.on_added(instance)
        for instance in retired:
            if instance.passive:
                self.passive.remove(instance)
            else:
                self.instances.remove(instance)
                if instance.claim is not None and instance.outstanding == 0:
                    instance.claim.leave()
                self.on_retired(instance)
            instance.retired = True
            self.retiring.append(instance)
        self.note_retired()
        self.freed()

    async def discard(self, instances: list[Instance]) -> None:
        """Finalizes instances of `joining` that will not serve: when their warm-up has ended, or after BATCHES_SECONDS."""
        for instance in instances:
            self.joining.remove(instance)
            instance.retired = True
            self.unwanted.append(instance)
        self.note_retired()
        with trio.move_on_after(BATCHES_SECONDS):
            await self._gone_all(instances)
        self._finalize(instances)
        await self._gone_all(instances)

    async def _gone_all(self, instances: list[Instance]) -> None:
        while any(instance in self.unwanted for instance in instances):
            await self.gone.wait()

    async def batches_back(self) -> None:
        """Returns when no batch is under way, or after BATCHES_SECONDS. Requests may be answered before their batch is back, by
        a response sender of the model, and the warm-up of a load that was given up may be under way."""
        with trio.move_on_after(BATCHES_SECONDS):
            while self.executing:
                back = trio.Event()
                self.on_free = back.set  # the scheduler has nothing left that waits for room
                await back.wait()

    async def stop(self) -> None:
        """Finalizes all instances in parallel. Those of a change in place, which has been given up, end as discard() says."""
        for instance in self.instances + self.passive:
            instance.retired = True
            self.retiring.append(instance)
        self.instances, self.passive = [], []
        self._finalize(self.retiring)
        while self.retiring or self.joining or self.unwanted:
            await self.gone.wait()

    def _finalize(self, instances: Iterable[Instance]) -> None:
        """Finalizes instances now, whatever they have under way."""
        for instance in instances:
            instance.overdue = True
        self.dispatch(0)

    def health_changed(self) -> bool:
        """Sets which instances are `away`: those whose process is gone, while it is being started again or another instance
        can execute. Returns whether any can take batches, now or as soon as it is back."""
        able = any(instance.backend.healthy or instance.backend.returning for instance in self.instances)
        for instance in self.instances:
            instance.away = able and not instance.backend.healthy
            if instance.away and instance.claim is not None and instance.outstanding == 0:
                instance.claim.leave()
        self.freed()  # or one is given up, and what waits for it is to fail
        return able

    def note_retired(self) -> None:
        """Has dispatch() check, when the loop pass ends, whether a retired instance can be finalized."""
        if self._loop_pass is not None:
            self._loop_pass.mark(self)
            self._loop_pass.soon()

    def dispatch(self, now_ns: int) -> None:
        """Finalizes the retired instances that have nothing left to do. Called when the loop pass ends."""
        for instance in self.retiring + self.unwanted:
            busy = (instance.outstanding or instance.owed or instance.kept) and not instance.overdue
            if not instance.stopping and not busy:
                instance.stopping = True
                self.unregister(instance)
                instance.stop(partial(self._gone, instance))

    def _gone(self, instance: Instance, error: BaseException | None) -> None:
        if error is not None:
            log.error("finalize of %s failed: %s", instance.name, text_of(error))
        (self.unwanted if instance in self.unwanted else self.retiring).remove(instance)
        self.drop(instance)
        self._tell_gone()

    def _tell_gone(self) -> None:
        gone, self.gone = self.gone, trio.Event()
        gone.set()

    def serve(self) -> None:
        """Lets the rate limiter give grants now."""
        if self.limiter is not None:
            self.limiter.serve()

    @property
    def executing(self) -> int:
        """How many batches are under way, prepared ones included."""
        return sum(instance.outstanding for instance in self.all)

    def _granted(self) -> Instance | None:
        """An idle instance that has a grant. None when there is none; then every idle instance has asked for one."""
        idle = [instance for instance in self.instances if instance.outstanding == 0 and not instance.away]
        for instance in idle:
            assert instance.claim is not None
            instance.claim.ask()
        self.serve()
        for instance in idle:
            if instance.claim is not None and instance.claim.granted:
                return instance
        return None

    def settle(self, wanting: bool) -> None:
        """Called after a scheduler has dispatched all it can. When it needs no more instances, idle ones give back
        unused grants and their places in the rate limiter's line."""
        if self.limiter is not None and not wanting:
            for instance in self.instances:
                if instance.claim is not None and instance.outstanding == 0:
                    instance.claim.leave()
