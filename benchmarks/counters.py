"""What statistics cost: nanoseconds per request and per execution, and the price of a look.

    python -m benchmarks.counters [--requests N] [--rounds N]

A request is answered through complete() with statistics on and with statistics off, in turns; the
difference is the cost of the counters (success, queue, three compute stages, five histograms). A
batch is delivered with its execution counted and not counted. CPU time of the one thread, so that
neighbours on the machine do little harm; medians of the rounds. No server, no sockets.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from neptrio.execution.batch import Batch, accept, complete
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    ModelCore,
    Responder,
    Tensor,
    Timestamp,
    monotonic_ns,
)


class Nobody(Responder):
    """Takes every response and does nothing."""

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        pass


def make_model(decoupled: bool = False) -> ModelCore:
    """A model that is only its accounts."""
    model = ModelCore("model", "1")
    model.counters = ModelCounters()
    model.decoupled = decoupled
    return model


def make_requests(model: ModelCore, count: int, collect: bool) -> list[InferRequest]:
    """Accepted requests with every timestamp but the last."""
    responder, tensor, now = Nobody(), Tensor("X", 8, (4,), np.zeros(4, np.int32)), monotonic_ns()
    made = []
    for i in range(count):
        request = InferRequest()
        request.model, request.responder, request.inputs = model, responder, [tensor]
        request.collect_statistics = collect
        for step, stamp in enumerate(
            (Timestamp.REQUEST_START, Timestamp.QUEUE_START, Timestamp.COMPUTE_START, Timestamp.COMPUTE_INPUT_END,
             Timestamp.COMPUTE_OUTPUT_START, Timestamp.COMPUTE_END)
        ):  # fmt: skip
            request.stamp(stamp, now - 10_000_000 + step * (1_000 + 37 * i % 90_000))
        accept(request)
        made.append(request)
    return made


def answer(count: int, collect: bool, decoupled: bool = False) -> float:
    """Nanoseconds per complete()."""
    model = make_model(decoupled)
    requests = make_requests(model, count, collect)
    responses = [InferResponse([]) for _ in requests]
    start = time.thread_time_ns()
    for request, response in zip(requests, responses, strict=True):
        complete(request, response, True)
    return (time.thread_time_ns() - start) / count


def deliver(count: int, collect: bool) -> float:
    """Nanoseconds per Batch.deliver() of a batch without requests."""
    model = make_model()
    instance = SimpleNamespace(finished=lambda batch: None)
    batches = []
    for i in range(count):
        batch = Batch(model, [], "full", 1000)
        batch.instance, batch.size, batch.count_execution = instance, 1 + i % 8, collect
        batch.compute_start, batch.compute_end = 1000, 5000 + i
        batches.append(batch)
    start = time.thread_time_ns()
    for batch in batches:
        batch.deliver()
    return (time.thread_time_ns() - start) / count


def difference(measure: Callable[[bool], float], rounds: int) -> tuple[float, float]:
    """(cost with statistics - without, cost with), medians over rounds that alternate."""
    on, off = [], []
    for _ in range(rounds):
        on.append(measure(True))
        off.append(measure(False))
    return statistics.median(a - b for a, b in zip(on, off, strict=True)), statistics.median(on)


def looks(count: int) -> dict[str, float]:
    """Microseconds of reading a busy model's counters."""
    model: Any = make_model()
    for request in make_requests(model, count, True):
        complete(request, InferResponse([]), True)
    counters = model.counters

    def micros(call: Callable[[], object]) -> float:
        start = time.thread_time_ns()
        for _ in range(200):
            call()
        return (time.thread_time_ns() - start) / 200 / 1000

    request = counters.histograms()["request"]
    return {
        "snapshot of /stats": micros(counters.snapshot),
        "five stages' p50, p90, p99": micros(
            lambda: [h.percentile(p) for h in counters.histograms().values() for p in (50, 90, 99)]
        ),
        "one stage's Prometheus buckets": micros(lambda: request.cumulative([1 << e for e in range(14, 37)])),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    n, rounds = options.requests, options.rounds
    for title, measure in (
        ("per request", lambda collect: answer(n, collect)),
        ("per decoupled response and request", lambda collect: answer(n, collect, True)),
        ("per execution", lambda collect: deliver(n, collect)),
    ):
        cost, whole = difference(measure, rounds)
        print(f"{title:<36}{cost:8.0f} ns   (of {whole:.0f} ns, call and answer included)")
    for title, micros in looks(n).items():
        print(f"{title:<36}{micros:8.1f} us")


if __name__ == "__main__":
    main()
