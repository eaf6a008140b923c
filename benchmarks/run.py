"""`make bench`: this server and its peers, side by side in one run.

Servers are pinned to one core and the generator to the other; every case visits the servers in
turn (A B C A B C ...) and the median of the rounds counts. Ratios are to tritonserver's Python
backend in the same run. Every answer is checked for content.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import models, peers, plots
from benchmarks.requests import Workload, write_bodies

ROOT = Path(__file__).resolve().parent.parent
LOADGEN = ROOT / "build" / "loadgen"
RESULTS = ROOT / "benchmarks" / "results"
BASE = "tritonserver"


@dataclass(frozen=True)
class Case:
    """One row of the table. `target` is a ratio to tritonserver's Python backend."""

    title: str
    form: str  # json, binary, unary, stream, sequence
    model: str
    concurrency: int
    target: float | None = None
    latency: bool = False  # the ratio is of median latencies (lower is better), not of throughput
    elements: int = 16
    channels: bool = False  # a connection per client instead of one for all

    @property
    def key(self) -> str:
        return f"{self.title} @{self.concurrency}"


def table() -> list[Case]:
    """Every case, targets as issued."""
    cases = []
    for c in (1, 8, 32, 128):
        want = c in (8, 32)
        cases += [
            Case("HTTP binary", "binary", "simple", c, 6 if want else None),
            Case("HTTP JSON", "json", "simple", c, 5 if want else None),
            Case("gRPC unary, one channel", "unary", "simple", c, 8.5 if c == 32 else None),
            Case(
                "gRPC unary, a channel per client",
                "unary",
                "simple",
                c,
                5 if c == 32 else None,
                channels=True,
            ),
            Case("gRPC stream", "stream", "simple", c, 9 if c == 32 else None),
            Case("sequences over a stream, oldest", "sequence", "sequence", c, 2.5 if c == 32 else None),
            Case("dynamic batching, gRPC", "unary", "simple_batched", c, 3 if c == 32 else None),
        ]
    cases += [
        Case("median latency, HTTP binary", "binary", "simple", 1, 0.45, latency=True),
        Case("median latency, gRPC", "unary", "simple", 1, 0.45, latency=True),
    ]
    for label, elements in (("64 KiB", 1 << 14), ("1 MiB", 1 << 18), ("16 MiB", 1 << 22)):
        big = elements > 1 << 14
        cases += [
            Case(f"{label} tensor, gRPC", "unary", "large", 1, 2 if big else None, elements=elements),
            Case(f"{label} tensor, HTTP binary", "binary", "large", 1, 3 if big else None, elements=elements),
        ]
    cases.append(Case("1 MiB tensor, JSON", "json", "large", 1, 5, elements=1 << 18))
    return cases


def workload(case: Case) -> Workload:
    """The tensors of a case and the answer to expect."""
    if case.model == "large":
        a = (np.arange(case.elements, dtype=np.int32) * 7) % 1000003
        return Workload("large", (("INPUT0", a),), a)
    if case.model == "sequence":
        a = np.array([[123456789]], dtype=np.int32)
        return Workload("sequence", (("INPUT", a),), np.zeros(0, dtype=np.int32))
    a = np.arange(16, dtype=np.int32).reshape(1, 16)
    b = np.full((1, 16), 1000, dtype=np.int32)
    return Workload(case.model, (("INPUT0", a), ("INPUT1", b)), a + b)


def load(
    case: Case, server: peers.Server, folder: Path, seconds: float, cpu: int | None, rate: float = 0
) -> dict[str, Any]:
    """One run of the generator; raises when an answer was wrong."""
    options = write_bodies(workload(case), case.form, folder / case.form / str(case.elements))
    http = case.form in ("json", "binary")
    port = server.http_port if http else server.grpc_port
    shape = ["--connections", "1", "--streams", "1", "--depth", "1"]
    n = str(case.concurrency)
    if http or case.channels:
        shape[1] = n
    elif case.form == "unary":
        shape[3] = n
    elif case.form == "sequence":
        shape[3] = n  # a stream per client: a sequence waits for its own answers only
        options += ["--sequence-length", "10", "--first-sequence", str(time.time_ns() >> 12 & 0xFFFFFFFFFF)]
    else:
        shape[5] = n
    command = [str(LOADGEN), *options, "--port", str(port), *shape, "--duration", str(seconds)]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    if rate:
        command += ["--rate", str(rate)]
    before = server.cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{server.name}, {case.key}: {done.stderr.strip()[:300]} {done.stdout[:300]}")
    result: dict[str, Any] = json.loads(done.stdout)
    result["server_cpu_us"] = (server.cpu_seconds() - before) * 1e6 / max(1, result["requests"])
    return result


