"""Who had the server's core when it wanted it: the open loop under the kernel's scheduler trace (root, tracefs).

    python -m benchmarks.core_trace [--bursts N]

The bursts are those of the open loop with real-time priority. Even then a thread that is in the kernel may keep the
core, because this kernel takes it away at certain points only, and a tail of a millisecond over a median of 40 us
looks the same whoever caused it. So each burst is traced: from the moment at which the server's loop was woken until it
ran is its wait; a wait above LONG_US is charged to whoever had run until then. The table has p99 / p50 of all bursts,
and of those that had no such wait. Tracing costs the server some microseconds per wake-up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from benchmarks import models, peers, run
from benchmarks.kernel_trace import SWITCH, events, require, traced
from benchmarks.open_loop import BURST_S, CONCURRENCY, FORMS, first

EVENTS = {  # and what of them is wanted
    "sched/sched_switch": "",
    "sched/sched_waking": "pid == {pid}",
    "raw_syscalls/sys_exit": "common_pid == {pid}",
}
LONG_US = 150.0


def waits(text: str, pid: int, cpu: int = 0) -> dict[str, list[float]]:
    """The waits in a trace, in microseconds, by the name of the thread that had the core until then.

    `pid` runs on `cpu`. That it runs again is seen by the end of its system call, because not every kernel tells of the
    switch that took the core from somebody within a system call of their own.
    """
    made: dict[str, list[float]] = defaultdict(list)
    woken: float | None = None
    holder = ""
    for event in events(text):
        at = event.at
        if event.name == "sched_waking":
            woken = at if woken is None else woken
        elif event.name == "sys_exit":
            if woken is not None and at - woken > LONG_US:
                made[holder].append(at - woken)
            woken = None
        elif event.cpu == cpu:
            switch = SWITCH.search(event.details)
            if switch is None:
                continue
            if int(switch["prev"]) == pid:
                woken = at if switch["state"].startswith("R") else None
            if int(switch["next"]) != pid:
                holder = switch["comm"]
    return made


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bursts", type=int, default=12)
    options = parser.parse_args()
    require()
    run.build_loadgen()
    run.raise_file_limit()
    print("| case | rate | p50 | p99 / p50, all bursts | without long waits | long waits, by whom |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models.native_repository(folder / "native")
        server = peers.neptrio(folder / "native", 0, folder / "log")
        try:
            for title, form in FORMS:
                print(
                    measure(server, run.Case(title, form, "simple", CONCURRENCY), folder, options.bursts),
                    flush=True,
                )
        finally:
            server.stop()
    return 0


def measure(server: peers.Server, case: run.Case, folder: Path, bursts: int) -> str:
    """A row of the table."""
    with first(server):
        rate = run.load(case, server, folder, BURST_S, 1)["per_second"] / 2
    ratios, quiet, medians = [], [], []
    blamed: dict[str, list[float]] = defaultdict(list)
    for _ in range(bursts):
        pid = server.process.pid
        with (
            first(server),
            traced({event: wanted.format(pid=pid) for event, wanted in EVENTS.items()}) as text,
        ):
            result = run.load(case, server, folder, BURST_S, 1, rate=rate)
        found = waits(text[0], pid)
        medians.append(result["p50_us"])
        ratios.append(result["p99_us"] / result["p50_us"])
        if not found:
            quiet.append(ratios[-1])
        for who, times in found.items():
            blamed[who] += times
    who = ", ".join(
        f"{name} {len(times)} ({max(times):,.0f} us)"
        for name, times in sorted(blamed.items(), key=lambda item: -sum(item[1]))
    )
    alone = f"{statistics.median(quiet):.1f} ({len(quiet)} of {bursts})" if quiet else "none"
    return (
        f"| {case.title} | {rate:,.0f} | {statistics.median(medians):.0f} us | {statistics.median(ratios):.1f} "
        f"| {alone} | {who or 'none'} |"
    )


if __name__ == "__main__":
    sys.exit(main())
