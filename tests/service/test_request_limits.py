"""Requests per client address: the decision without a clock of its own."""

from __future__ import annotations

import pytest

from neptrio.errors import Code, Overloaded
from neptrio.service.held_bytes import GOOD_NS, HeldBytes
from neptrio.service.request_limits import MOST_BUCKETS, NS, RequestLimits


def passed(limits: RequestLimits, address: str, now_ns: int, tries: int) -> int:
    """How many of `tries` requests at once are taken."""
    problems = [limits.problem(address, now_ns) for _ in range(tries)]
    assert all(problem is None or problem.code is Code.TOO_MANY for problem in problems)
    return problems.count(None)


def test_a_second_of_requests_may_come_at_once_and_the_rate_after_it() -> None:
    limits = RequestLimits(10, 0)
    assert limits.on
    assert passed(limits, "a", 0, 100) == 10
    assert passed(limits, "a", NS // 10 - 1, 100) == 0
    assert passed(limits, "a", NS // 10, 100) == 1
    assert passed(limits, "a", NS, 100) == 9
    assert passed(limits, "a", 100 * NS, 100) == 10
    assert passed(limits, "b", 100 * NS, 100) == 10


def test_a_network_of_ipv6_is_one_client() -> None:
    limits = RequestLimits(10, 0)
    assert passed(limits, "2001:db8::1", 0, 6) == 6
    assert passed(limits, "2001:db8::2", 0, 6) == 4
    assert passed(limits, "2001:db8:0:1::1", 0, 6) == 6


def test_requests_at_once_are_those_of_all_connections() -> None:
    limits = RequestLimits(0, 3)
    open_now = {"one": 2, "two": 1}
    holders = [lambda: open_now["one"], lambda: open_now["two"]]
    for holder in holders:
        limits.join("a", holder)
    assert limits.problem("a", 0) is None
    assert limits.problem("a", 0, itself=1) is not None
    open_now["two"] = 2
    problem = limits.problem("a", 0)
    assert problem is not None and problem.code is Code.TOO_MANY and dict(problem.headers)[b"retry-after"]
    assert limits.problem("b", 0) is None
    for holder in holders:
        limits.leave("a", holder)
    assert limits.problem("a", 0) is None
    assert not limits.clients


def test_clients_are_not_remembered_without_bound() -> None:
    limits = RequestLimits(1, 0)
    for i in range(MOST_BUCKETS + 100):
        assert limits.problem(f"10.{i >> 16}.{i >> 8 & 255}.{i & 255}", 0) is None
    assert len(limits.buckets) == MOST_BUCKETS


def test_nothing_is_limited_by_default() -> None:
    limits = RequestLimits(0, 0)
    assert not limits.on
    assert passed(limits, "a", 0, 1000) == 1000


def test_bytes_are_given_until_there_are_none() -> None:
    held = {"rest": 0, "grpc": 0}
    budget = HeldBytes(100)
    budget.add(lambda: held["rest"])
    budget.add(lambda: held["grpc"])
    budget.take(60, 0)
    with pytest.raises(Overloaded, match=r"hold 60 bytes, of 100") as error:
        budget.take(41, 1)
    assert dict(error.value.headers)[b"retry-after"]
    budget.take(40, 2)  # what was refused takes nothing
    held["rest"] = 90
    with pytest.raises(Overloaded):
        budget.take(20, 3 + GOOD_NS)  # somebody holds what was given
    held["rest"], held["grpc"] = 0, 80
    budget.take(20, 10 * GOOD_NS)
    assert not budget.full
    held["grpc"] = 101
    assert budget.look() == 101
    assert budget.full
    held["grpc"] = 0
    budget.look()
    assert not budget.full


def test_a_body_under_way_keeps_all_of_its_room() -> None:
    """Also when it was looked at while a part of it had come."""
    budget, come = HeldBytes(100), [0]
    budget.add(lambda: come[0])
    budget.take(60, GOOD_NS)
    come[0] = 10
    assert budget.problem(0, 3 * GOOD_NS) is None  # may it go on?
    assert budget.count() == 10
    come[0] = 60
    with pytest.raises(Overloaded):
        budget.take(60, 3 * GOOD_NS + 1)


def test_what_a_request_makes_besides_is_counted() -> None:
    limits = RequestLimits(10, 6)
    under_way = [1]
    limits.join("a", lambda: under_way[0])
    assert limits.problem("a", 0) is None
    refused = limits.further("a", 6)
    assert refused is not None and "would have 7 requests under way, of 6" in str(refused)
    assert limits.further("a", 5) is None
    assert passed(limits, "a", 0, 100) == 4  # of ten, six are made


def test_more_than_a_second_of_them_is_a_debt() -> None:
    limits = RequestLimits(10, 0)
    assert limits.problem("a", 0) is None
    assert limits.further("a", 29) is None
    assert passed(limits, "a", 2 * NS, 100) == 0
    assert passed(limits, "a", 2 * NS + NS // 10, 100) == 1
    assert passed(limits, "b", 0, 100) == 10
