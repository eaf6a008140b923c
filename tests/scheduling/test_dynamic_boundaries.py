"""The batcher at the exact moment: its timer stands at that very nanosecond, and nothing is lost there.

What its queue decides is in tests/scheduling/test_batch_queue.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from neptrio.errors import Unavailable
from neptrio.scheduling.policy import BatchingPolicy, QueuePolicy
from tests.support.batching import START, Bench

MS = 1_000_000


def bench(size: int = 8, instances: int = 1, **options: Any) -> Bench:
    preferred = options.pop("preferred", (size,))
    return Bench(BatchingPolicy(size, preferred, **options), instances)


def test_the_timer_stands_at_the_earlier_of_delay_and_deadline() -> None:
    b = bench(delay_ns=10 * MS, levels=(QueuePolicy(timeout_us=20_000, override=True),))
    b.send("0")
    assert b.timers.next() == START + 10 * MS
    b.send("1", timeout_us=3_000)
    assert b.timers.next() == START + 3 * MS
    b.send("2", timeout_us=1_000)
    assert b.timers.next() == START + 1 * MS
    b.advance(1 * MS)
    assert b.answers() == [("2", "Request timeout expired")]
    assert b.timers.next() == START + 3 * MS
    b.advance(9 * MS)
    assert b.events[1:] == [
        (3 * MS, "answer", "1", "Request timeout expired"),
        (10 * MS, "batch", ["0"], "delay", 10 * MS),
    ]


def test_a_deadline_alone_has_a_timer_while_every_instance_works() -> None:
    b = bench(1, levels=(QueuePolicy(timeout_us=5_000),))
    b.send("running")
    b.advance(1 * MS)
    b.send("0")
    assert b.timers.next() == START + 6 * MS


def test_a_request_whose_deadline_has_come_does_not_execute_though_an_instance_is_free_then() -> None:
    b = bench(1, levels=(QueuePolicy(timeout_us=5_000),))
    b.send("running")
    b.send("0")
    b.now += 5 * MS  # the instance is done before the timer had its say
    b.finish()
    assert b.answers() == [("running", "ok"), ("0", "Request timeout expired")]
    assert b.scheduler.statistics().rejected_timeout == 1


@pytest.mark.parametrize(("late", "accepted"), [(-1, False), (0, True), (1, True)])
def test_a_full_queue_has_room_from_the_nanosecond_of_a_deadline(late: int, accepted: bool) -> None:
    """Though the timer has not had its say yet: nobody is refused for one who is refused himself."""
    b = bench(1, levels=(QueuePolicy(max_size=1, timeout_us=5_000),))
    b.send("running")
    b.send("0")
    b.now += 5 * MS + late
    assert b.send("new") is accepted
    assert b.answers() == ([("0", "Request timeout expired")] if accepted else [])


@pytest.mark.parametrize("levels", [(QueuePolicy(max_size=2),), (QueuePolicy(max_size=1),) * 2])
def test_a_large_request_can_ask_whether_there_is_room(levels: tuple[QueuePolicy, ...]) -> None:
    b = bench(1, levels=levels)
    for i in range(3):
        b.scheduler.expect_room()
        b.send(f"{i}", priority=i % 2 + 1)
    with pytest.raises(Unavailable, match=r"\[request id: <id_unknown>\] Exceeds maximum queue size"):
        b.scheduler.expect_room()
    assert b.scheduler.statistics().rejected_full == 1
    b.pool.instances[0].finish()
    b.scheduler.expect_room()  # an instance is free: what waits is about to leave
    b.end_pass()
    b.scheduler.expect_room()


def test_a_level_without_a_limit_always_has_room() -> None:
    b = bench(1, levels=(QueuePolicy(max_size=1), QueuePolicy()))
    for i in range(4):
        b.send(f"{i}", priority=i % 2 + 1)
    b.scheduler.expect_room()
    assert b.scheduler.statistics().rejected_full == 0


def test_an_expired_request_is_room_for_a_large_one() -> None:
    b = bench(1, levels=(QueuePolicy(max_size=1, timeout_us=5_000),))
    b.send("running")
    b.send("0")  # the bench's clock has long passed by the real one, which expect_room() looks at
    b.scheduler.expect_room()
    assert b.scheduler.statistics().rejected_full == 0


def test_a_deadline_a_nanosecond_away_lets_a_request_execute() -> None:
    b = bench(1, levels=(QueuePolicy(timeout_us=5_000),))
    b.send("running")
    b.send("0")
    b.now += 5 * MS - 1
    b.finish()
    assert [who for who, _ in b.batches()] == [["running"], ["0"]]


def test_priorities_alone_prepare_nothing_so_a_late_comer_overtakes() -> None:
    b = bench(1, levels=(QueuePolicy(),) * 2, default_level=2)
    for id, priority in (("running", 2), ("low", 2), ("high", 1)):
        b.send(id, priority=priority)
    assert b.pool.executing == 1
    b.finish()
    assert b.batches()[1:] == [(["high"], "full")]


def test_at_most_one_batch_is_prepared_and_only_one_that_cannot_grow() -> None:
    b = bench(2)
    for i in range(7):
        b.send(f"{i}")
        assert b.pool.executing == {0: 1, 1: 1}.get(i, 2)
    assert b.batches() == [(["0"], "idle"), (["1", "2"], "full")]


def test_a_departure_lets_those_it_kept_apart_leave_together() -> None:
    b = bench(8, delay_ns=10 * MS, preferred=(3,), levels=(QueuePolicy(max_size=9),))
    b.send("busy", size=8)
    for id, width in (("0", 1), ("other", 2), ("1", 1), ("2", 1)):
        b.send(id, width=width)
    b.finish()
    assert b.batches()[1:] == [(["0"], "shape")]
    b.finish()
    assert b.batches()[2:] == [(["other"], "shape")]
    b.send("3")
    b.finish()
    assert b.batches()[3:] == [(["1", "2", "3"], "preferred")]
    b.send("4")
    b.send("5", width=2)
    b.send("6")
    b.send("7")
    b.cancel("5")
    b.finish()
    assert b.batches()[4:] == [(["4", "6", "7"], "preferred")]


def test_a_cancel_has_the_rest_looked_at_again_at_once() -> None:
    b = bench(8, delay_ns=10 * MS, preferred=(2, 8))
    b.send("0")
    b.send("1", size=2)
    assert b.batches() == [], "3 is no preferred size, and 8 is still possible"
    b.advance(MS)
    b.cancel("0")
    assert b.events[-1] == (MS, "batch", ["1"], "preferred", MS)


def test_a_cancelled_prepared_batch_makes_room_for_the_next() -> None:
    b = bench(8, delay_ns=10 * MS, preferred=(3,))
    b.send("0")
    b.send("1")
    b.send("wide", size=2)  # 4 would pass the preferred 3, so the two go
    assert b.batches() == [(["0", "1"], "preferred")]
    b = bench(8, delay_ns=10 * MS, preferred=(4,), instances=1)
    b.send("busy", size=8)
    b.send("a", size=3)
    b.send("b", size=1, width=2)
    assert b.batches()[1:] == [(["a"], "shape")], "prepared: nothing can join it"
    b.send("c", size=3)
    b.send("d", size=1)
    assert b.pool.executing == 2
    b.finish()
    assert b.batches()[2:] == [(["b"], "shape")]
    b.cancel("b")  # prepared: its place is free again
    assert b.batches()[3:] == [(["c", "d"], "preferred")]


def test_when_the_decision_is_taken_at_once_and_when_after_the_pass() -> None:
    """A full batch and a lone request do not wait for the rest of the loop's pass."""
    b = bench(4)
    kinds: list[str] = []
    real = b.loop_pass.mark

    def mark(dispatcher: Any) -> None:
        kinds.append("now")
        real(dispatcher)

    def mark_later(dispatcher: Any) -> None:
        kinds.append("later")
        real(dispatcher)

    b.loop_pass.mark, b.loop_pass.mark_later = mark, mark_later  # type: ignore[method-assign]
    b.send("alone")
    assert kinds == ["now"]
    b.send("second", size=3)
    assert kinds == ["now", "later"], "another is under way"
    b.finish()
    kinds.clear()
    b.send("full", size=4)
    assert kinds == ["now"]
    b.finish()
    b.finish()
    kinds.clear()
    for id in ("x", "y"):
        b.send(id, loop_pass=False)
    b.end_pass()
    b.finish()
    kinds.clear()
    b.send("after two")
    assert kinds == ["later"], "the last batch had company, so this one may get some"


