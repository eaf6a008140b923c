"""The dynamic batcher's decisions, one rule at a time, on an explicit clock."""

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


def test_what_waits_behind_a_running_batch_leaves_as_one() -> None:
    bench = batcher()
    for i in range(4):
        bench.send(f"{i}")
    assert bench.batches() == [(["0"], "idle")]
    bench.finish()
    assert bench.batches()[1:] == [(["1", "2", "3"], "idle")]


def test_requests_are_whole() -> None:
    bench = batcher(8)
    for i, size in enumerate((3, 3, 3)):
        bench.send(f"{i}", size=size, loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1"], "full")]
    bench.finish()
    assert bench.batches()[1:] == [(["2"], "idle")]


def test_a_preferred_size_goes_at_once_and_the_largest_one() -> None:
    bench = batcher(16, (2, 4), delay_ns=100 * MS)
    for i in range(5):
        bench.send(f"{i}", loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1", "2", "3"], "preferred")]


def test_a_batch_past_every_preferred_size_does_not_wait() -> None:
    bench = batcher(16, (4,), delay_ns=100 * MS)
    bench.send("0", size=6)
    assert bench.batches() == [(["0"], "preferred")]


def test_the_delay_counts_from_the_oldest_request() -> None:
    bench = batcher(8, delay_ns=10 * MS)
    bench.send("0")
    bench.advance(6 * MS)
    bench.send("1")
    bench.advance(4 * MS - 1)
    assert bench.batches() == []
    bench.advance(1)
    assert bench.events[-1] == (10 * MS, "batch", ["0", "1"], "delay", 10 * MS)


def test_after_the_delay_everything_that_fits_goes_not_just_a_preferred_size() -> None:
    bench = batcher(8, (2,), delay_ns=10 * MS, levels=(QueuePolicy(max_size=9),))
    bench.send("busy", size=8)
    for i in range(3):
        bench.send(f"{i}")
    bench.advance(10 * MS)
    bench.finish()
    assert bench.batches()[1:] == [(["0", "1", "2"], "delay")]


def test_another_shape_closes_the_batch() -> None:
    bench = batcher(8, delay_ns=10 * MS)
    bench.send("0", loop_pass=False)
    bench.send("1", loop_pass=False)
    bench.send("2", width=2, loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1"], "shape")]


def test_ragged_inputs_batch_whatever_their_shape() -> None:
    bench = Bench(BatchingPolicy(8, (8,)), specs=[InputSpec("INPUT0", 8, (-1,), False, True)])
    bench.send("0", loop_pass=False)
    bench.send("1", width=3, loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1"], "idle")]


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


def test_shape_tensors_batch_only_when_their_values_are_equal() -> None:
    bench = Bench(BatchingPolicy(8, (8,), shape_tensors=("INPUT0",)), specs=[InputSpec("INPUT0", 8, (1,))])
    for i, value in enumerate((b"aaaa", b"aaaa", b"bbbb")):
        request = bench.make(f"{i}")
        request.inputs = [Tensor("INPUT0", 8, (1, 1), value)]
        bench.enqueue(request, loop_pass=False)
    bench.end_pass()
    assert bench.batches() == [(["0", "1"], "shape")]


def test_a_full_batch_is_prepared_while_the_instance_works_a_growing_one_is_not() -> None:
    bench = batcher(2)
    bench.send("running")
    bench.send("0")
    assert bench.pool.executing == 1
    bench.send("1")
    assert bench.batches()[1:] == [(["0", "1"], "full")]
    bench.send("2")
    bench.send("3")
    assert bench.pool.executing == 2, "one prepared batch beside the running one"


@pytest.mark.parametrize(
    "levels", [(QueuePolicy(max_size=100),), (QueuePolicy(timeout_us=10**9),), (QueuePolicy(),) * 2]
)
def test_a_queue_policy_prepares_nothing(levels: tuple[QueuePolicy, ...]) -> None:
    bench = batcher(1, levels=levels)
    bench.send("running")
    bench.send("0")
    assert bench.pool.executing == 1


def test_instances_run_in_parallel_the_idle_one_first() -> None:
    bench = batcher(1, instances=2)
    for i in range(4):
        bench.send(f"{i}")
    assert [i.outstanding for i in bench.pool.instances] == [2, 2]
    assert [[r.id for b in i.batches for r in b.requests] for i in bench.pool.instances] == [
        ["0", "2"],
        ["1", "3"],
    ]


def test_strict_priority_in_arrival_order_within_a_level() -> None:
    bench = batcher(1, levels=(QueuePolicy(),) * 3, default_level=2)
    bench.send("running")
    for id, priority in (("c", 3), ("b1", 0), ("a1", 1), ("b2", 2), ("a2", 1), ("b3", 9)):
        bench.send(id, priority=priority)
    for _ in range(6):
        bench.finish()
    assert [ids[0] for ids, _ in bench.batches()[1:]] == ["a1", "a2", "b1", "b2", "b3", "c"]


@pytest.mark.slow
def test_the_limit_is_exact_under_a_burst() -> None:
    bench = batcher(1, levels=(QueuePolicy(max_size=100),))
    accepted = [i for i in range(10_000) if bench.send(f"{i}", loop_pass=False)]
    assert accepted == list(range(101)), "one executes, a hundred wait"
    assert bench.events[-1][2:] == ("9999", "[request id: 9999] Exceeds maximum queue size")
    assert bench.scheduler.statistics().rejected_full == 9_899


def test_limits_belong_to_their_level() -> None:
    bench = batcher(1, levels=(QueuePolicy(max_size=1), QueuePolicy(max_size=2)), default_level=2)
    bench.send("running")
    got = [bench.send(f"{p}{i}", priority=p) for p in (1, 2) for i in range(3)]
    assert got == [True, False, False, True, True, False]


def test_a_timeout_rejects_at_its_deadline() -> None:
    bench = batcher(1, levels=(QueuePolicy(timeout_us=5_000),))
    bench.send("running")
    bench.send("0")
    bench.advance(5 * MS - 1)
    assert bench.answers() == []
    bench.advance(1)
    assert bench.events[-1] == (5 * MS, "answer", "0", "Request timeout expired")
    bench.finish()
    assert [ids for ids, _ in bench.batches()] == [["running"]]


@pytest.mark.parametrize(
    ("override", "default_us", "asked_us", "deadline_ms"),
    [
        (True, 9_000, 4_000, 4),
        (True, 9_000, 20_000, 9),
        (False, 9_000, 4_000, 9),
        (True, 9_000, 0, 9),
        (True, 0, 4_000, None),
    ],
)
def test_a_request_may_only_shorten_its_timeout(
    override: bool, default_us: int, asked_us: int, deadline_ms: int | None
) -> None:
    bench = batcher(1, levels=(QueuePolicy(timeout_us=default_us, override=override, max_size=9),))
    bench.send("running")
    bench.send("0", timeout_us=asked_us)
    bench.advance(1000 * MS)
    times = [event[0] for event in bench.events if event[1] == "answer"]
    assert times == ([] if deadline_ms is None else [deadline_ms * MS])


def test_delayed_requests_run_after_the_others_of_their_level() -> None:
    bench = batcher(1, levels=(QueuePolicy(timeout_us=5_000, delay=True),))
    bench.send("running")
    bench.send("late1")
    bench.send("late2")
    bench.advance(5 * MS)
    bench.send("fresh")
    for _ in range(4):
        bench.finish()
    assert [ids[0] for ids, _ in bench.batches()] == ["running", "fresh", "late1", "late2"]


def test_a_cancelled_request_leaves_the_queue_and_its_mates_go_on() -> None:
    bench = batcher(8)
    bench.send("running")
    for i in range(3):
        bench.send(f"{i}")
    bench.cancel("1")
    assert bench.answers() == [("1", "request cancelled")]
    bench.finish()
    assert bench.batches()[1:] == [(["0", "2"], "idle")]


def test_a_cancelled_request_leaves_a_prepared_batch() -> None:
    bench = batcher(2)
    bench.send("running")
    bench.send("0")
    bench.send("1")
    bench.cancel("0")
    assert bench.answers() == [("0", "request cancelled")]
    bench.finish()
    bench.finish()
    assert bench.answers()[1:] == [("running", "ok"), ("1", "ok")]


def test_a_request_cancelled_while_it_executes_ends_as_cancelled_its_mates_do_not() -> None:
    bench = batcher(2)
    bench.send("0", loop_pass=False)
    bench.send("1", loop_pass=False)
    bench.end_pass()
    bench.cancel("0")
    assert bench.answers() == [] and bench.requests["0"].cancelled
    bench.finish()
    assert bench.answers() == [("0", "request cancelled"), ("1", "ok")]
    assert bench.model.counters.failures["CANCELED"] == 1


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
