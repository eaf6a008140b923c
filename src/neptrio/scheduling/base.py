"""What every scheduler offers, and what it is given.

A scheduler owns a model's accepted requests from enqueue() until it hands them to an instance
in a batch. It never calls a responder itself: requests it refuses late (timeouts, cancels) go
through neptrio.execution.batch.complete.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from neptrio.errors import Internal, Reason
from neptrio.execution.backend import LoadContext
from neptrio.execution.batch import complete
from neptrio.execution.rate_limiter import RateLimiter
from neptrio.loop.loop_lag import LoopLag
from neptrio.loop.loop_pass import LoopPass
from neptrio.loop.poller import Poller
from neptrio.loop.timers import Timers
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore
from neptrio.scheduling.response_cache import ResponseCache

if TYPE_CHECKING:
    from neptrio.scheduling.sequence import SequenceScheduler

log = logging.getLogger("neptrio.batcher")


def held_requests(variable: str) -> int:
    """N of a Triton server's `TRITONSERVER_*DELAY_SCHEDULER=N`; 0 = hold nothing."""
    text = os.environ.get(variable, "")
    if text and not text.isdecimal():
        log.warning("%s: expected a number of requests, got '%s'; nothing is held", variable, text)
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True)
class SchedulerStatistics:
    """What a scheduler holds now."""

    queued: int
    executing: int
    sequences: int = field(default=0, kw_only=True)  # open ones
    null_requests_open: int = field(default=0, kw_only=True)  # requests of nobody in batches under way


@dataclass(frozen=True)
class LoopServices:
    """What the trio thread offers to everything that decides on it."""

    loop_pass: LoopPass
    timers: Timers
    poller: Poller  # reads for all connections
    lag: LoopLag  # of this loop; large work is noted there
    rate_limiter: RateLimiter | None = None  # None: --rate-limit=off
    cache: ResponseCache | None = None  # None: no --cache-config


class ServedModel(ModelCore):
    """A model version as schedulers see it; what they are given is a repository.model.Model."""

    config: Any  # inference.ModelConfig
    context: LoadContext
    counters: ModelCounters
    scheduler: Any
    state_outputs: tuple[str, ...]  # outputs that go round as implicit state


class SequenceStream(Protocol):
    """A stream on which sequences are started: models may ask to have them ended with it."""

    sequences: dict[Any, Any]  # sequence -> its scheduler


class Scheduler(ABC):
    """Enqueue, cancel, dispatch. After stop() new requests are refused, accepted ones are finished."""

    @abstractmethod
    def enqueue(self, request: InferRequest) -> None:
        """Takes a validated request, or raises TritonError (then it was never accepted)."""

    @abstractmethod
    def cancel(self, request: InferRequest) -> None:
        """The caller is gone. Queued requests complete as cancelled at once; others run on."""

    def arrived(self, request: InferRequest) -> None:
        """A request that may be answered without this scheduler (a cache hit) takes its place in the order of
        responses; see scheduling.ordering."""

    def left(self, request: InferRequest) -> None:
        """A request that arrived() gives up its place: responses behind it need not wait for it."""

    def expect_room(self) -> None:
        """Raises Unavailable if the queue is so full that every request would be refused now. Asked before
        a large body is decoded; enqueue() decides."""

    @abstractmethod
    def dispatch(self, now_ns: int) -> None:
        """Forms batches and submits them while instances are free. Called by the pass."""

    @abstractmethod
    def statistics(self) -> SchedulerStatistics:
        """What is held now."""

    @property
    def of_sequences(self) -> SequenceScheduler | None:
        """This scheduler, if it keeps sequences that can be listed and ended."""
        return None

    def complete_sample(self, request: InferRequest, number: int) -> None:
        """Gives request `number` of a warm-up sample what requests get from the scheduler on their way to
        the model (controls, state), before it is executed past the scheduler."""

    def flush(self) -> None:
        """The server is about to exit: send what waits instead of waiting for company."""

    def live_sequences(self) -> int:
        """Sequences that a request may continue: a server that exits gives them time to end."""
        return 0

    def stop(self) -> None:
        """Refuses new requests; accepted ones are finished."""

    def close(self) -> None:
        """The model is drained and its instances are about to be finalized."""

    def reschedule(self, request: InferRequest) -> None:
        """The model released a request without answering it, to have it executed again."""
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


def withdraw(request: InferRequest) -> bool:
    """Takes a request out of a batch that has not begun; False when it runs or is done."""
    batch = request.batch
    return batch is not None and bool(batch.instance.withdraw(request))