def measure(
    servers: list[peers.Server], cases: list[Case], rounds: int, seconds: float, cpu: int | None
) -> dict[str, Any]:
    """rounds x cases x servers, interleaved. Returns {case key: {server: [results]}}."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as tmp:
        for i in range(rounds):
            for case in cases:
                row = found.setdefault(case.key, {})
                for server in servers:
                    if case.form not in server.forms or (
                        server.name in ("mlserver", "kserve") and case.model != "simple"
                    ):
                        continue
                    try:
                        row.setdefault(server.name, []).append(load(case, server, Path(tmp), seconds, cpu))
                    except RuntimeError as error:
                        print(f"  failed: {error}", flush=True)
                print(
                    f"round {i + 1}: {case.key}: "
                    + "  ".join(
                        f"{name} {runs[-1]['per_second']:.0f}/s" for name, runs in row.items() if runs
                    ),
                    flush=True,
                )
    return found


def median(runs: list[dict[str, Any]], key: str) -> float:
    """The middle of the rounds."""
    return statistics.median(run[key] for run in runs)


def markdown(cases: list[Case], found: dict[str, Any], names: list[str]) -> str:
    """The results as a table: requests per second, ratio to tritonserver's Python backend, target."""
    lines = ["| case | concurrency | " + " | ".join(names) + " | ratio | target |"]
    lines.append("|---|---|" + "---|" * (len(names) + 2))
    for case in cases:
        row = found.get(case.key, {})
        cells = []
        for name in names:
            runs = row.get(name)
            if not runs:
                cells.append("")
            elif case.latency:
                cells.append(f"{median(runs, 'p50_us'):.0f} us")
            else:
                cells.append(f"{median(runs, 'per_second'):,.0f}")
        ratio = ""
        if row.get("neptrio") and row.get(BASE):
            key = "p50_us" if case.latency else "per_second"
            ratio = f"{median(row['neptrio'], key) / median(row[BASE], key):.2f}"
        target = "" if case.target is None else f"{'<=' if case.latency else '>='} {case.target:g}"
        lines.append(
            f"| {case.title} | {case.concurrency} | " + " | ".join(cells) + f" | {ratio} | {target} |"
        )
    return "\n".join(lines) + "\n"


def machine() -> dict[str, Any]:
    """Facts about the machine that belong to every result."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": os.getloadavg()[0],
    }


def build_loadgen() -> None:
    """Compiles the generator."""
    LOADGEN.parent.mkdir(exist_ok=True)
    source = ROOT / "benchmarks" / "loadgen" / "loadgen.c"
    if not LOADGEN.exists() or LOADGEN.stat().st_mtime < source.stat().st_mtime:
        subprocess.run(["cc", "-O2", "-o", str(LOADGEN), str(source), "-lnghttp2"], check=True)


def start(names: list[str], tmp: Path, cpu: int | None) -> list[peers.Server]:
    """Starts the servers asked for; a peer that is not installed is left out with a word."""
    native, python = tmp / "native", tmp / "python"
    models.native_repository(native)
    models.python_repository(python)
    made = []
    for name in names:
        log = tmp / f"{name}.log"
        try:
            if name == "neptrio":
                made.append(peers.neptrio(native, cpu, log))
            elif name == "neptrio-python":
                made.append(peers.neptrio(python, cpu, log, name="neptrio-python"))
            else:
                made.append(getattr(peers, name)(python if name == BASE else tmp / name, cpu, log))
        except (RuntimeError, OSError, StopIteration) as error:
            print(f"{name} is left out: {error}", flush=True)
    return made


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default="neptrio,neptrio-python,tritonserver,mlserver,kserve")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", default="", help="cases whose key contains this text")
    parser.add_argument("--unpinned", action="store_true", help="let the scheduler place everyone")
    options = parser.parse_args()
    build_loadgen()
    cases = [case for case in table() if options.only in case.key]
    server_cpu, load_cpu = (None, None) if options.unpinned else (0, 1)
    with tempfile.TemporaryDirectory() as tmp:
        servers = start(options.servers.split(","), Path(tmp), server_cpu)
        try:
            idle = {
                s.name: {"ready_s": round(s.ready_s, 3), "idle_rss_mb": round(s.rss_bytes() / 1e6, 1)}
                for s in servers
            }
            found = measure(servers, cases, options.rounds, options.seconds, load_cpu)
        finally:
            for server in servers:
                server.stop()
    names = [s.name for s in servers]
    RESULTS.mkdir(parents=True, exist_ok=True)
    facts = machine()
    (RESULTS / "bench.json").write_text(
        json.dumps({"machine": facts, "idle": idle, "results": found}, indent=1)
    )
    text = markdown(cases, found, names)
    (RESULTS / "bench.md").write_text(f"{facts}\n\n{text}")
    plots.draw(cases, found, names, RESULTS)
    print(text)
    print(
        "\n".join(
            f"{name}: ready in {f['ready_s']} s, idle {f['idle_rss_mb']} MB" for name, f in idle.items()
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