def test_the_weight_is_the_sum_of_the_waiting_batch_sizes() -> None:
    b = bench(8, levels=(QueuePolicy(max_size=50, timeout_us=9_000),))
    b.send("busy", size=8)
    q = b.scheduler.queue
    for i, size in enumerate((3, 1, 5, 2)):
        b.send(f"{i}", size=size)
    assert q.weight == 11
    b.cancel("2")
    assert q.weight == 6
    b.finish()
    assert q.weight == 0
    b.send("late", size=4)
    assert q.weight == 4
    b.advance(9 * MS)
    assert (q.weight, q.size) == (0, 0)


def test_a_flush_ends_the_hold_and_the_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONSERVER_DELAY_SCHEDULER", "3")
    b = bench(8)
    b.send("0")
    assert b.batches() == []
    b.scheduler.flush()
    b.end_pass()
    assert b.batches() == [(["0"], "idle")]


def test_with_a_rate_limiter_nothing_is_prepared_and_unused_turns_are_given_back() -> None:
    b = bench(1)
    settled: list[bool] = []
    b.pool.limited = True
    b.pool.settle = settled.append  # type: ignore[method-assign]
    limited = type(b.scheduler)(b.model, b.pool, b.scheduler._loop, b.scheduler.policy)  # type: ignore[arg-type]
    b.scheduler = b.model.scheduler = limited
    b.send("running")
    assert settled == [False], "all went, no turn is wanted"
    b.send("0")
    assert settled == [False, True], "an instance is wanted"
    assert b.pool.executing == 1
    b.finish()
    b.finish()
    assert settled == [False, True, False, False], "also with nothing left to do"


def test_statistics_count_every_way_out() -> None:
    b = bench(1, levels=(QueuePolicy(max_size=2, timeout_us=5_000),))
    for id in ("running", "leaves", "expires", "full"):
        b.send(id)
    b.advance(1 * MS)
    b.cancel("leaves")
    b.advance(4 * MS)
    b.finish()
    b.send("last")
    stats = b.scheduler.statistics()
    assert (stats.rejected_full, stats.rejected_timeout, stats.cancelled) == (1, 1, 1)
    assert (stats.batches, stats.requests, stats.oldest_wait_ns_max) == (2, 2, 0)
