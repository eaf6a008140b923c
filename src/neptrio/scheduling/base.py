"""What every scheduler offers, and what it is given.

A scheduler owns a model's accepted requests from enqueue() until it hands them to an instance
in a batch. It never calls a responder itself: requests it refuses late (timeouts, cancels) go
through neptrio._cext.batch.complete.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from neptrio._cext.batch import complete
from neptrio._cext.request import InferRequest, InferResponse
from neptrio.errors import Internal, Reason
from neptrio.scheduling.rate_limiter import RateLimiter
from neptrio.timers import Timers
from neptrio.turn import Turn

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


@dataclass(frozen=True)
class LoopServices:
    """What the trio thread offers to everything that decides on it."""

    turn: Turn
    timers: Timers
    rate_limiter: RateLimiter | None = None  # None: --rate-limit=off
    poller: Any = None  # transport.poller.Poller: reads for all connections


class Scheduler(ABC):
    """Enqueue, cancel, dispatch; stop refuses newcomers and lets what is accepted finish."""

    @abstractmethod
    def enqueue(self, request: InferRequest) -> None:
        """Takes a validated request, or raises TritonError (then it was never accepted)."""

    @abstractmethod
    def cancel(self, request: InferRequest) -> None:
        """The caller is gone. Queued requests complete as cancelled at once; others run on."""

    def arrived(self, request: InferRequest) -> None:
        """A request that may be answered without this scheduler (a cache hit) takes its place in line."""

    def left(self, request: InferRequest) -> None:
        """A request that has arrived will not be answered in its place: it holds nobody up."""

    def expect_room(self) -> None:
        """Raises Unavailable if any request would be refused now, for want of room. Asked before a
        large body is decoded; enqueue() has the last word."""

    @abstractmethod
    def dispatch(self, now_ns: int) -> None:
        """Forms batches and submits them while instances are free. Called by the turn."""

    @abstractmethod
    def statistics(self) -> SchedulerStatistics:
        """What is held now."""

    def flush(self) -> None:
        """The server is about to exit: send what waits instead of waiting for company."""

    def live_sequences(self) -> int:
        """Sequences that a request may continue: a server that exits gives them time to end."""
        return 0

    def stop(self) -> None:
        """No newcomers; what was accepted finishes."""

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
