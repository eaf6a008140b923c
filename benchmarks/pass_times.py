"""How much of the processor one pass of the loop takes, beside each neighbour, under the kernel's trace (root, tracefs).

    python -m benchmarks.pass_times [--only NAME,NAME] [--seconds N]

`neptrio_loop_lag_seconds` measures passes by the wall clock, which includes what the loop cannot help: that the processor
is given to others in between, and that it waits for the interpreter's lock. Here both are taken out: a pass lasts from
the end of one wait for sockets to the beginning of the next, without the time in which the thread did not run. What
the kernel does for its network meanwhile, on whichever thread it meets (softirq), is told apart. It often concerns other
processes: a client on the same machine that sends is served there.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks import neighbours, peers
from benchmarks.kernel_trace import SWITCH, events, require, traced
from benchmarks.neighbour_kinds import NEIGHBOURS

EPOLL_WAIT = {"x86_64": 232, "aarch64": 22}  # of the system's calls; on aarch64 it is epoll_pwait
BUFFER = 131_072  # kilobytes per processor
LONG_US = 1000.0


@dataclass
class Pass:
    """Microseconds: of the processor, of the wall clock, and of the kernel's network work in it."""

    cpu: float
    wall: float
    network: float


def passes(text: str, pid: int, wait: int) -> Iterator[Pass]:
    """The passes of thread `pid` in a trace of its system calls, of which `wait` is the wait for sockets."""
    begun = off_since = network_since = None
    off = network = 0.0
    for event in events(text):
        at = event.at
        if event.name == "sched_switch":
            switch = SWITCH.search(event.details)
            if switch is not None and int(switch["prev"]) == pid:
                off_since = at if off_since is None else off_since
            elif switch is not None and int(switch["next"]) == pid and off_since is not None:
                off, off_since = off + at - off_since, None
            continue
        if off_since is not None:  # it runs: not every kernel tells of each switch back
            off, off_since = off + at - off_since, None
        if event.name == "softirq_entry":
            network_since = at
        elif event.name == "softirq_exit" and network_since is not None:
            network, network_since = network + at - network_since, None
        elif event.details.startswith(f"NR {wait} "):
            if event.name == "sys_exit":
                begun, off, network, network_since = at, 0.0, 0.0, None
            elif begun is not None:
                yield Pass(at - begun - off, at - begun, network)
                begun = None


def measure(name: str, server: peers.Server, seconds: float, wait: int) -> str:
    """A row of the table."""
    pid = server.process.pid
    mine = f"common_pid == {pid}"
    wanted = {
        "sched/sched_switch": f"prev_pid == {pid} || next_pid == {pid}",
        **dict.fromkeys(
            ("raw_syscalls/sys_enter", "raw_syscalls/sys_exit", "irq/softirq_entry", "irq/softirq_exit"), mine
        ),
    }
    with neighbours.beside(name, server) as found:
        probing = neighbours.role("probe", "probe", *neighbours.ports_of(server), seconds + 2)
        with subprocess.Popen(probing, stdout=subprocess.DEVNULL):
            time.sleep(1)
            with traced(wanted, BUFFER) as text:
                time.sleep(seconds)
    made = list(passes(text[0], pid, wait))
    times = sorted(each.cpu for each in made) or [0.0]
    own = max((each.cpu - each.network for each in made), default=0.0)
    return (
        f"| {name or 'nobody'} | {found.get('rate', 0):.1f} | {len(made):,} | {sum(times) / seconds / 1e6:.0%} "
        f"| {times[int(0.999 * len(times))] / 1e3:.2f} | {times[-1] / 1e3:.2f} | {own / 1e3:.2f} "
        f"| {sum(each > LONG_US for each in times)} |"
    )


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="neighbours whose name holds one of these texts")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    require()
    wait = EPOLL_WAIT[platform.machine()]
    print(
        "| neighbour | its rate | passes | of a core | p99.9, ms | longest | without the network's | above 1 ms |"
    )
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        (server,) = neighbours.start(["neptrio"], Path(folder))
        try:
            for name in ["", *NEIGHBOURS]:
                if any(text in name for text in options.only.split(",")):
                    print(measure(name, server, options.seconds, wait), flush=True)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
