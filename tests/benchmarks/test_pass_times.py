"""Passes of the loop read from the kernel's trace: what they took of the processor."""

from __future__ import annotations

from benchmarks.pass_times import passes

WAIT = 232


def event(at: int, name: str, details: str) -> str:
    """A line of the trace; `at` in microseconds."""
    return f"  python-9 [000] d..2. 1.{at:06}: {name}: {details}\n"


def switch(at: int, before: int, after: int) -> str:
    details = f"prev_comm=a prev_pid={before} prev_prio=120 prev_state=S ==> next_comm=b next_pid={after} next_prio=120"
    return event(at, "sched_switch", details)


def told(*lines: str) -> list[tuple[int, int, int]]:
    """(processor, wall clock, network) of each pass."""
    found = passes("# tracer: nop\n" + "".join(lines), 9, WAIT)
    return [(round(one.cpu), round(one.wall), round(one.network)) for one in found]


def woken(at: int) -> str:
    return event(at, "sys_exit", f"NR {WAIT} = 1")


def waits(at: int) -> str:
    return event(at, "sys_enter", f"NR {WAIT} (8, 0, 100, 0, 0, 0)")


def test_a_pass_lasts_from_the_end_of_a_wait_to_the_next() -> None:
    send = event(50, "sys_enter", "NR 44 (6, 0, 0, 0, 0, 0)"), event(80, "sys_exit", "NR 44 = 10")
    assert told(waits(0), woken(10), *send, waits(110), woken(500), waits(520)) == [
        (100, 100, 0),
        (20, 20, 0),
    ]


def test_time_in_which_the_thread_does_not_run_is_not_counted() -> None:
    assert told(woken(0), switch(100, 9, 7), switch(400, 7, 9), waits(500)) == [(200, 500, 0)]


def test_the_thread_runs_when_it_does_something_though_nobody_told_of_the_switch_back() -> None:
    lock = event(400, "sys_exit", "NR 202 = 0")
    assert told(woken(0), switch(100, 9, 7), lock, waits(500)) == [(200, 500, 0)]


def test_what_the_kernel_does_for_the_network_is_told_apart() -> None:
    softirq = (
        event(100, "softirq_entry", "vec=3 [action=NET_RX]"),
        event(130, "softirq_exit", "vec=3 [action=NET_RX]"),
    )
    assert told(woken(0), *softirq, waits(500)) == [(500, 500, 30)]


def test_other_threads_switches_are_nothing() -> None:
    assert told(woken(0), switch(100, 5, 7), switch(200, 7, 5), waits(300)) == [(300, 300, 0)]
