"""The slot table, case by case; test_slot_exploration walks through everything that can happen."""

from __future__ import annotations

import pytest

from neptrio.scheduling import sequence_slots as slots
from neptrio.scheduling import sequence_transitions as transitions
from neptrio.scheduling.sequence_slots import SlotTable

IDLE_NS = 1_000_000


class Request:
    """What the table looks at of a request."""

    def __init__(self, sequence_id: str, start: bool, end: bool, timeout_us: int = 0) -> None:
        self.id = sequence_id
        self.sequence_start = start
        self.sequence_end = end
        self.timeout_us = timeout_us
        self.cancelled = False


def test_backlog_timeout_is_the_earliest_of_the_sequence_and_exact() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    table.accept("a", Request("a", True, False), 0)
    first, second = Request("b", True, False, 50), Request("b", False, False, 20)
    table.accept("b", first, 1000)
    table.accept("b", second, 2000)
    ended = Request("c", True, True, 1)
    table.accept("c", ended, 3000)
    assert table.next_deadline() == 4000
    table.expire(3999)
    assert not table.effects
    table.expire(4000)
    assert table.effects == [(slots.TIMED_OUT, ended)]
    table.effects.clear()
    assert table.next_deadline() == 22_000
    table.expire(22_000)
    assert table.effects == [(slots.TIMED_OUT, first), (slots.TIMED_OUT, second)]
    assert set(table.live) == {"a"} and table.backlog_sequences == 0 and table.backlog_requests == 0
    # with a slot the timeout means nothing
    table.accept("a", Request("a", False, False, 1), 30_000)
    table.expire(900_000)
    assert "a" in table.live


def test_idle_time_starts_when_the_slot_is_given() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    table.accept("a", Request("a", True, False), 0)
    table.accept("b", Request("b", True, False), 10)
    table.issue(table.live["a"], 20)
    table.finish(table.live["a"], 30)
    assert table.next_deadline() == IDLE_NS
    table.expire(IDLE_NS)
    assert set(table.live) == {"b"} and table.live["b"].slot == 0
    assert table.next_deadline() == 2 * IDLE_NS
    assert [(kind, s.reason) for kind, s in table.effects] == [(slots.ENDED, "idle")]


def test_queued_requests_run_after_the_idle_deadline() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    request = Request("a", True, False)
    sequence, _ = table.accept("a", request, 0)
    table.expire(IDLE_NS)
    assert not table.live and not table.effects and table.slots_used == 1
    assert table.issue(sequence, IDLE_NS + 1) is request
    table.finish(sequence, IDLE_NS + 2)
    assert table.slots_used == 0 and table.effects == [(slots.ENDED, sequence)]


def test_slots_fill_lowest_number_across_instances_first() -> None:
    table = SlotTable(2, 2, IDLE_NS)
    given = [table.accept(i, Request("", True, False), 0)[0] for i in range(1, 5)]
    assert [(s.instance, s.slot) for s in given] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_disconnect_in_a_slot_and_in_the_backlog() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    first, _ = table.accept("a", Request("a", True, False), 0)
    waiting = Request("b", True, False)
    second, _ = table.accept("b", waiting, 0)
    assert table.end(second, transitions.DISCONNECT, 1)
    assert table.effects == [(slots.CANCELLED, waiting)]
    table.issue(first, 1)
    assert table.end(first, transitions.DISCONNECT, 2)
    table.finish(first, 3)
    assert table.effects[1:] == [(slots.ENDED, first)] and first.reason == "cancelled"


def test_a_retired_instance_gives_no_slots_and_keeps_its_sequences() -> None:
    table = SlotTable(2, 1, IDLE_NS)
    a, _ = table.accept("a", Request("a", True, False), 0)
    table.retire_instance(0)
    assert a.instance == 0 and table.statistics().slots == 1 and not table.effects
    b, _ = table.accept("b", Request("b", True, False), 0)
    c, _ = table.accept("c", Request("c", True, True), 0)
    assert b.instance == 1 and c.slot == -1
    with pytest.raises(RuntimeError, match="retired twice"):
        table.retire_instance(0)
    table.accept("a", Request("a", False, True), 1)
    for _ in range(2):
        table.issue(a, 2)
        table.finish(a, 3)
    assert a.state == transitions.GONE and c.slot == -1, "a slot of the retired instance was given again"
    assert table.effects == [(slots.ENDED, a), (slots.DRAINED, 0)]
    with pytest.raises(RuntimeError, match="effects name instances"):
        table.add_instance()
    table.effects.clear()
    assert table.add_instance(4) == 0, "the index of the instance that is gone"
    assert (c.instance, c.slot) == (0, 0), "the backlog moves into a new instance at once"
    table.retire_instance(1)
    table.retire_instance(0)
    assert not table.effects and table.statistics().slots == 0
    table.issue(c, 5)
    table.finish(c, 6)
    assert table.effects == [(slots.ENDED, c), (slots.DRAINED, 0)]


def test_stale_entries_of_the_ready_list_do_not_pile_up() -> None:
    table = SlotTable(1, 2, IDLE_NS, offers=True)
    for i in range(1000):
        request = Request("", True, False)
        sequence, _ = table.accept(i + 1, request, 0)
        request.cancelled = True
        table.cancel(sequence, request, 0)
        table.effects.clear()
    assert len(table.ready[0]) < 100


def test_an_impossible_event_is_an_error() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    a, _ = table.accept("a", Request("a", True, True), 0)
    with pytest.raises(RuntimeError, match="REQUEST cannot happen in ENDING"):
        table.apply(a, transitions.REQUEST, 0, Request("a", False, False))


def test_abandoned_backlog_entries_do_not_pile_up() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    table.accept("holder", Request("", True, False), 0)
    table.accept("first", Request("", True, False), 0)
    for i in range(1000):
        request = Request("", True, False, 10**9)
        sequence, _ = table.accept(i + 1, request, 0)
        table.cancel(sequence, request, 0)
        table.effects.clear()
    assert table.backlog_sequences == 1
    assert len(table.backlog) < 100 and len(table.timeouts) < 100


def test_deadlines_that_earlier_ones_replace_do_not_pile_up() -> None:
    table = SlotTable(1, 1, IDLE_NS)
    table.accept("holder", Request("", True, False), 0)
    table.accept("waits", Request("", True, False, 10**9), 0)
    for i in range(1000):
        table.accept("waits", Request("", False, False, 10**9 - 1 - i), 0)
    assert len(table.timeouts) < 100
    assert table.timeouts[0][0] == (10**9 - 1000) * 1000
