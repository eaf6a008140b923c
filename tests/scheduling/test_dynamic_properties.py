"""The batcher against a slow reference, and the promises no schedule of events may break."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neptrio.scheduling.policy import BatchingPolicy, QueuePolicy
from tests.scheduling.reference_batcher import Reference
from tests.support.batching import START, Bench

MS = 1_000_000

queue_policies = st.builds(
    QueuePolicy,
    max_size=st.sampled_from([0, 0, 1, 2, 5]),
    timeout_us=st.sampled_from([0, 0, 1000, 3000, 7000]),
    override=st.booleans(),
    delay=st.booleans(),
)


@st.composite
def policies(draw: Any, ordered: bool = False) -> BatchingPolicy:
    largest = draw(st.integers(1, 9))
    preferred = draw(st.sets(st.integers(1, largest), max_size=3)) or {largest}
    plain = st.just([QueuePolicy()])  # the only kind that prepares batches ahead
    levels = tuple(draw(plain | st.lists(queue_policies, min_size=1, max_size=1 if ordered else 3)))
    return BatchingPolicy(
        largest,
        tuple(sorted(preferred)),
        draw(st.sampled_from([0, 0, 1, 2, 5])) * MS,
        ordered,
        levels,
        draw(st.integers(1, len(levels))),
    )


sends = st.tuples(
    st.just("send"),
    st.integers(1, 4),
    st.integers(0, 4),
    st.sampled_from([0, 500, 2000, 9000]),
    st.sampled_from([1, 1, 1, 2]),
)
operations = st.lists(
    st.one_of(
        sends,
        sends,
        sends,
        st.tuples(st.just("advance"), st.integers(0, 6)),
        st.tuples(st.just("finish"), st.integers(0, 2)),
        st.tuples(st.just("cancel"), st.integers(0, 40)),
    ),
    max_size=60,
)
often = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def drive(target: Any, policy: BatchingPolicy, instances: int, steps: list[tuple[Any, ...]]) -> None:
    """The same steps for the batcher and for the reference; afterwards nothing is left in either."""
    sent = 0
    for what, *values in steps:
        if what == "send":
            size, priority, timeout, width = values
            size = min(size, policy.max_batch_size)
            if isinstance(target, Bench):
                target.send(f"{sent}", size=size, priority=priority, timeout_us=timeout, width=width)
            else:
                target.send(f"{sent}", size, priority, timeout, width)
            sent += 1
        elif what == "advance":
            target.advance(values[0] * MS // 2)
        elif what == "finish":
            target.finish(values[0] % instances)
        elif values[0] < sent and (isinstance(target, Reference) or f"{values[0]}" in target.requests):
            target.cancel(f"{values[0]}")
    target.advance(100 * MS)
    for _ in range(sent + 1):
        for instance in range(instances):
            target.finish(instance)
            target.advance(100 * MS)


@often
@given(policies(), st.integers(1, 3), operations)
def test_it_does_what_the_reference_does(
    policy: BatchingPolicy, instances: int, steps: list[tuple[Any, ...]]
) -> None:
    bench, reference = Bench(policy, instances), Reference(policy, instances)
    drive(bench, policy, instances, steps)
    drive(reference, policy, instances, steps)
    assert bench.events == reference.events


@often
@given(policies(), st.integers(1, 3), operations)
def test_nothing_is_lost_doubled_overtaken_or_executed_too_late(
    policy: BatchingPolicy, instances: int, steps: list[tuple[Any, ...]]
) -> None:
    bench = Bench(policy, instances)
    drive(bench, policy, instances, steps)
    refused = [event[2] for event in bench.events if event[1] == "refused"]
    answered = [id for id, _ in bench.answers()]
    assert sorted(refused + answered) == sorted(bench.requests), "exactly one outcome each"
    stats = bench.scheduler.statistics()
    assert (stats.queued, stats.executing, bench.model.inflight) == (0, 0, 0)
    assert bench.scheduler._queue.requests() == [] and not bench.scheduler._queue.next_deadline_ns
    started: dict[int, int] = {}
    for time, what, *rest in bench.events:
        if what != "batch":
            continue
        for id in rest[0]:
            request = bench.requests[id]
            number = len(policy.levels)
            level = (
                request.priority if number > 1 and 1 <= request.priority <= number else policy.default_level
            )
            rules = policy.levels[level - 1]
            if rules.delay and rules.timeout_us:
                continue
            if request.deadline_ns:
                assert time + START < request.deadline_ns
            assert int(id) > started.get(level, -1), "overtaken within its level"
            started[level] = int(id)


@often
@given(policies(ordered=True), st.integers(1, 3), operations)
def test_preserved_order_is_the_order_of_arrival(
    policy: BatchingPolicy, instances: int, steps: list[tuple[Any, ...]]
) -> None:
    bench = Bench(policy, instances)
    drive(bench, policy, instances, steps)
    executed = {id for ids, _ in bench.batches() for id in ids}
    ok = [int(id) for id, text in bench.answers() if text == "ok"]
    assert ok == sorted(ok)
    assert {id for id, text in bench.answers() if text == "ok"} <= executed
    assert len(bench.answers()) == len({id for id, _ in bench.answers()})
    assert bench.scheduler._order is not None and len(bench.scheduler._order) == 0
