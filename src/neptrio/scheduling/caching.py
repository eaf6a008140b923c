"""The response cache in front of a scheduler: hits are answered at once, misses go to the scheduler.

Rules:
 1. A hit is answered before the model's scheduler sees it, and touches none of the compute statistics.
 2. A response is stored in the cache once, when it is final, not an error and not cancelled. A request that the cache had
    no answer for is a miss, whether or not its own could be stored; a follower is a miss only where it is executed.
 3. With preserve_ordering, hits and followers also keep the order of arrival.
 4. With coalescing, a request that equals one in flight follows it: it gets a copy of the answer, or is
    executed itself when that one failed or was cancelled. A follower that is cancelled is answered as
    cancelled, and nothing else changes.
 5. A follower waits no longer than it would in the model's queue: it is refused at its own deadline, and nothing else changes.
 6. Followers count as waiting requests: they are refused where the model's queue would be full with them in it. Those that it
    would send to an instance at the end of the loop pass, such as the one that is followed, do not wait and do not count.
 7. Answering a follower may bring its client back at once, with a cancellation of another one too. So those that were not
    answered stay in the list, where cancel() finds them.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import Counter, deque
from typing import Any

import neptrio.request.device_memory as device_memory
from neptrio.errors import Cancelled, Internal, Reason, TritonError
from neptrio.execution.batch import complete
from neptrio.loop.timers import Timer, Timers
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    MemoryKind,
    RequestState,
    Tensor,
    Timestamp,
    monotonic_ns,
)
from neptrio.scheduling.base import Scheduler, SchedulerStatistics, ServedModel
from neptrio.scheduling.response_cache import Cache, ResponseCache, request_key

log = logging.getLogger("neptrio.cache")

QUEUE_START = int(Timestamp.QUEUE_START)
COMPUTE_START = int(Timestamp.COMPUTE_START)
LOOKUP_START = int(Timestamp.CACHE_LOOKUP_START)
LOOKUP_END = int(Timestamp.CACHE_LOOKUP_END)
INSERT_START = int(Timestamp.CACHE_INSERT_START)
INSERT_END = int(Timestamp.CACHE_INSERT_END)
QUEUED = int(RequestState.QUEUED)
_LOADS = itertools.count()
ALONE = b""  # the key of a follower that is to be executed itself: a miss once it is, and its answer is not stored

GPU = int(MemoryKind.GPU_MEMORY)


class CachingScheduler(Scheduler):
    """Wraps the scheduler of a model with response_cache.enable. The cache is a ResponseCache but in AskingScheduler."""

    cache: Cache

    def __init__(self, model: ServedModel, inner: Scheduler, cache: Cache, timers: Timers) -> None:
        self.inner = inner
        self.cache = cache
        self._timers = timers
        self._model = model
        # part of every key, so that a reloaded model starts with no answers
        self._load = cache.scope(model.version, next(_LOADS))
        self._followers: dict[bytes, deque[InferRequest]] = {}
        self._waiting: Counter[int] = Counter()  # followers by level of the model's queue
        self._deadlines: dict[InferRequest, Timer] = {}  # of those that wait here and have one

    def enqueue(self, request: InferRequest) -> None:
        if device_memory.in_use() and any(t.memory_kind == GPU for t in request.inputs):
            self.inner.enqueue(request)  # hashing inputs in device memory would mean copying them to the host
            return
        key = request_key(request, self._model.name, self.load_of(request))
        request.stamp(QUEUE_START)
        # first, since the one that it equals may be answered meanwhile
        has_place = not self.cache.coalesce or key not in self._followers or self._has_place(request)
        request.stamp(LOOKUP_START)
        wanted = self.wanted(request)
        assert isinstance(self.cache, ResponseCache)
        found = self.cache.lookup(key, wanted)
        request.stamp(LOOKUP_END)
        self.cache.spent(request.timestamp(LOOKUP_END) - request.timestamp(LOOKUP_START), 0)
        if found is not None:
            request.cache_hit = True
            self.inner.arrived(request)
            complete(request, InferResponse([t for t in found if t.name in wanted]), True)
            return
        if self.cache.coalesce and key in self._followers:
            if not has_place:
                raise self.inner.full(request)
            self._follow(request, key)
            return
        self._execute(request, key)

    def load_of(self, request: InferRequest) -> str:
        """What a key has beside the model's name: nobody gets, or learns from the time that it takes, what another has asked
        for."""
        return self._load if request.owner is None else f"{self._load}/{request.owner.name}"

    def wanted(self, request: InferRequest) -> frozenset[str]:
        """The names of the outputs that a request asks for."""
        if request.outputs is None:
            return frozenset(self._model.output_names)
        return frozenset(o.name for o in request.outputs)

    def kept(self, request: InferRequest, outputs: list[Tensor]) -> list[Tensor]:
        """Which of an answer's outputs are stored."""
        return outputs

    def _lead(self, key: bytes) -> None:
        """From now on equal requests follow one."""
        self._followers[key] = deque()

    def _has_place(self, request: InferRequest) -> bool:
        """Whether a request may wait here (rule 6)."""
        level = self.inner.level_of(request)
        return self.inner.has_place(level, self._waiting[level]) or (
            self.inner.catch_up(request.timestamp(QUEUE_START))
            and self.inner.has_place(level, self._waiting[level])
        )

    def _follow(self, request: InferRequest, key: bytes) -> None:
        """Has a request wait for the answer of the one that it equals (rule 4)."""
        followers = self._followers[key]
        request.cache_key = key
        request.scheduler_data = followers
        followers.append(request)
        self._wait(request)

    def _wait(self, request: InferRequest) -> None:
        """From now on a request waits here, before the model's queue."""
        self._waiting[self.inner.level_of(request)] += 1
        request.state = QUEUED
        request.scheduler = self
        due = self.inner.refused_at(request)
        if due:
            self._deadlines[request] = self._timers.at(due, functools.partial(self._expired, request))
        self.inner.arrived(request)

    def _waited(self, request: InferRequest) -> None:
        """It does not wait here any more."""
        self._waiting[self.inner.level_of(request)] -= 1
        timer = self._deadlines.pop(request, None)
        if timer is not None:
            timer.cancel()

    def _expired(self, request: InferRequest) -> None:
        """The time of a request that waits here is over."""
        self._take_out(request)
        self.inner.expired(request)

    def _take_out(self, request: InferRequest) -> bool:
        """Takes out a request that waits here, False if it does not. Whoever calls it answers the request."""
        followers = self._followers.get(request.cache_key) if request.cache_key is not None else None
        if followers is None or request not in followers:
            return False
        followers.remove(request)
        self._waited(request)
        request.cache_key = None  # its answer must not be stored
        return True

    def _execute(self, request: InferRequest, key: bytes) -> None:
        """Schedules a miss, whose answer is stored under `key`."""
        request.cache_key = key
        if self.cache.coalesce and key not in self._followers:
            self._lead(key)
        try:
            self.inner.enqueue(request)
        except BaseException:
            self._release(key, None)
            raise

    def requeue(self, request: InferRequest) -> None:
        self.inner.requeue(request)

    def give_back(self, request: InferRequest) -> list[InferRequest]:
        key, request.cache_key = request.cache_key, None
        found = self.inner.give_back(request)
        for follower in self._followers.pop(key, ()) if key is not None else ():
            self._waited(follower)
            follower.cache_key = None
            found += self.inner.give_back(follower)
        return found

    def cancel(self, request: InferRequest) -> None:
        if self._take_out(request):
            self.inner.left(request)
            complete(request, InferResponse(None, Cancelled()), True)
        else:
            self.inner.cancel(request)

    def offer(self, request: InferRequest, response: InferResponse) -> None:
        """Stores the final response of a request that missed, before it is sent. Called by complete()."""
        key, request.cache_key = request.cache_key, None
        assert key is not None
        if key is ALONE:
            if request.timestamp(COMPUTE_START):
                self._model.counters.cache_missed(request, False)
            return
        outputs = response.outputs
        if outputs and any(t.memory_kind == GPU for t in outputs):  # written to a client's region on the GPU
            outputs = None
        if response.error is None and outputs and not request.cancelled:
            outputs = self.kept(request, outputs)
            request.stamp(INSERT_START)
            try:
                inserted = self.cache.insert(key, outputs)
            except MemoryError:  # the answer is good all the same, and followers wait for it
                log.exception("an answer of model '%s' could not be stored", self._model.name)
                inserted = False
            request.stamp(INSERT_END)
            if inserted:
                self.cache.spent(0, request.timestamp(INSERT_END) - request.timestamp(INSERT_START))
            self._model.counters.cache_missed(request)
            self._release(key, response)
        else:
            self._model.counters.cache_missed(request, response.error is None and not request.cancelled)
            self._release(key, None)

    def _release(self, key: bytes, response: InferResponse | None) -> None:
        followers = self._followers.get(key)
        if followers is None:
            return
        while followers:
            follower = followers.popleft()
            self._waited(follower)
            follower.cache_key = None
            wanted = self.wanted(follower)
            outputs = response.outputs if response is not None else None
            if outputs and wanted <= {t.name for t in outputs}:
                now = monotonic_ns()
                follower.stamp(LOOKUP_START, now)
                follower.stamp(LOOKUP_END, now)
                follower.cache_hit = True
                complete(follower, InferResponse([t for t in outputs if t.name in wanted]), True)
                continue
            follower.cache_key = ALONE
            try:
                self.inner.enqueue(follower)
                continue
            except TritonError as error:
                refused = error
            except Exception as error:  # the others wait for their turn
                log.exception("a request of model '%s' could not be queued", self._model.name)
                refused = Internal(f"the request could not be queued: {error}", reason=Reason.OTHER)
            follower.cache_key = None
            complete(follower, InferResponse(None, refused), True)
        self._followers.pop(key, None)

    def dispatch(self, now_ns: int) -> None:
        self.inner.dispatch(now_ns)

    def statistics(self) -> SchedulerStatistics:
        held = self.inner.statistics()
        return SchedulerStatistics(held.queued + sum(self._waiting.values()), held.executing)

    def steps(self) -> list[dict[str, Any]]:
        return self.inner.steps()

    def flush(self) -> None:
        self.inner.flush()

    def live_sequences(self) -> int:
        return self.inner.live_sequences()

    def stop(self) -> None:
        self.inner.stop()

    def close(self) -> None:
        self.inner.close()
