"""`make bench-perf-analyzer`: perf_analyzer's figures beside our own generator's, for both servers.

perf_analyzer is what Triton's users measure with. It runs against this server as it does against Triton's, without a
special flag (shared memory is switched on, which it is not by itself). Per case both generators visit
both servers in turns, CLIENTS requests at a time, and the median of the rounds counts. The servers have one core and
the generators the other, as in `make bench`; where perf_analyzer cannot keep a server busy, its figure is its own.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import models, peers, run
from tools import perf_analyzer

CLIENTS = 8  # with more, its threads on one core keep its own clock from being read
SHARED_MEMORY = ("--allow-client-shm=true",)
TRIES = 5  # windows that it takes until three of them agree
PATIENCE = 120  # seconds of one run


@dataclass(frozen=True)
class Case:
    """One way to send, and our generator's counterpart (None: it has none)."""

    title: str
    arguments: tuple[str, ...]
    own: run.Case | None


CASES = (
    Case("HTTP binary", ("-i", "http"), run.Case("HTTP binary", "binary", "simple", CLIENTS)),
    Case("gRPC unary", ("-i", "grpc"), run.Case("gRPC unary", "unary", "simple", CLIENTS, channels=True)),
    Case("gRPC unary, async", ("-i", "grpc", "--async"), run.Case("gRPC", "unary", "simple", CLIENTS)),
    Case("gRPC stream", ("-i", "grpc", "--streaming"), run.Case("gRPC stream", "stream", "simple", CLIENTS)),
    Case("HTTP, system shared memory", ("-i", "http", "--shared-memory", "system"), None),
    Case("gRPC, system shared memory", ("-i", "grpc", "--shared-memory", "system"), None),
    Case(
        "sequences over a stream",
        ("-i", "grpc", "--streaming", "--sequence-length", "10"),
        run.Case("sequences", "sequence", "sequence", CLIENTS),
    ),
)


def measured(
    server: peers.Server, case: Case, cpu: int | None, seconds: float, folder: Path
) -> dict[str, float]:
    """One run of perf_analyzer: requests per second, p50 and p99 in microseconds. Raises RuntimeError."""
    table = folder / "perf_analyzer.csv"
    table.unlink(missing_ok=True)
    port = server.http_port if "http" in case.arguments else server.grpc_port
    model = "sequence" if "--sequence-length" in case.arguments else "simple"
    command = ["taskset", "-c", str(cpu)] if cpu is not None else []
    command += [
        str(perf_analyzer.fetch()), "-m", model, "-u", f"127.0.0.1:{port}", *case.arguments,
        "--concurrency-range", str(CLIENTS), "-p", str(int(seconds * 1000)), "-s", "50",
        "--max-trials", str(TRIES), "-f", str(table),
    ]  # fmt: skip
    said = ""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=perf_analyzer.environment(), timeout=PATIENCE
        )
        said = done.stderr or done.stdout
    except subprocess.TimeoutExpired:
        said = f"no result after {PATIENCE} s"
    if not table.exists():
        raise RuntimeError(f"perf_analyzer, {server.name}, {case.title}: {said[-300:]}")
    with table.open() as file:
        row = next(csv.DictReader(file))
    return {
        "per_second": float(row["Inferences/Second"]),
        "p50_us": float(row["p50 latency"]),
        "p99_us": float(row["p99 latency"]),
    }


def measure(
    servers: list[peers.Server], cpu: int | None, rounds: int, seconds: float, folder: Path
) -> dict[str, Any]:
    """{case: {server: {"perf_analyzer" or "own": [results]}}}."""
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for case in CASES:
            for server in servers:
                row = found.setdefault(case.title, {}).setdefault(server.name, {})
                try:
                    row.setdefault("perf_analyzer", []).append(measured(server, case, cpu, seconds, folder))
                    if case.own is not None:
                        row.setdefault("own", []).append(run.load(case.own, server, folder, seconds, cpu))
                except RuntimeError as error:
                    print(f"  failed: {error}", flush=True)
            print(f"{case.title}: {found[case.title]}"[:200], flush=True)
    return found


def _cell(runs: list[dict[str, float]] | None) -> str:
    if not runs:
        return ""
    rate, p50, p99 = (statistics.median(r[key] for r in runs) for key in ("per_second", "p50_us", "p99_us"))
    return f"{rate:,.0f}/s, {p50:,.0f} / {p99:,.0f} us"


def markdown(found: dict[str, Any], names: list[str]) -> str:
    """The table of docs/performance.md."""
    heads = [f"{name}, {who}" for name in names for who in ("perf_analyzer", "our generator")]
    lines = [f"| {CLIENTS} at a time | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for title, row in found.items():
        cells = [_cell(row.get(name, {}).get(who)) for name in names for who in ("perf_analyzer", "own")]
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def start(names: list[str], folder: Path) -> list[peers.Server]:
    """The servers, with shared memory."""
    models.native_repository(folder / "native")
    models.python_repository(folder / "python")
    made = []
    for name in names:
        log = folder / f"{name}.log"
        try:
            if name == "neptrio":
                made.append(peers.neptrio(folder / "native", 0, log, flags=SHARED_MEMORY))
            elif name == "neptrio-python":
                made.append(peers.neptrio(folder / "python", 0, log, name, SHARED_MEMORY))
            else:
                made.append(peers.tritonserver(folder / "python", 0, log))
        except (RuntimeError, OSError) as error:
            print(f"{name} is left out: {error}", flush=True)
    return made


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default="neptrio,neptrio-python,tritonserver")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each window")
    options = parser.parse_args()
    try:
        perf_analyzer.fetch()
    except perf_analyzer.Missing as error:
        sys.exit(f"perf_analyzer cannot be had here: {error}")
    run.build_loadgen()
    run.raise_file_limit()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        servers = start(options.servers.split(","), folder)
        try:
            found = measure(servers, 1, options.rounds, options.seconds, folder)
            names = [server.name for server in servers]
        finally:
            for server in servers:
                server.stop()
    run.write("perf_analyzer", found, markdown(found, names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
