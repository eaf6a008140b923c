"""The queue at the exact moment: one nanosecond before, at, and after; one request below, at, and above.

It is asked directly, so no timer can round anything.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from neptrio.request.infer_request import InferRequest, InputSpec, ModelCore, Tensor, Timestamp
from neptrio.scheduling.batch_queue import BatchQueue
from tests.support.batching import START

MS = 1_000_000
US = 1_000
MODEL = ModelCore("m", "1")


def waiting(
    id: str,
    at: int = 0,
    size: int = 1,
    width: int = 1,
    priority: int = 0,
    timeout_us: int = 0,
    value: bytes = b"",
) -> InferRequest:
    request = InferRequest()
    request.id, request.model = id, MODEL
    request.batch_size, request.priority, request.timeout_us = size, priority, timeout_us
    request.inputs = [Tensor("X", 8, (size, width), value or bytes(4 * size * width))]
    request.stamp(Timestamp.QUEUE_START, START + at)
    return request


def queue(
    size: int = 8,
    preferred: tuple[int, ...] = (),
    delay_ns: int = 0,
    levels: Any = ((0, 0, False, False),),
    default: int = 1,
    specs: tuple[InputSpec, ...] = (InputSpec("X", 8, (-1,)),),
    shape_tensors: tuple[str, ...] = (),
) -> BatchQueue:
    return BatchQueue(size, preferred, delay_ns, list(levels), default, specs, shape_tensors)


def decide(q: BatchQueue, at: int, flush: bool = False) -> tuple[int, str, bool]:
    return q.decide(START + at, flush), q.reason, q.saturated


def ids(requests: list[InferRequest]) -> list[str]:
    return [request.id for request in requests]


# ------------------------------------------------------------------ time


@pytest.mark.parametrize(("at", "count"), [(10 * MS - 1, 0), (10 * MS, 2), (10 * MS + 1, 2)])
def test_the_delay_is_over_at_its_last_nanosecond_not_before_not_after(at: int, count: int) -> None:
    q = queue(delay_ns=10 * MS)
    q.push(waiting("0", 0))
    q.push(waiting("1", 4 * MS))
    assert decide(q, at) == (count, "delay" if count else "wait", False)
    assert q.wake_ns == (0 if count else START + 10 * MS), "the oldest request rules"
    assert q.oldest_wait_ns == (at if count else 0)


@pytest.mark.parametrize(("at", "count"), [(10 * MS - 1, 2), (10 * MS, 3)])
def test_a_preferred_size_goes_before_the_delay_is_over_and_everything_from_then_on(
    at: int, count: int
) -> None:
    q = queue(8, (2,), delay_ns=10 * MS)
    for i, arrived in enumerate((2 * MS, 0, 3 * MS)):  # the oldest need not be the first
        q.push(waiting(f"{i}", arrived))
    assert decide(q, at)[:2] == (count, "preferred" if count == 2 else "delay")
    assert q.oldest_wait_ns == at


def test_the_wait_is_that_of_the_batch_not_of_those_it_leaves_behind() -> None:
    q = queue(8, (2,), delay_ns=10 * MS)
    for i, arrived in enumerate((2 * MS, 3 * MS, 1 * MS)):  # an older one that came again
        q.push(waiting(f"{i}", arrived))
    assert decide(q, 5 * MS) == (2, "preferred", True)
    assert q.oldest_wait_ns == 3 * MS


@pytest.mark.parametrize(("at", "gone"), [(5 * MS - 1, []), (5 * MS, ["0"]), (5 * MS + 1, ["0"])])
def test_a_request_is_refused_at_its_deadline_not_before_not_after(at: int, gone: list[str]) -> None:
    q = queue(levels=[(0, 5_000, False, False)])
    q.push(waiting("0", 0))
    q.push(waiting("1", 1 * MS))
    assert q.next_deadline_ns == START + 5 * MS
    assert ids(q.expire(START + at)) == gone
    assert ids(q.requests()) == [i for i in ("0", "1") if i not in gone]
    assert q.next_deadline_ns == START + (6 if gone else 5) * MS


@pytest.mark.parametrize(("at", "order"), [(5 * MS - 1, ["0", "1"]), (5 * MS, ["1", "0"])])
def test_a_delayed_request_goes_to_the_back_at_its_deadline(at: int, order: list[str]) -> None:
    q = queue(levels=[(0, 5_000, False, True)])
    q.push(waiting("0", 0))
    q.push(waiting("1", 2 * MS))
    assert q.expire(START + at) == []
    assert ids(q.requests()) == order
    q.push(waiting("2", 3 * MS))
    assert ids(q.requests()) == (["0", "1", "2"] if order[0] == "0" else ["1", "2", "0"])
    q.decide(START + 20 * MS)
    assert ids(q.take()) == ids(q.take()) or q.size == 0
    assert (q.size, q.weight, q.sizes()) == (0, 0, [0])


@pytest.mark.parametrize(
    ("asked_us", "override", "deadline_us"),
    [
        (4_999, True, 4_999),
        (5_000, True, 5_000),
        (5_001, True, 5_000),
        (0, True, 5_000),
        (1, True, 1),
        (1, False, 5_000),
    ],
)
def test_only_a_shorter_timeout_counts_and_only_where_it_may(
    asked_us: int, override: bool, deadline_us: int
) -> None:
    q = queue(levels=[(0, 5_000, override, False)])
    q.push(waiting("0", 0, timeout_us=asked_us))
    assert q.next_deadline_ns == START + deadline_us * US
    without = queue(levels=[(0, 0, override, False)])
    without.push(waiting("0", 0, timeout_us=asked_us))
    assert without.next_deadline_ns == 0, "where the level has no timeout, no request has one"


def test_deadlines_come_out_in_their_order_and_equal_ones_in_order_of_arrival() -> None:
    for seed in range(20):
        dice = random.Random(seed)
        q = queue(levels=[(0, 1_000_000, True, False)])
        requests = [waiting(f"{i}", timeout_us=dice.choice([10, 20, 20, 20, 30, 40, 50])) for i in range(40)]
        for request in requests:
            q.push(request)
        left = dice.sample(requests, 15)
        for request in left:
            assert q.remove(request) and not q.remove(request)
        rest = sorted(
            (r for r in requests if r not in left), key=lambda r: (r.deadline_ns, requests.index(r))
        )
        got: list[InferRequest] = []
        for moment in (9, 10, 20, 25, 30, 40, 50):
            got += q.expire(START + moment * US)
            assert len(got) == len([r for r in rest if r.deadline_ns <= START + moment * US])
            assert q.next_deadline_ns == (rest[len(got)].deadline_ns if len(got) < len(rest) else 0)
        assert ids(got) == ids(rest)
        assert (q.size, q.weight, q.requests()) == (0, 0, [])


# ------------------------------------------------------------------ sizes


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3, 4), (0, "wait", False)),  # 7 of 8: one more may come
        ((4, 4), (2, "full", True)),  # exactly full
        ((4, 4, 1), (2, "full", True)),
        ((4, 5), (1, "full", True)),  # one too many
        ((8,), (1, "full", True)),
        ((7, 1), (2, "full", True)),
    ],
)
def test_a_batch_is_full_at_max_batch_size(sizes: tuple[int, ...], expected: tuple[int, str, bool]) -> None:
    q = queue(8, delay_ns=10 * MS)
    for i, size in enumerate(sizes):
        q.push(waiting(f"{i}", size=size))
    assert q.weight == sum(sizes)
    assert decide(q, 1) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((3,), (0, "wait", False)),
        ((4,), (1, "preferred", True)),  # a preferred size, and no larger one is liked
        ((2,), (1, "preferred", False)),  # liked, but 4 would be better
        ((2, 1), (1, "preferred", False)),
        ((2, 3), (1, "preferred", False)),  # with 3, when its delay is over
        ((1, 3), (2, "preferred", True)),
        ((1, 4), (1, "preferred", True)),  # 1 cannot become one any more
        ((1, 2), (0, "wait", False)),
        ((3, 1, 1), (2, "preferred", True)),
        ((5,), (1, "preferred", True)),  # past every preferred size on its own
        ((6,), (1, "preferred", True)),
        ((5, 4), (1, "full", True)),
        ((2, 2, 4), (2, "preferred", True)),
        ((8, 1), (1, "full", True)),
    ],
)
def test_preferred_sizes_at_their_edges(sizes: tuple[int, ...], expected: tuple[int, str, bool]) -> None:
    q = queue(8, (2, 4), delay_ns=10 * MS)
    for i, size in enumerate(sizes):
        q.push(waiting(f"{i}", size=size))
    assert decide(q, 1) == expected


@pytest.mark.parametrize(
    ("widths", "expected"),
    [((1, 1), (0, "wait", False)), ((1, 2), (1, "shape", True)), ((1, 1, 2), (2, "shape", True))],
)
def test_another_shape_closes_even_a_batch_of_one(
    widths: tuple[int, ...], expected: tuple[int, str, bool]
) -> None:
    q = queue(8, delay_ns=10 * MS)
    for i, width in enumerate(widths):
        q.push(waiting(f"{i}", width=width))
    assert decide(q, 1) == expected


def test_a_preferred_batch_that_another_shape_closes_is_as_good_as_it_gets() -> None:
    q = queue(8, (2, 8), delay_ns=10 * MS)
    for i, width in enumerate((1, 1, 2)):
        q.push(waiting(f"{i}", width=width))
    assert decide(q, 1) == (2, "preferred", True)
    ragged = queue(8, (2, 8), delay_ns=10 * MS, specs=(InputSpec("X", 8, (-1,), False, True),))
    for i, width in enumerate((1, 1, 2)):
        ragged.push(waiting(f"{i}", width=width))
    assert decide(ragged, 1) == (2, "preferred", False)
    assert decide(ragged, 10 * MS) == (3, "delay", False)


def test_values_and_shapes_of_shape_tensors_count() -> None:
    q = queue(8, delay_ns=10 * MS, specs=(InputSpec("X", 8, (1,)),), shape_tensors=("X",))
    for i, value in enumerate((b"aaaa", b"aaaa", b"bbbb")):
        q.push(waiting(f"{i}", value=value))
    assert decide(q, 1) == (2, "shape", True)


def test_without_a_delay_what_is_there_goes_and_a_flush_does_not_wait_for_one() -> None:
    q = queue(8)
    q.push(waiting("0"))
    assert decide(q, 0) == (1, "idle", False)
    slow = queue(8, delay_ns=1)
    slow.push(waiting("0"))
    assert decide(slow, 0) == (0, "wait", False)
    assert decide(slow, 0, flush=True) == (1, "flush", False)
    assert decide(slow, 1) == (1, "delay", False)


# ------------------------------------------------------------------ limits and levels


def test_a_level_takes_as_many_as_its_limit_and_late_ones_count() -> None:
    q = queue(1, levels=[(2, 1_000, False, True)])
    assert [q.push(waiting(f"{i}")) for i in range(3)] == [True, True, False]
    q.expire(START + 1 * MS)
    assert not q.push(waiting("3", 1 * MS))
    q.decide(START + 1 * MS)
    assert ids(q.take()) == ["0"]
    assert [q.push(waiting(f"{i}", 1 * MS)) for i in (4, 5)] == [True, False]
    assert ids(q.requests()) == ["4", "1"]


@pytest.mark.parametrize(
    ("priority", "level"), [(0, 2), (1, 1), (2, 2), (3, 3), (4, 2), (2**63, 2), (2**64 - 1, 2)]
)
def test_priorities_and_their_levels(priority: int, level: int) -> None:
    q = queue(levels=[(0, 0, False, False)] * 3, default=2)
    q.push(waiting("0", priority=priority))
    assert q.sizes() == [int(level == i) for i in (1, 2, 3)]
