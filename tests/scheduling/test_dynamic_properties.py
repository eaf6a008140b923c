"""The batcher against a slow reference, and the promises no schedule of events may break.

Schedules are drawn, and some are written down: those that reach a boundary which a draw may miss
(the nanosecond of a deadline or a delay, a queue filled exactly, a batch that must not be prepared).
tools/mutants.py shows that a wrong line in the batcher is noticed here.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
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


def steps_of(data: bytes) -> list[tuple[Any, ...]]:
    """Three bytes are a step. One draw instead of hundreds, so that two hundred long schedules are cheap."""
    steps: list[tuple[Any, ...]] = []
    for kind, a, b in zip(data[::3], data[1::3], data[2::3], strict=False):
        match kind % 12:
            case 0 | 1 | 2 | 3 | 4 | 5:
                timeout_us, width = (0, 500, 2000, 9000)[b & 3], 2 if b >> 2 & 3 == 3 else 1
                steps.append(("send", 1 + a % 4, (a >> 2) % 5, timeout_us, width))
            case 6 | 7:
                steps.append(("advance", a % 7))
            case 8 | 9:
                steps.append(("finish", a % 3))
            case 10:
                steps.append(("cancel", a % 40))
            case _:
                steps.append(("oversleep", 1 + a % 9))
    return steps


operations = st.binary(min_size=36, max_size=180).map(steps_of)
often = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def send(size: int = 1, priority: int = 0, timeout_us: int = 0, width: int = 1) -> tuple[Any, ...]:
    return ("send", size, priority, timeout_us, width)


def advance(ms: float) -> tuple[Any, ...]:
    return ("advance", int(ms * 2))


FINISH, OVERSLEEP = ("finish", 0), ("oversleep", 2)
# (policy, instances, steps)
WRITTEN: list[tuple[BatchingPolicy, int, list[tuple[Any, ...]]]] = [
    # a policy that is exact prepares nothing, whichever of its rules makes it so
    (BatchingPolicy(1, (1,), levels=(QueuePolicy(max_size=5),)), 1, [send()] * 4 + [FINISH] * 2),
    (BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=7000),)), 1, [send()] * 4 + [FINISH] * 2),
    (BatchingPolicy(2, (2,), levels=(QueuePolicy(),) * 2), 1, [send(), send(2, 2), send(2, 1), FINISH]),
    # one that is not prepares one batch, and only one that cannot become better
    (BatchingPolicy(2, (2,)), 1, [send()] * 8 + [FINISH] * 3),
    (BatchingPolicy(4, (2, 4)), 1, [send(4), send(), send(), send(), FINISH]),
    (
        BatchingPolicy(4, (4,), MS),
        2,
        [send(4)] * 2 + [send(2), send(2), send(4), send(1), advance(1), FINISH],
    ),
    # the nanosecond of a delay: before, at and after it, in time and overslept
    (BatchingPolicy(8, (8,), MS), 1, [send(), advance(0.5), send(), advance(0.5), send(), FINISH]),
    (BatchingPolicy(8, (2,), MS), 1, [send(8), send(), send(), send(), advance(1), FINISH]),
    (BatchingPolicy(8, (8,), MS), 1, [send(), OVERSLEEP, send()]),
    # the nanosecond of a deadline, with an instance that is free then, and two that fall together
    (
        BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=1000),)),
        1,
        [send(), send(), advance(1), FINISH],
    ),
    (BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=1000),)), 1, [send(), send(), OVERSLEEP, FINISH]),
    (
        BatchingPolicy(8, (8,), MS, levels=(QueuePolicy(timeout_us=1000),)),
        1,
        [send(), send(), advance(1), FINISH],
    ),
    (
        BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=3000, override=True),)),
        1,
        [
            send(),
            send(1, 0, 2000),
            advance(1),
            send(1, 0, 500),
            send(1, 0, 2000),
            *[advance(0.5)] * 5,
            FINISH,
        ],
    ),
    (
        BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=1000, delay=True),)),
        1,
        [send(), send(), send(), advance(0.5), send(), advance(0.5), send(), *[FINISH] * 3],
    ),
    (
        BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=1000, override=True),)),
        1,
        [send(), send(1, 0, 2000), send(), advance(1), FINISH],
    ),
    (
        BatchingPolicy(1, (1,), levels=(QueuePolicy(timeout_us=3000),)),
        1,
        [send(), send(1, 0, 500), send(), advance(1), FINISH],
    ),
    # a queue that is exactly full, and one that a finished batch makes room in
    (BatchingPolicy(1, (1,), levels=(QueuePolicy(max_size=2),)), 1, [send()] * 4 + [FINISH] + [send()] * 2),
    (
        BatchingPolicy(2, (2,), levels=(QueuePolicy(max_size=1), QueuePolicy(max_size=2)), default_level=2),
        1,
        [send(2), *[send(1, p) for p in (1, 1, 2, 0, 9)], FINISH, send(1, 1)],
    ),
    # sizes that fit exactly, by one not, and past every preferred size
    (BatchingPolicy(4, (4,), 5 * MS), 1, [send(3), send(1), FINISH, send(3), send(2), FINISH, FINISH]),
    (BatchingPolicy(8, (2, 4), 5 * MS), 1, [send(4), FINISH, send(2), send(2), FINISH, send(3), send(2)]),
    (BatchingPolicy(8, (3,), 5 * MS), 1, [send(2), send(2), FINISH, send(4), FINISH, send(2), send(1)]),
    # who leaves may let the others go: 1 + 2 waits for 8, 2 alone is a preferred size
    (BatchingPolicy(8, (2, 8), 5 * MS), 1, [send(1), send(2), ("cancel", 0), advance(1), FINISH]),
    (
        BatchingPolicy(8, (2,), 5 * MS),
        1,
        [send(8), send(), send(1, 0, 0, 2), send(), ("cancel", 2), FINISH, FINISH],
    ),
]


def written(test: Any) -> Any:
    """Runs the test on every schedule that is written down, too."""
    for policy, instances, steps in WRITTEN:
        test = example(policy, instances, list(steps))(test)
    return test


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
        elif what == "oversleep":
            target.oversleep(values[0] * MS // 2)
        elif what == "finish":
            target.finish(values[0] % instances)
        elif values[0] < sent and (isinstance(target, Reference) or f"{values[0]}" in target.requests):
            target.cancel(f"{values[0]}")
    target.advance(100 * MS)
    for _ in range(sent + 1):
        for instance in range(instances):
            target.finish(instance)
            target.advance(100 * MS)


@pytest.mark.slow
@often
@written
@given(policies(), st.integers(1, 3), operations)
def test_it_does_what_the_reference_does(
    policy: BatchingPolicy, instances: int, steps: list[tuple[Any, ...]]
) -> None:
    bench, reference = Bench(policy, instances), Reference(policy, instances)
    drive(bench, policy, instances, steps)
    drive(reference, policy, instances, steps)
    assert bench.events == reference.events


@pytest.mark.slow
@often
@written
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
    assert bench.scheduler.queue.requests() == [] and not bench.scheduler.queue.next_deadline_ns
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


@pytest.mark.slow
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
    assert bench.scheduler.order is not None and len(bench.scheduler.order) == 0
