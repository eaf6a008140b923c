"""A response cache that is not in this process: a request waits for its answer, a bounded time, before it is scheduled.

The problem: such a cache may be slow, hang or have ended, and what it gives was written by another process. The choice: it is
asked without waiting (CacheElsewhere.ask), the request stands before the model's queue meanwhile, and whatever is no answer in
time is a miss.

Rules:
 1. Those of caching.py.
 2. A request that waits for the cache counts as waiting in the model's queue, has its deadline, and can be cancelled. When the model is stopped,
    those that wait are misses at once, so that they are queued before the model refuses new ones.
 3. What the cache has found is used only if it is the outputs that were asked for, with the datatypes and shapes that the
    model's configuration says.
 4. What is stored are the outputs that were asked for, under a key that they are part of: such a cache replaces nothing, so a
    fuller answer could not take the place of another.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from typing import Protocol

import neptrio.request.device_memory as device_memory
from neptrio.errors import Internal, Reason, TritonError
from neptrio.execution.batch import complete
from neptrio.foreign import summary
from neptrio.loop.timers import Timers
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor
from neptrio.scheduling.base import Scheduler, ServedModel
from neptrio.scheduling.caching import (
    GPU,
    LOOKUP_END,
    LOOKUP_START,
    QUEUE_START,
    CachingScheduler,
    log,
)
from neptrio.scheduling.response_cache import Cache, request_key


class Question(Protocol):
    """A question to a cache that is under way."""

    def forget(self) -> None:
        """Nobody wants the answer any more: the callback is not called."""


class CacheElsewhere(Cache):
    """A cache that answers later."""

    @abstractmethod
    def begin(self) -> None:
        """Returns when it can be asked. Blocks; not on the trio thread. Raises TritonError."""

    @abstractmethod
    def close(self) -> None:
        """Ends it. Blocks; not on the trio thread. Harmless without begin()."""

    @abstractmethod
    def ask(self, key: bytes, answered: Callable[[list[Tensor] | None], None]) -> Question | None:
        """Looks `key` up; calls `answered` once, on the trio thread, with what was found, within a bounded time.

        None when the cache cannot be asked now: `answered` is not called then.
        """

    @abstractmethod
    def used(self) -> None:
        """What it has found was used: a hit."""

    @abstractmethod
    def refused(self, why: str) -> None:
        """What it has found cannot be an answer."""


class AskingScheduler(CachingScheduler):
    """Wraps the scheduler of a model whose cache is elsewhere."""

    cache: CacheElsewhere

    def __init__(self, model: ServedModel, inner: Scheduler, cache: CacheElsewhere, timers: Timers) -> None:
        super().__init__(model, inner, cache, timers)
        self._asked: dict[InferRequest, tuple[Question, bytes]] = {}  # with the key
        self._stopped = False
        batched = [-1] if model.config.max_batch_size > 0 else []
        self._outputs = {
            output.name: (output.data_type, [*batched, *output.dims]) for output in model.config.output
        }

    def enqueue(self, request: InferRequest) -> None:
        on_device = device_memory.in_use() and any(t.memory_kind == GPU for t in request.inputs)
        if on_device or self._stopped:  # which refuses it then
            self.inner.enqueue(request)
            return
        wanted = self.wanted(request)
        names = "/".join(f"{len(name)}:{name}" for name in sorted(wanted))
        key = request_key(request, self._model.name, f"{self.load_of(request)}/{names}")
        request.stamp(QUEUE_START)
        request.stamp(LOOKUP_START)
        if not self._has_place(request):  # it may answer the one that this one equals
            raise self.inner.full(request)
        if self.cache.coalesce and key in self._followers:
            self._follow(request, key)
            return
        question = self.cache.ask(key, functools.partial(self._answered, request, wanted))
        if question is None:
            self._looked(request)
            self._execute(request, key)
            return
        if self.cache.coalesce:
            self._lead(key)
        self._asked[request] = question, key
        self._wait(request)

    def kept(self, request: InferRequest, outputs: list[Tensor]) -> list[Tensor]:
        """See CachingScheduler; rule 4."""
        wanted = self.wanted(request)
        return [tensor for tensor in outputs if tensor.name in wanted]

    def _looked(self, request: InferRequest) -> None:
        request.stamp(LOOKUP_END)
        self.cache.spent(request.timestamp(LOOKUP_END) - request.timestamp(LOOKUP_START), 0)

    def _answered(self, request: InferRequest, wanted: frozenset[str], found: list[Tensor] | None) -> None:
        _, key = self._asked.pop(request)
        self._waited(request)
        self._looked(request)
        if found is not None:
            why = self._unusable(found, wanted)
            if why:
                self.cache.refused(why)
            else:
                self.cache.used()
                request.cache_hit = True
                complete(request, InferResponse(list(found)), True)
                self._release(key, InferResponse(found))
                return
        try:
            self._execute(request, key)
        except TritonError as error:
            self._refuse(request, error)
        except Exception as error:
            log.exception("a request of model '%s' could not be queued", self._model.name)
            failure = Internal(f"the request could not be queued: {summary(error)}", reason=Reason.OTHER)
            self._refuse(request, failure)

    def _refuse(self, request: InferRequest, error: TritonError) -> None:
        self.inner.left(request)
        complete(request, InferResponse(None, error), True)

    def _unusable(self, found: list[Tensor], wanted: frozenset[str]) -> str:
        """Why these cannot be the answer, "" if they can (rule 3)."""
        if len(found) != len(wanted) or {t.name for t in found} != wanted:
            return f"outputs {sorted(t.name for t in found)} where {sorted(wanted)} were asked for"
        for tensor in found:
            datatype, dims = self._outputs.get(tensor.name, (0, []))
            shape = tensor.shape
            fits = len(shape) == len(dims) and all(d in (-1, n) for d, n in zip(dims, shape, strict=True))
            if tensor.dtype != datatype or not fits:
                return f"output '{tensor.name}' of shape {list(shape)} and datatype {tensor.dtype}, which is not the model's"
        return ""

    def cancel(self, request: InferRequest) -> None:
        asked = self._asked.get(request)
        super().cancel(request)
        if asked is not None:
            self._release(asked[1], None)

    def _expired(self, request: InferRequest) -> None:
        asked = self._asked.get(request)
        super()._expired(request)
        if asked is not None:
            self._release(asked[1], None)

    def _take_out(self, request: InferRequest) -> bool:
        asked = self._asked.pop(request, None)
        if asked is None:
            return super()._take_out(request)
        asked[0].forget()
        self._waited(request)
        return True

    def stop(self) -> None:
        self._stopped = True
        while self._asked:
            request, (question, _) = next(iter(self._asked.items()))
            question.forget()
            self._answered(request, frozenset(), None)
        super().stop()
