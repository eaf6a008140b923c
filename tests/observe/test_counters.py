"""The bookkeeping rules of requests and responses, with explicit timestamps and no server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from neptrio.errors import Cancelled, Code, Reason, TritonError
from neptrio.execution.batch import Batch, accept, complete
from neptrio.observe.counters import MAX_RESPONSE_KEYS, BoundedHistogram, ModelCounters
from neptrio.request.infer_request import (
    InferRequest,
    InferResponse,
    ModelCore,
    Responder,
    Tensor,
    Timestamp,
    monotonic_ns,
)
from triton_python_backend_utils._process import kinds

DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)


class Collect(Responder):
    def __init__(self) -> None:
        self.got: list[InferResponse] = []

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.got.append(response)


def make_model(decoupled: bool = False) -> ModelCore:
    model = ModelCore("m", "1")
    model.counters = ModelCounters()
    model.decoupled = decoupled
    return model


def tensor() -> Tensor:
    return Tensor("X", 8, (4,), np.zeros(4, np.int32))


def make_request(model: ModelCore, batch_size: int = 1, **stamps: int) -> InferRequest:
    request = InferRequest()
    request.model = model
    request.batch_size = batch_size
    request.inputs = [tensor()]
    request.responder = Collect()
    for name, value in stamps.items():
        request.stamp(Timestamp[name.upper()], value)
    accept(request)
    return request


EXECUTED = dict(
    request_start=100,
    queue_start=200,
    compute_start=1200,
    compute_input_end=3200,
    compute_output_start=6200,
    compute_end=10200,
)


def stats(model: ModelCore) -> dict[str, Any]:
    found: dict[str, Any] = model.counters.snapshot()
    return found


def counts(model: ModelCore) -> dict[str, int]:
    return {k: v["count"] for k, v in stats(model)["inference_stats"].items() if v["count"]}


def ns(model: ModelCore, key: str) -> int:
    return int(stats(model)["inference_stats"][key]["ns"])


def out() -> InferResponse:
    return InferResponse([tensor()])


def test_success_counts_every_stage() -> None:
    model = make_model()
    complete(make_request(model, 3, **EXECUTED), out(), True)
    assert counts(model) == dict.fromkeys(
        ("success", "queue", "compute_input", "compute_infer", "compute_output"), 1
    )
    assert [ns(model, k) for k in DURATIONS[2:6]] == [1000, 2000, 3000, 4000]
    assert stats(model)["inference_count"] == 3
    assert model.counters.microseconds()["compute_output"] == (1, 4)
    assert model.counters.histograms()["compute_infer"].max == 3000


def test_failures_count_only_as_failures_by_reason() -> None:
    model = make_model()
    for error in (
        Cancelled(),
        TritonError("late", Code.UNAVAILABLE, Reason.REJECTED),
        TritonError("no", Code.INTERNAL, Reason.BACKEND),
        TritonError("other"),
    ):
        complete(make_request(model, **EXECUTED), InferResponse(None, error), True)
    assert counts(model) == {"fail": 4}
    assert model.counters.failures == {"CANCELED": 1, "REJECTED": 1, "BACKEND": 1, "OTHER": 1}
    assert model.counters.histograms()["request"].count == stats(model)["inference_count"] == 0


def test_cache_hit_and_miss() -> None:
    model = make_model()
    hit = make_request(
        model, request_start=100, queue_start=200, cache_lookup_start=700, cache_lookup_end=1000
    )
    hit.cache_hit = True
    complete(hit, out(), True)
    assert counts(model) == {"success": 1, "queue": 1, "cache_hit": 1}
    assert ns(model, "queue") == 500 and ns(model, "cache_hit") == 300
    assert stats(model)["inference_count"] == stats(model)["execution_count"] == 0

    missed = make_request(model, **EXECUTED, cache_lookup_start=300, cache_lookup_end=400)
    complete(missed, out(), True)
    before = ns(model, "success")
    missed.stamp(Timestamp.CACHE_INSERT_START, 20000)
    missed.stamp(Timestamp.CACHE_INSERT_END, 20030)
    model.counters.cache_missed(missed)
    assert counts(model) == dict(
        success=2, queue=2, cache_hit=1, cache_miss=1, compute_input=1, compute_infer=1, compute_output=1
    )
    assert ns(model, "cache_miss") == 130 and ns(model, "success") == before + 130


def test_an_ensemble_sums_its_steps() -> None:
    ensemble, step = make_model(), make_model()
    request = make_request(ensemble, 2, request_start=50, queue_start=60, compute_start=70)
    request.composing = True
    for _ in range(2):
        part = make_request(step, 2, **EXECUTED)
        part.parent = request
        complete(part, out(), True)
    complete(request, out(), True)
    assert [ns(ensemble, k) for k in DURATIONS[2:6]] == [10, 4000, 6000, 8000]
    got = stats(ensemble)
    assert (got["inference_count"], got["execution_count"]) == (2, 1)
    assert got["batch_stats"] == [
        {"batch_size": 2, **{k: {"count": 1, "ns": ns(ensemble, k)} for k in DURATIONS[3:6]}}
    ]
    assert got["last_inference"] > 0


def test_a_bls_parent_is_no_ensemble() -> None:
    parent = make_request(make_model(), **EXECUTED)
    child = make_request(make_model(), **EXECUTED)
    child.parent = parent
    complete(child, out(), True)
    complete(parent, out(), True)
    assert ns(parent.model, "compute_infer") == 3000


def test_a_failed_ensemble_request_counts_twice() -> None:
    model = make_model()
    request = make_request(model, request_start=50, queue_start=60, compute_start=70)
    request.composing = True
    complete(request, InferResponse(None, TritonError("x", Code.INTERNAL, Reason.BACKEND)), True)
    assert counts(model) == {"fail": 2} and model.counters.failures["OTHER"] == 2
    assert stats(model)["execution_count"] == 0


def flags() -> InferResponse:
    made = InferResponse()
    made.null = True
    return made


def test_reports_of_a_backend_take_the_place_of_what_was_measured() -> None:
    model = make_model(decoupled=True)
    for _ in range(2):
        request = make_request(model, **EXECUTED)
        complete(request, out(), False)
        model.counters.measured(0, kinds.SUCCEEDED, 30, 40)
        complete(request, flags(), True)
    model.counters.measured(1 << 40, kinds.FAILED, 5, 0)
    got = stats(model)["response_stats"]
    assert len(got) == MAX_RESPONSE_KEYS, "a place is bounded, whatever a process says"
    assert {k: v for k, v in got["0"].items() if v["count"]} == {
        "compute_infer": {"count": 2, "ns": 60},
        "compute_output": {"count": 2, "ns": 80},
        "success": {"count": 2, "ns": 140},
    }
    assert counts(model)["success"] == 2


def test_a_decoupled_request_that_ends_in_an_error_has_failed() -> None:
    model = make_model(decoupled=True)
    request = make_request(model, **EXECUTED)
    complete(request, out(), False)
    complete(request, InferResponse(None, TritonError("x", Code.INTERNAL, Reason.BACKEND)), False)
    complete(request, flags(), True)
    assert counts(model) == {"fail": 1} and model.counters.failures["BACKEND"] == 1
    entry = stats(model)["response_stats"]["1"]
    assert entry["fail"]["count"] == 1
    assert entry["fail"]["ns"] == entry["compute_infer"]["ns"] + entry["compute_output"]["ns"]
    recovered = make_request(model, **EXECUTED)
    complete(recovered, InferResponse(None, TritonError("x")), False)
    complete(recovered, out(), False)
    complete(recovered, flags(), True)
    assert counts(model)["success"] == 1


def test_an_error_response_that_waited_has_the_time_of_its_inference() -> None:
    model = make_model(decoupled=True)
    request = make_request(model, **EXECUTED)
    failed = InferResponse(None, TritonError("x", Code.INTERNAL, Reason.BACKEND))
    failed.produced_ns = request.timestamp(Timestamp.COMPUTE_INPUT_END) + 7
    complete(request, failed, False)
    entry = stats(model)["response_stats"]["0"]
    assert (entry["compute_infer"]["ns"], entry["compute_output"]["ns"], entry["fail"]["ns"]) == (7, 0, 7)


def test_a_cancelled_decoupled_request() -> None:
    model = make_model(decoupled=True)
    request = make_request(model, **EXECUTED)
    complete(request, out(), False)
    request.cancelled_ns = 1
    complete(request, InferResponse(None, Cancelled()), True)
    entry = stats(model)["response_stats"]["1"]
    assert {k: v["count"] for k, v in entry.items() if v["count"]} == {"cancel": 1}
    assert entry["cancel"]["ns"] == request.timestamp(Timestamp.REQUEST_END) - 1
    assert counts(model) == {"fail": 1} and model.counters.failures["CANCELED"] == 1


def test_endless_streams_do_not_grow_statistics_for_ever() -> None:
    model = make_model(decoupled=True)
    request = make_request(model, **EXECUTED)
    for _ in range(MAX_RESPONSE_KEYS + 10):
        complete(request, out(), False)
    got = stats(model)["response_stats"]
    assert len(got) == MAX_RESPONSE_KEYS
    assert got[str(MAX_RESPONSE_KEYS - 1)]["success"]["count"] == 11


def test_the_only_response_of_other_models_is_their_first() -> None:
    model = make_model()
    model.counters.enable_first_response((0.001, 10_000))
    complete(make_request(model, **EXECUTED), out(), True)
    complete(make_request(model, **EXECUTED), InferResponse(None, TritonError("no answer")), True)
    histogram = model.counters.first_response
    assert sum(histogram.counts) == 1 and histogram.sum == (
        stats(model)["inference_stats"]["success"]["ns"] // 1_000_000
    )


@pytest.mark.parametrize("cached", [False, True])
def test_summaries_and_first_response(cached: bool) -> None:
    model = make_model(decoupled=True)
    model.counters.enable_summaries(cached)
    model.counters.enable_first_response((1, 5))
    request = make_request(model, **EXECUTED)
    complete(request, out(), False)
    complete(request, flags(), True)
    assert ("request" in model.counters.summaries) is not cached
    end = request.timestamp(Timestamp.REQUEST_END)
    assert model.counters.summaries["compute_infer"].window(end).max == 3000
    assert sum(model.counters.first_response.counts) == 1


@pytest.mark.parametrize(
    ("ago_ms", "bucket"), [(0, 0), (15_000, 1), (60_000, 2), (3_600_000, 3)], ids=["now", "15s", "60s", "1h"]
)
def test_the_first_response_falls_into_the_bucket_of_its_time(ago_ms: int, bucket: int) -> None:
    model = make_model(decoupled=True)
    model.counters.enable_first_response((10_000, 50_000, 100_000))
    histogram = model.counters.first_response
    request = make_request(model, request_start=monotonic_ns() - ago_ms * 1_000_000)
    for _ in range(3):
        complete(request, out(), False)
    complete(request, flags(), True)
    assert list(histogram.counts) == [int(i == bucket) for i in range(4)]  # the first of them, once
    assert ago_ms <= histogram.sum < ago_ms + 10_000


def test_a_time_on_a_bucket_s_bound_belongs_to_it() -> None:
    histogram = BoundedHistogram((1, 5, 20))
    for ms in (0, 1, 2, 5, 6, 20, 21, 10**9):
        histogram.record(ms)
    assert list(histogram.counts) == [2, 2, 2, 2] and histogram.sum == 55 + 10**9


class Refusing(Collect):
    """Cannot take what a model answers; `deaf` takes nothing at all."""

    def __init__(self, deaf: bool = False) -> None:
        super().__init__()
        self.deaf = deaf

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        if self.deaf or response.error is None:
            raise RuntimeError("no room")
        super().respond(request, response, final)


@pytest.mark.parametrize("deaf", [False, True])
def test_a_responder_that_raises_fails_its_own_request_only(deaf: bool) -> None:
    model = make_model()
    requests = [make_request(model, **EXECUTED) for _ in range(3)]
    refusing = requests[1].responder = Refusing(deaf)
    for request in requests:
        complete(request, InferResponse([tensor()]), True)
    assert model.inflight == 0
    assert [len(r.responder.got) for r in requests] == [1, 0 if deaf else 1, 1]
    if not deaf:
        assert refusing.got[0].error.code is Code.INTERNAL
        assert "no room" in str(refusing.got[0].error)


def test_batches_are_counted_by_reason_and_size() -> None:
    model = ModelCore("m", "1")
    model.counters = counters = ModelCounters()
    instance = SimpleNamespace(finished=lambda batch: None)
    sent = [("full", 8), ("full", 8), ("delay", 1), ("full", 63), ("full", 64), ("full", 64), ("delay", 300)]
    for reason, size in sent:
        batch = Batch(model, [], reason, 5)
        batch.size, batch.instance = size, instance
        batch.deliver()
    assert {reason: closing.sizes for reason, closing in counters.closings.items()} == {
        "full": {8: 2, 63: 1, 64: 2},
        "delay": {1: 1, 300: 1},
    }
    assert [(c.count, c.size_sum, c.oldest_wait_ns) for c in counters.closings.values()] == [
        (5, 207, 25),
        (2, 301, 10),
    ]
    found = {each["batch_size"]: each["compute_infer"]["count"] for each in stats(model)["batch_stats"]}
    assert found == {1: 1, 8: 2, 63: 1, 64: 2, 300: 1}
