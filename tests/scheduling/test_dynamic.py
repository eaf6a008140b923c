"""What surrounds the batcher's queue, on an explicit clock: passes, instances, order, the hold at the start.

The queue's decisions are in tests/scheduling/test_batch_queue.py, its timer in test_dynamic_boundaries.py, whole
schedules of events in test_dynamic_properties.py, and what clients see in tests/client/test_queue_policies.py.
"""

from __future__ import annotations

import logging

import pytest

from neptrio.errors import Internal
from neptrio.request.infer_request import InputSpec, Tensor
from neptrio.scheduling.policy import BatchingPolicy, QueuePolicy
from tests.support.batching import Bench

MS = 1_000_000


def batcher(size: int = 8, preferred: tuple[int, ...] = (), instances: int = 1, **options: object) -> Bench:
    policy = BatchingPolicy(size, preferred or (size,), **options)  # type: ignore[arg-type]
    return Bench(policy, instances)


def test_requests_of_one_pass_leave_together() -> None:
    bench = batcher()
    for i in range(3):
        bench.send(f"{i}", loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1", "2"], "idle")]


def test_another_set_of_optional_inputs_closes_the_batch() -> None:
    specs = [InputSpec("INPUT0", 8, (1,)), InputSpec("EXTRA", 8, (1,), True)]
    bench = Bench(BatchingPolicy(8, (8,)), specs=specs)
    for i, extra in enumerate((True, True, False)):
        request = bench.make(f"{i}")
        if extra:  # the order of inputs in the request does not matter
            request.inputs.insert(i, Tensor("EXTRA", 8, (1, 1), bytes(4)))
        bench.enqueue(request, loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1"], "shape")]


def test_instances_run_in_parallel_the_idle_one_first() -> None:
    bench = batcher(1, instances=2)
    for i in range(4):
        bench.send(f"{i}")
    assert [i.outstanding for i in bench.pool.instances] == [2, 2]
    assert [[r.id for b in i.batches for r in b.requests] for i in bench.pool.instances] == [
        ["0", "2"],
        ["1", "3"],
    ]


@pytest.mark.slow
def test_the_limit_is_exact_under_a_burst() -> None:
    bench = batcher(1, levels=(QueuePolicy(max_size=100),))
    accepted = [i for i in range(10_000) if bench.send(f"{i}", loop_pass=False)]
    assert accepted == list(range(101)), "one executes, a hundred wait"
    assert bench.events[-1][2:] == ("9999", "[request id: 9999] Exceeds maximum queue size")
    assert bench.scheduler.statistics().rejected_full == 9_899


def test_order_is_kept_by_arrival_across_instances() -> None:
    bench = batcher(1, instances=2, preserve_ordering=True)
    for i in range(4):
        bench.send(f"{i}")
    bench.finish(1)
    bench.finish(1)
    assert bench.answers() == []
    bench.finish(0, Internal("boom"))
    assert bench.answers() == [("0", "boom"), ("1", "ok")]
    bench.finish(0)
    assert bench.answers()[2:] == [("2", "ok"), ("3", "ok")]


def test_order_does_not_wait_for_those_who_left() -> None:
    bench = batcher(1, preserve_ordering=True, levels=(QueuePolicy(timeout_us=5_000),))
    for id in ("running", "gone", "expiring"):
        bench.send(id)
    bench.cancel("gone")
    bench.advance(5 * MS)
    assert [id for id, _ in bench.answers()] == ["gone", "expiring"]
    bench.finish()
    assert bench.answers()[2:] == [("running", "ok")]


def test_stopping_sends_what_waits() -> None:
    bench = batcher(8, delay_ns=10**12)
    bench.send("0")
    assert bench.batches() == []
    bench.scheduler.stop()
    bench.end_pass()
    assert bench.batches() == [(["0"], "flush")]


def test_delay_scheduler_holds_until_that_many_wait_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
    bench = batcher(8)
    bench.send("0")
    bench.send("1")
    assert bench.batches() == []
    bench.send("2")
    assert bench.batches() == [(["0", "1", "2"], "idle")]
    bench.finish()
    bench.send("3")
    assert bench.batches()[1:] == [(["3"], "idle")]


@pytest.mark.parametrize("text", ["x", "-1", "1.5"])
def test_a_delay_scheduler_that_is_no_number_holds_nothing(
    text: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", text)
    bench = batcher(8)
    assert f"TRITONSERVER_DELAY_SCHEDULER: expected a number of requests, got '{text}'" in caplog.text
    bench.send("0")
    assert bench.batches() == [(["0"], "idle")]


def test_statistics_and_the_log_say_why_batches_closed(caplog: pytest.LogCaptureFixture) -> None:
    bench = batcher(2, delay_ns=3 * MS)
    with caplog.at_level(logging.DEBUG, "neptrio.batcher"):
        bench.send("0", loop_pass=False)
        bench.send("1", loop_pass=False)
        bench.end_pass()
        bench.finish()
        bench.send("2")
        bench.advance(3 * MS)
    stats = bench.scheduler.statistics()
    assert (stats.batches, stats.requests) == (2, 3)
    assert {k: v for k, v in stats.close_reasons.items() if v} == {"full": 1, "delay": 1}
    assert stats.oldest_wait_ns_max == stats.oldest_wait_ns_sum == 3 * MS
    assert "batch of 2 from 2 request(s) closed, full" in caplog.text
    assert (
        "delay: max_queue_delay_microseconds of its oldest request is over; its oldest request waited 3000 us"
        in caplog.text
    )
