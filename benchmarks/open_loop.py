"""The open loop: latency at half of the saturation rate, without coordinated omission.

Saturation is measured first, in a closed loop with CONCURRENCY requests in flight. Then requests are
due at fixed times at half that rate and every latency counts from the due time, sent or not: a
server that stalls is charged for all that was due meanwhile (benchmarks/loadgen/loadgen.c).

A tail of milliseconds over a median of 50 us is mostly somebody else's: a neighbour that has the
core for a slice. So each row says how late the generator was by its own fault, how long server and
generator could run and had no core, and what the hypervisor took; and where that is permitted
everything is measured a second time with real-time priority, in bursts short enough that the
kernel does not throttle them. Both servers get the same.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import peers, run

CONCURRENCY = 32
TARGET = 3.0  # p99 / p50, with real-time priority
FORMS = (
    ("HTTP binary", "binary"),
    ("HTTP JSON", "json"),
    ("gRPC unary, one channel", "unary"),
    ("gRPC stream", "stream"),
)
BURST_S = 0.5  # with run.WARMUP less than the 0.95 s of each second that real-time processes get
PAUSE_S = 0.6  # for everybody else, after a burst


def stolen_ms() -> float:
    """What the hypervisor gave to other machines so far, over all cores."""
    with open("/proc/stat") as file:
        return int(file.readline().split()[8]) * 1000 / os.sysconf("SC_CLK_TCK")


@contextmanager
def first(server: peers.Server) -> Iterator[None]:
    """Inside, the server and the processes that we start come before all others. Raises PermissionError."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(15))
    try:
        server.real_time(True)
        yield
    finally:
        server.real_time(False)
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        time.sleep(PAUSE_S)


def _observed(
    case: run.Case, server: peers.Server, folder: Path, seconds: float, cpu: int | None, rate: float
) -> dict[str, Any]:
    waited, preempted = server.held_up()
    stolen = stolen_ms()
    result = run.load(case, server, folder, seconds, cpu, rate=rate)
    after = server.held_up()
    return {
        **result,
        "server_waited_ms": max(0.0, after[0] - waited),  # threads that have ended take theirs along
        "server_preempted": max(0, after[1] - preempted),
        "stolen_ms": stolen_ms() - stolen,
    }


def measure(
    servers: list[peers.Server], folder: Path, cpu: int | None, rounds: int, seconds: float = 2.0
) -> tuple[Any, str]:
    """Every form on every server: (results, Markdown). The round with the median ratio counts."""
    results = {"shared": _measure(servers, folder, cpu, rounds, seconds)}
    text = "With ordinary priority, beside whatever else the machine does:\n\n" + _markdown(results["shared"])
    try:
        with first(servers[0]):
            pass
    except (PermissionError, IndexError, AttributeError):
        return results, text
    results["first"] = _measure(servers, folder, cpu, rounds, BURST_S, real_time=True)
    text += f"\nWith real-time priority, in bursts of {BURST_S} s:\n\n" + _markdown(
        results["first"], judged=True
    )
    return results, text


def _measure(
    servers: list[peers.Server],
    folder: Path,
    cpu: int | None,
    rounds: int,
    seconds: float,
    real_time: bool = False,
) -> dict[str, Any]:
    results: dict[str, Any] = {}

    @contextmanager
    def priority(server: peers.Server) -> Iterator[None]:
        if not real_time:
            yield
            return
        with first(server):
            yield

    for title, form in FORMS:
        case = run.Case(title, form, "simple", CONCURRENCY)
        row = results.setdefault(title, {})
        for server in servers:
            try:
                with priority(server):
                    full = run.load(case, server, folder, BURST_S if real_time else 1.0, cpu)["per_second"]
                row[server.name] = {"saturation": full, "rounds": []}
            except RuntimeError as error:
                print(f"  failed: {error}", flush=True)
        for _ in range(rounds):
            for server in servers:
                if server.name not in row:
                    continue
                try:
                    half = row[server.name]["saturation"] / 2
                    with priority(server):
                        row[server.name]["rounds"].append(_observed(case, server, folder, seconds, cpu, half))
                except RuntimeError as error:
                    print(f"  failed: {error}", flush=True)
    return results


def _markdown(results: dict[str, Any], judged: bool = False) -> str:
    lines = [
        "| case | server | saturation | rate | p50 | p99 | p99 / p50 | target "
        "| generator late, p99 | without a core: server, generator | stolen |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for title, row in results.items():
        for name, entry in row.items():
            rounds = sorted(entry["rounds"], key=lambda r: r["p99_us"] / r["p50_us"])
            if not rounds:
                continue
            middle = rounds[len(rounds) // 2]
            value = middle["p99_us"] / middle["p50_us"]
            target = ("< 3" if value < TARGET else "< 3 **missed**") if judged and name == "neptrio" else ""
            lines.append(
                f"| {title} | {name} | {entry['saturation']:,.0f} | {entry['saturation'] / 2:,.0f} "
                f"| {middle['p50_us']:.0f} us | {middle['p99_us']:.0f} us | {value:.1f} | {target} "
                f"| {middle['late_p99_us']:.0f} us | {middle['server_waited_ms']:.0f} ms, "
                f"{middle['generator_waited_ms']:.0f} ms | {middle['stolen_ms']:.0f} ms |"
            )
    return "\n".join(lines) + "\n"
