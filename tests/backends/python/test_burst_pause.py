"""When the loop rests behind a portion of a burst of large responses."""

from __future__ import annotations

from neptrio.backends.python.burst_pause import ENOUGH_PROCESSORS, OTHERS_NS, REST_NS, BurstPause

MS = 1_000_000


def test_who_is_alone_does_not_rest() -> None:
    pause = BurstPause(2)
    assert [pause.after_portion(now * MS, 1) for now in range(1, 100)] == [0] * 99


def test_who_is_beside_others_rests_until_these_are_gone() -> None:
    pause = BurstPause(2)
    begun = 100 * MS
    assert pause.after_portion(begun, 1) == 0
    assert pause.after_portion(begun + MS, 3) == REST_NS
    last = begun + MS + OTHERS_NS - 1
    assert [pause.after_portion(now, 3) for now in range(begun + 2 * MS, last, MS)] == [REST_NS] * 19
    assert pause.after_portion(last, 3) == REST_NS
    assert pause.after_portion(last + 1, 3) == 0
    assert pause.after_portion(last + MS, 4) == REST_NS


def test_others_of_long_ago_do_not_count() -> None:
    """What rang between two bursts is no longer served."""
    pause = BurstPause(2)
    assert pause.after_portion(0, 1) == 0
    assert pause.after_portion(OTHERS_NS, 500) == 0
    assert pause.after_portion(2 * OTHERS_NS - 1, 501) == REST_NS


def test_nobody_rests_where_there_is_a_processor_for_others() -> None:
    for processors, rest in ((1, REST_NS), (ENOUGH_PROCESSORS - 1, REST_NS), (ENOUGH_PROCESSORS, 0), (64, 0)):
        pause = BurstPause(processors)
        assert [pause.after_portion(now * MS, now) for now in range(1, 20)] == [0] + [rest] * 18
