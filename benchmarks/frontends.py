"""Front ends: one server with 0, 1, 2 and more of them, beside tritonserver on the same cores.

Where there are more than two cores, the last quarter of them, eight at most, runs a generator each, and the servers have
the others; more front ends than half of those are not measured. On two cores everybody shares both, the one generator
included: there the question is what front ends cost, not what they bring. All servers run at once, and only one is asked
at a time; each case visits them in turn, round after round, and medians count.

`make bench-frontends` writes benchmarks/results/frontends.*; `--only` narrows it by title.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import models, peers, run

FRONT_ENDS = (0, 1, 2, 4, 6)
CLIENTS = 32  # connections of each generator
LARGE_CLIENTS = 4
MIB = 1 << 18  # elements
FORMS = (("HTTP binary", "binary"), ("HTTP JSON", "json"), ("gRPC", "unary"))
CASES = (
    *(run.Case(f"one client's p50, {title}", form, "simple", 1, latency=True) for title, form in FORMS),
    *(run.Case(f"small tensors, {title}", form, "simple", CLIENTS, channels=True) for title, form in FORMS),
    *(
        run.Case(f"1 MiB in and out, {title}", form, "large", LARGE_CLIENTS, elements=MIB, channels=True)
        for title, form in FORMS
        if form != "json"
    ),
)
Runs = dict[str, dict[str, list[float]]]  # case -> server -> p50 in us, requests or bytes per second


def shares(cores: list[int]) -> tuple[list[int], list[int | None]]:
    """The servers' cores, and the core of each generator (None: wherever there is room)."""
    if len(cores) <= 2:
        return cores, [None]
    generators = max(1, min(8, len(cores) // 4))
    return cores[:-generators], list(cores[-generators:])


@contextmanager
def only_on(cores: list[int]) -> Iterator[None]:
    """What is started meanwhile runs on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def load(
    case: run.Case, server: peers.Server, folder: Path, seconds: float, generators: list[int | None]
) -> float:
    """One visit by all generators. Raises RuntimeError when an answer was wrong."""
    if case.latency:
        generators = generators[:1]
    commands = [run.command(case, server, folder, seconds, cpu) for cpu in generators]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    found = []
    for process in running:
        out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(f"{server.name}, {case.key}: {error.strip()[:300]} {out[:300]}")
        found.append(json.loads(out))
    if case.latency:
        return float(found[0]["p50_us"])
    rate = sum(float(row["per_second"]) for row in found)
    return rate * 2 * 4 * case.elements if case.model == "large" else rate


def measure(tmp: Path, rounds: int, seconds: float, only: str = "") -> tuple[Any, str]:
    """All of it: (results, Markdown)."""
    own, generators = shares(sorted(os.sched_getaffinity(0)))
    native, python = tmp / "frontends-native", tmp / "frontends-python"
    models.native_repository(native)
    models.python_repository(python)
    counts = [n for n in FRONT_ENDS if n <= max(2, len(own) // 2)]
    servers = []
    found: Runs = {}
    try:
        with only_on(own):
            for n in counts:
                log = tmp / f"frontends-{n}.log"
                servers.append(peers.neptrio(native, None, log, f"N = {n}", (f"--frontends={n}",)))
            try:
                servers.append(peers.tritonserver(python, None, tmp / "frontends-triton.log"))
            except (RuntimeError, OSError, StopIteration) as error:
                print(f"tritonserver is left out: {error}", flush=True)
        for _ in range(rounds):
            for case in CASES:
                if only not in case.title:
                    continue
                row = found.setdefault(case.title, {})
                for server in servers:
                    server.settle(2)
                    try:
                        row.setdefault(server.name, []).append(load(case, server, tmp, seconds, generators))
                    except RuntimeError as error:
                        print(f"  failed: {error}", flush=True)
                print(f"{case.title}: {json.dumps(row)}", flush=True)
    finally:
        for server in servers:
            server.stop()
    return found, _markdown(found, [server.name for server in servers], len(own), len(generators))


def _markdown(found: Runs, names: list[str], cores: int, generators: int) -> str:
    lines = [
        f"Servers on {cores} cores, {generators} generator{'s' if generators > 1 else ''}:",
        "",
        f"| case | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
    ]
    for title, row in found.items():
        cells = [shown(title, statistics.median(row[name])) if row.get(name) else "" for name in names]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(title: str, value: float) -> str:
    """A cell of the table."""
    if "p50" in title:
        return f"{value:.0f} us"
    return f"{value / 1e9:.2f} GB/s" if "MiB" in title else f"{value:,.0f}/s"
