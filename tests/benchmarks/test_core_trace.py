"""Waits read from a scheduler trace: who kept the core from a thread that was woken."""

from __future__ import annotations

from benchmarks.core_trace import waits

SLEEPS = "  python-9 [000] d..2. {at}: sched_switch: prev_comm=python prev_pid=9 prev_prio=79 prev_state={state} ==> next_comm={by} next_pid={pid} next_prio=120\n"
WOKEN = "  load-3 [001] d..2. {at}: sched_waking: comm=python pid=9 prio=79 target_cpu=000\n"
RUNS = "  python-9 [000] ..... {at}: sys_exit: NR 232 = 1\n"


def told(*lines: str) -> dict[str, list[int]]:
    found = waits("# tracer: nop\n" + "".join(lines), 9)
    return {who: [round(wait) for wait in times] for who, times in found.items()}


def test_a_wait_is_charged_to_who_has_the_core() -> None:
    sleeps = SLEEPS.format(at="1.000000", state="S", by="backup agent", pid=7)
    assert told(sleeps, WOKEN.format(at="1.000100"), RUNS.format(at="1.001700")) == {"backup agent": [1600]}


def test_sleep_is_no_wait() -> None:
    sleeps = SLEEPS.format(at="1.000000", state="S", by="swapper/0", pid=0)
    assert told(sleeps, WOKEN.format(at="2.000000"), RUNS.format(at="2.000020")) == {}


def test_a_thread_that_is_taken_off_the_core_waits_from_then_on() -> None:
    taken = SLEEPS.format(at="1.000000", state="R+", by="migration/0", pid=15)
    assert told(taken, RUNS.format(at="1.000500")) == {"migration/0": [500]}


def test_what_happens_on_another_core_charges_nobody() -> None:
    elsewhere = SLEEPS.format(at="1.000050", state="S", by="other", pid=8)
    elsewhere = elsewhere.replace("[000]", "[001]").replace("prev_pid=9", "prev_pid=4")
    sleeps = SLEEPS.format(at="1.000000", state="S", by="agent", pid=7)
    assert told(sleeps, elsewhere, WOKEN.format(at="1.000100"), RUNS.format(at="1.000900")) == {
        "agent": [800]
    }
