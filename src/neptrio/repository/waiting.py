"""Requests that wait for a model that is loaded on demand.

The problem: a request may have to wait for its model for seconds, whichever way it came, and then be an ordinary request to
it; and it must not wait longer than its client does. The choice: requests wait as they are, decoded and accepted by a
stand-in for the model (execution.admission.Absent), with a room of waiting requests for a scheduler. When the model serves
they are taken out and submitted, as if they had come now.

Rules:
 1. A request that was parked is answered exactly once: by its model, or by the room with an error.
 2. It waits at most as long as its own timeout says, and at most --load-wait-secs, also where it is parked more than once; it
    leaves when it is cancelled.
 3. Requests are submitted in the order in which they came, before any request that comes later is.
 4. One request is taken out at a time and handed over: whoever is answered may come back at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from neptrio.errors import Cancelled, Internal, Overloaded, Reason, TritonError, Unavailable
from neptrio.execution.admission import Absent
from neptrio.execution.batch import accept, complete, give_back, refuse
from neptrio.foreign import summary
from neptrio.loop.timers import Timer, Timers
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    RequestState,
    Timestamp,
    monotonic_ns,
)
from neptrio.request.reshape import reshape_inputs, undone_of_inputs
from neptrio.scheduling.base import Scheduler, SchedulerStatistics

MOST_WAITING = 16384  # requests for one model
TIMED_OUT = "Request timeout expired"  # as the queue of a model says it


class StandIn(Absent):
    """A model that is not loaded, as a request sees it."""

    pool: Any = None  # it has no instances

    def __init__(
        self, name: str, version: str, one_response: str | None, room: Room, parked: Callable[[], None]
    ) -> None:
        super().__init__(name, version, one_response)
        self.scheduler = room
        self.counters = room.counters
        self.since_ns = 0  # since when its request has waited, 0 = since it is parked
        self._parked = parked

    def park(self, request: InferRequest) -> None:
        room: Room = self.scheduler
        room.park(request, self)
        self._parked()


class Room(Scheduler):
    """The requests that wait for one model. Trio thread only."""

    def __init__(self, name: str, timers: Timers, counters: ModelCounters, longest_ns: int) -> None:
        """`counters` are of all rooms: what they count is shown nowhere, since no model has had these requests."""
        self.name = name
        self.counters = counters
        self._timers = timers
        self._longest_ns = longest_ns
        self._waiting: OrderedDict[InferRequest, tuple[int, Timer]] = OrderedDict()
        # the highest priority of those that wait, and how many have it: asked whenever loads are ranked, for every model that
        # is waited for, so they are looked through only when none is left that has it
        self._highest = self._with_highest = 0
        self.why_not: Callable[[], str] = lambda: ""  # what the load waits for, for those that wait too long

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int:
        """Since when the first of them waits, 0 without any."""
        return next(iter(self._waiting.values()))[0] if self._waiting else 0

    @property
    def priority(self) -> int:
        """The highest priority of those that wait: 1 is the highest, 0 where none has one."""
        if self._highest and not self._with_highest:
            some = [request.priority for request in self._waiting if request.priority]
            self._highest = min(some, default=0)
            self._with_highest = some.count(self._highest)
        return self._highest

    def park(self, request: InferRequest, stand_in: StandIn) -> None:
        """Lets a request wait. Raises Overloaded when too many do."""
        if len(self._waiting) >= MOST_WAITING:
            raise Overloaded(f"{MOST_WAITING} requests wait for model '{self.name}' to be loaded")
        now = monotonic_ns()
        before = request.model
        if not stand_in.since_ns:
            stand_in.since_ns = before.since_ns if isinstance(before, StandIn) and before.since_ns else now
        since = stand_in.since_ns
        request.model, request.scheduler = stand_in, self
        accept(request)
        request.state = RequestState.QUEUED
        latest, own = since + self._longest_ns, request.timeout_us * 1000
        if own and now + own <= latest:
            timer = self._timers.at(now + own, lambda: self._expire(request, True))
        else:
            timer = self._timers.at(latest, lambda: self._expire(request, False))
        self._waiting[request] = now, timer
        priority = request.priority
        if priority and (not self._highest or priority < self._highest):
            self._highest, self._with_highest = priority, 1
        elif priority and priority == self._highest:
            self._with_highest += 1

    def take_back(self, request: InferRequest, stand_in: StandIn) -> None:
        """Lets a request wait, from when it came, that a model has accepted and no instance has begun. It is as it came again."""
        model = request.model
        queued = request.timestamp(Timestamp.QUEUE_START)
        if request.timeout_us and queued:
            request.timeout_us = _left_of(request.timeout_us, queued)
        undone = undone_of_inputs(model.config)
        if undone:
            reshape_inputs(request, undone)
        give_back(request)
        stand_in.since_ns = request.timestamp(Timestamp.REQUEST_START)
        try:
            self.park(request, stand_in)
        except TritonError as refused:
            accept(request)
            self._answer(request, refused)

    def _expire(self, request: InferRequest, own: bool) -> None:
        waited = self._take(request)
        if waited is None:
            return
        if own:
            error = Unavailable(TIMED_OUT, reason=Reason.REJECTED)
        else:
            why = self.why_not()
            error = Later(
                f"model '{self.name}' is loaded on demand and was not loaded within --load-wait-secs, "
                f"{self._longest_ns / 1e9:g} s{f': {why}' if why else ''}",
                reason=Reason.REJECTED,
            )
        self._answer(request, error)

    def _take(self, request: InferRequest) -> int | None:
        """Takes a request out; since when it has waited, None if it is not here."""
        found = self._waiting.pop(request, None)
        if found is None:
            return None
        found[1].cancel()
        if request.priority and request.priority == self._highest:
            self._with_highest -= 1
        return found[0]

    def _answer(self, request: InferRequest, error: TritonError) -> None:
        complete(request, InferResponse(None, error), True)

    def release(self, submit: Callable[[InferRequest], None], goes: Callable[[str], bool]) -> int:
        """The model serves: submits all requests for versions that `goes` is true of. Returns how many."""
        count = 0
        waiting = sorted(
            self._waiting, key=_since
        )  # those that were taken back came before others that are here
        for request in waiting:  # some may be answered, and others come, before it is their turn
            if request in self._waiting and goes(request.model.version):
                since = self._take(request)
                assert since is not None
                self._submit(request, since, submit)
                count += 1
        return count

    def _submit(self, request: InferRequest, since: int, submit: Callable[[InferRequest], None]) -> None:
        stand_in = request.model
        refuse(request)  # it leaves the stand-in's counts
        request.state, request.scheduler = RequestState.TAKEN, None
        if request.timeout_us:
            request.timeout_us = _left_of(request.timeout_us, since)
        error: TritonError | None = None
        try:
            submit(request)
        except TritonError as refused:
            error = refused.with_traceback(None)
        except Exception as broken:
            error = Internal(f"internal error: {summary(broken)}")
        if error is not None:
            request.model, request.trace = stand_in, None  # a trace that has begun knows that it was refused
            accept(request)
            self._answer(request, error)
        elif request.state != RequestState.DONE and request.scheduler is not self:
            request.stamp(
                Timestamp.REQUEST_START, stand_in.since_ns
            )  # the time in which it waited is its own

    def fail(self, error: Callable[[], TritonError], which: Callable[[str], bool]) -> int:
        """Versions that `which` is true of cannot be loaded: answers all requests for them, each with an error of its own.
        Returns how many."""
        count = 0
        for request in list(self._waiting):
            if request in self._waiting and which(request.model.version):
                self._take(request)
                self._answer(request, error())
                count += 1
        return count

    # ------------------------------------------------------------ as a scheduler

    def enqueue(self, request: InferRequest) -> None:
        raise Unavailable(f"model '{self.name}' is not loaded")  # park() is how requests come here

    def cancel(self, request: InferRequest) -> None:
        if self._take(request) is not None:
            self._answer(request, Cancelled())

    def dispatch(self, now_ns: int) -> None:
        pass

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(queued=len(self._waiting), executing=0)


def _since(request: InferRequest) -> int:
    since: int = request.model.since_ns
    return since


def _left_of(timeout_us: int, since_ns: int) -> int:
    """What is left of a timeout that began then; at least a microsecond, since 0 is none."""
    return max(1, timeout_us - (monotonic_ns() - since_ns) // 1000)


class Later(Unavailable):
    """The model cannot be loaded now; the answer says when to try again."""

    headers = ((b"retry-after", b"5"),)


class NoRoom(Later):
    """There is no room for the model."""


def later(message: str, seconds: float) -> Later:
    """The error of a request that may be sent again in so many seconds."""
    error = Later(message, reason=Reason.REJECTED)
    error.headers = ((b"retry-after", b"%d" % max(1, round(seconds + 0.5))),)
    return error
