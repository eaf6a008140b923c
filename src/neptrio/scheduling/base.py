"""The interface of schedulers, and what they are given to work with.

A scheduler owns a model's accepted requests from enqueue() until it hands them to an instance in a batch. It
never calls a responder itself: requests that it refuses later (timed out, cancelled) go through
neptrio.execution.batch.complete.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from neptrio.errors import Internal, Reason, Unavailable
from neptrio.execution.backend import LoadContext
from neptrio.execution.batch import complete
from neptrio.execution.rate_limiter import RateLimiter
from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.timers import Timers
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore
from neptrio.scheduling.response_cache import Cache
from neptrio.scheduling.waits import Waits

if TYPE_CHECKING:
    from neptrio.scheduling.sequence import SequenceScheduler

log = logging.getLogger("neptrio.batcher")


def held_requests(variable: str) -> int:
    """The number N of a Triton server's `TRITONSERVER_*DELAY_SCHEDULER=N`: requests to wait for; 0: none."""
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        log.warning("%s: expected a number of requests, got '%s'; nothing is held", variable, text)
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class SchedulerStatistics:
    """What a scheduler holds at the moment."""

    queued: int
    executing: int
    sequences: int = field(default=0, kw_only=True)  # live ones
    null_requests_open: int = field(default=0, kw_only=True)  # in batches under way; no client waits for them


@dataclass(frozen=True)
class LoopServices:
    """The trio thread's helpers that schedulers use."""

    loop_pass: LoopPass
    timers: Timers
    poller: Poller  # waits for the sockets of all connections
    lag: LoopLag  # measures the loop's passes; large work leaves a note there
    rate_limiter: RateLimiter | None = None  # None: --rate-limit=off
    cache: Cache | None = None  # None: no --cache-config
    waits: Waits = field(default_factory=Waits)  # of the senders of ensembles' steps


class ServedModel(ModelCore):
    """A model version, as schedulers see it; in fact a repository.model.Model."""

    config: Any  # inference.ModelConfig
    context: LoadContext
    counters: ModelCounters
    scheduler: Any
    state_outputs: tuple[str, ...]  # outputs that are fed back to the model as implicit state


class SequenceStream(Protocol):
    """A stream on which sequences are started; it ends them when it ends, for models that ask for that."""

    sequences: dict[Any, Any]  # live sequence -> the scheduler that holds it


class Scheduler(ABC):
    """The scheduler of one model. After stop() it refuses new requests and finishes the accepted ones."""

    @abstractmethod
    def enqueue(self, request: InferRequest) -> None:
        """Accepts a validated request, or raises TritonError, in which case the request counts as never accepted."""

    @abstractmethod
    def cancel(self, request: InferRequest) -> None:
        """The client does not want an answer any more. Queued requests complete as cancelled, others still run."""

    def arrived(self, request: InferRequest) -> None:
        """Gives a request its place in the order of responses (scheduling.ordering). Called for requests that may
        be answered without this scheduler, by a cache hit."""

    def left(self, request: InferRequest) -> None:
        """Gives up the place that arrived() gave: later responses need not wait for this request."""

    def expect_room(self) -> None:
        """Raises Unavailable if the queue is so full that any request would be refused now. Called before a large
        body is decoded; later enqueue() decides."""

    def level_of(self, request: InferRequest) -> int:
        """The index of the level of the queue that the request would wait in."""
        return 0

    def has_place(self, level: int, beside: int) -> bool:
        """Whether that level of the queue would have a place if `beside` more of its requests, which wait outside, were in it."""
        return True

    def catch_up(self, now_ns: int) -> bool:
        """Does what dispatch() would do at the end of the loop pass, so that only requests are in the queue that really wait.
        Whether there was anything to do."""
        return False

    def full(self, request: InferRequest) -> Unavailable:
        """The error for a request that finds the queue full."""
        raise NotImplementedError(f"{type(self).__name__}.full")

    def requeue(self, request: InferRequest) -> None:
        """Queues an accepted request once more, since the instance that it was given to could not begin it. It keeps its place
        in the order of responses. Raises TritonError, after which the caller answers it."""
        self.enqueue(request)

    def give_back(self, request: InferRequest) -> list[InferRequest]:
        """Forgets an accepted request that no instance could begin, and those that wait for its answer; all of them, in order of
        arrival. They are not answered."""
        self.left(request)
        return [request]

    def refused_at(self, request: InferRequest) -> int:
        """When a request that waits outside of the queue since its QUEUE_START is to be refused with expired(); 0: never."""
        return 0

    def expired(self, request: InferRequest) -> None:
        """Refuses a request whose time in the queue is over; nobody else holds it any more."""
        self.left(request)
        complete(
            request,
            InferResponse(None, Unavailable("Request timeout expired", reason=Reason.REJECTED)),
            True,
        )

    @abstractmethod
    def dispatch(self, now_ns: int) -> None:
        """Forms batches and submits them while instances are free. Called at the end of a loop pass."""

    @abstractmethod
    def statistics(self) -> SchedulerStatistics:
        """The current numbers."""

    def steps(self) -> list[dict[str, Any]]:
        """What the steps of an ensemble took (observe.step_times); nothing for other models."""
        return []

    @property
    def of_sequences(self) -> SequenceScheduler | None:
        """This scheduler when it holds sequences that can be listed and ended, else None."""
        return None

    def complete_sample(self, request: InferRequest, number: int) -> None:
        """Adds to request `number` of a warm-up sample what this scheduler adds to requests (controls, state).

        The request is then executed without passing through the scheduler.
        """

    def flush(self) -> None:
        """The server is about to exit: batches are sent without waiting for more requests."""

    def live_sequences(self) -> int:
        """How many live sequences there are; a server that exits gives them time to end."""
        return 0

    def stop(self) -> None:
        """Refuses new requests; accepted ones are finished."""

    def close(self) -> None:
        """Called when all requests are answered and the instances are about to be finalized."""

    def reschedule(self, request: InferRequest) -> None:
        """Executes a request again: the model has released it without answering it."""
        complete(
            request,
            InferResponse(
                None,
                Internal(
                    "Request is released with TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, while the model is not "
                    "configured for it: expected sequence_batching with iterative_sequence",
                    reason=Reason.BACKEND,
                ),
            ),
            True,
        )


class NoScheduler(Scheduler):
    """Stands in for the scheduler of a model that is gone: whoever still has the model finds nothing there."""

    def enqueue(self, request: InferRequest) -> None:
        raise Unavailable(
            f"Request for unknown model: '{request.model_name}' version {request.model.version} is not at ready state"
        )

    def cancel(self, request: InferRequest) -> None:
        pass

    def dispatch(self, now_ns: int) -> None:
        pass

    def statistics(self) -> SchedulerStatistics:
        return SchedulerStatistics(queued=0, executing=0)


NO_SCHEDULER = NoScheduler()


def withdraw(request: InferRequest) -> bool:
    """Takes a request out of a batch that has not begun; False when its execution has begun or ended."""
    batch = request.batch
    return batch is not None and bool(batch.instance.withdraw(request))
