"""`make bench`: this server and its peers, side by side in one run.

Servers are pinned to one core and the generator to the other; every case visits the servers in
turn (A B C A B C ...) and the median of the rounds counts. Ratios are to tritonserver's Python
backend in the same run. Every answer is checked for content.

The parts (--parts): `table` is the closed loop; `open` (benchmarks.open_loop) the open loop; `onnx`
(benchmarks.onnx_cost) an ONNX model beside its bare session; `scale` (benchmarks.scale) instances,
connections and idle connections; `startup` time to ready and idle memory; `python`
(benchmarks.python_models) Python models on one core and on two. Each writes
benchmarks/results/PART.json and PART.md; `python -m benchmarks.report` puts them into the README.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import resource
import shutil
import signal
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
PYTHON_PEERS = ("mlserver", "kserve")
PYTHON_PEERS_TARGET = 10  # how many times their rate ours should be, wherever they take part
PARTS = ("table", "open", "onnx", "scale", "startup", "python", "frontends")
WARMUP = 0.3


@dataclass(frozen=True)
class Case:
    """One row of the table. `target` is a ratio to tritonserver's Python backend."""

    title: str
    form: str  # json, binary, unary, stream, sequence
    model: str
    concurrency: int
    target: float | None = None
    python_target: float | None = None  # the same for a Python model
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
        few, busy = c in (8, 32), c == 32
        unbatched = 3 if busy else None
        cases += [
            Case("HTTP binary", "binary", "simple", c, 6 if few else None, unbatched),
            Case("HTTP JSON", "json", "simple", c, 5 if few else None, unbatched),
            Case("gRPC unary, one channel", "unary", "simple", c, 8.5 if busy else None, unbatched),
            Case(
                "gRPC unary, a channel per client",
                "unary",
                "simple",
                c,
                5 if busy else None,
                unbatched,
                channels=True,
            ),
            Case("gRPC stream", "stream", "simple", c, 9 if busy else None, unbatched),
            Case("sequences over a stream, oldest", "sequence", "sequence", c, 2.5 if busy else None),
            Case(
                "dynamic batching, gRPC",
                "unary",
                "simple_batched",
                c,
                3 if busy else None,
                2.5 if busy else None,
            ),
        ]
    cases += [
        Case("median latency, HTTP binary", "binary", "simple", 1, 0.45, latency=True),
        Case("median latency, gRPC", "unary", "simple", 1, 0.45, latency=True),
    ]
    cases += [
        Case("median latency of a Python model, HTTP binary", "binary", "simple", 1, None, 0.8, latency=True),
        Case("a call to another Python model, HTTP binary", "binary", "bls", 32, None, 2),
    ]
    for label, elements in (("64 KiB", 1 << 14), ("1 MiB", 1 << 18), ("16 MiB", 1 << 22)):
        big = elements > 1 << 14
        cases += [
            Case(f"{label} tensor, gRPC", "unary", "large", 1, *(2 if big else None,) * 2, elements=elements),
            Case(
                f"{label} tensor, HTTP binary",
                "binary",
                "large",
                1,
                3 if big else None,
                2 if big else None,
                elements=elements,
            ),
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


@functools.cache
def _bodies(case: Case, folder: Path) -> tuple[str, ...]:
    return tuple(write_bodies(workload(case), case.form, folder / case.form / str(case.elements)))


def command(
    case: Case, server: peers.Server, folder: Path, seconds: float, cpu: int | None, rate: float = 0
) -> list[str]:
    """The generator's command line for one run."""
    options = list(_bodies(case, folder))
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
    made = [str(LOADGEN), *options, "--port", str(port), *shape]
    made += ["--duration", str(seconds), "--warmup", str(WARMUP)]
    if cpu is not None:
        made += ["--cpu", str(cpu)]
    if rate:
        made += ["--rate", str(rate)]
    return made


def load(
    case: Case, server: peers.Server, folder: Path, seconds: float, cpu: int | None, rate: float = 0
) -> dict[str, Any]:
    """One run of the generator; raises when an answer was wrong."""
    options = command(case, server, folder, seconds, cpu, rate)
    before = server.cpu_seconds()
    done = subprocess.run(options, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise RuntimeError(f"{server.name}, {case.key}: {done.stderr.strip()[:300]} {done.stdout[:300]}")
    result: dict[str, Any] = json.loads(done.stdout)
    result["server_cpu_us"] = (server.cpu_seconds() - before) * 1e6 / max(1, result["requests"])
    return result


def serves(server: peers.Server, case: Case) -> bool:
    """Whether the server speaks the case's form and has its model."""
    if case.model == "bls" and server.name not in ("neptrio-python", BASE):
        return False
    return case.form in server.forms and (server.name not in PYTHON_PEERS or case.model == "simple")


def measure(
    servers: list[peers.Server], cases: list[Case], rounds: int, seconds: float, cpu: int | None, folder: Path
) -> dict[str, Any]:
    """rounds x cases x servers, interleaved. Returns {case key: {server: [results]}}.

    Cases without a target, PYTHON_PEERS_TARGET included, only draw the curves: they are visited once. A
    server that ends under load is said to have ended and is left out from there on.
    """
    found: dict[str, Any] = {}
    alive = list(servers)
    for i in range(rounds):
        for case in cases:
            takes = [server for server in alive if serves(server, case)]
            has_target = (
                case.target or case.python_target or any(server.name in PYTHON_PEERS for server in takes)
            )
            if i and not has_target:
                continue
            row = found.setdefault(case.key, {})
            for server in takes:
                try:
                    row.setdefault(server.name, []).append(load(case, server, folder, seconds, cpu))
                except RuntimeError as error:
                    print(f"  failed: {error}", flush=True)
                if server.process.poll() is not None:
                    print(f"  {server.name} ended with {server.process.returncode}", flush=True)
                    alive.remove(server)
            print(
                f"round {i + 1}: {case.key}: "
                + "  ".join(f"{name} {runs[-1]['per_second']:.0f}/s" for name, runs in row.items() if runs),
                flush=True,
            )
    return found


def median(runs: list[dict[str, Any]], key: str) -> float:
    """The middle of the rounds."""
    return statistics.median(run[key] for run in runs)


def ratio(row: dict[str, Any], name: str, base: str, case: Case) -> float | None:
    """How many times faster `name` was than `base` (latency: the share of its median latency)."""
    if not row.get(name) or not row.get(base):
        return None
    key = "p50_us" if case.latency else "per_second"
    return median(row[name], key) / median(row[base], key)


def verdict(value: float | None, target: float | None, latency: bool = False) -> str:
    """A target and whether it was met, for a table's cell."""
    if target is None:
        return ""
    met = value is not None and (value <= target if latency else value >= target)
    return f"{'<=' if latency else '>='} {target:g}" + ("" if met else " **missed**")


def shown(runs: list[dict[str, Any]] | None, case: Case) -> str:
    """A server's figure for a table's cell."""
    if not runs:
        return ""
    if case.latency:
        return f"{median(runs, 'p50_us'):.0f} us"
    return f"{median(runs, 'per_second'):,.0f}"


def markdown(
    cases: list[Case],
    found: dict[str, Any],
    names: list[str],
    ours: str = "neptrio",
    base: str = BASE,
    target: Any = lambda case: case.target,
) -> str:
    """Results as a table: requests per second (or median latency), ratio of `ours` to `base`, target."""
    lines = ["| case | concurrency | " + " | ".join(names) + " | ratio | target |"]
    lines.append("|---|---|" + "---|" * (len(names) + 2))
    for case in cases:
        row = found.get(case.key, {})
        value = ratio(row, ours, base, case)
        cells = [case.title, str(case.concurrency), *(shown(row.get(name), case) for name in names)]
        cells += ["" if value is None else f"{value:.2f}", verdict(value, target(case), case.latency)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def tables(cases: list[Case], found: dict[str, Any], names: list[str]) -> str:
    """The closed loop as Markdown: built-in models, Python models, and the Python peers."""
    text = ""
    if {"neptrio", BASE} <= set(names):
        text += f"### Kernel and built-in models beside {BASE}'s Python backend\n\n"
        own = [case for case in cases if case.target or not case.python_target or not case.latency]
        text += markdown([case for case in own if case.model != "bls"], found, ["neptrio", BASE])
    if {"neptrio-python", BASE} <= set(names):
        text += "\n### The same model.py in both servers\n\n"
        own = [case for case in cases if case.python_target or (not case.latency and case.elements == 16)]
        text += markdown(
            own, found, ["neptrio-python", BASE], "neptrio-python", target=lambda case: case.python_target
        )
    for peer in PYTHON_PEERS:
        if not {"neptrio", peer} <= set(names):
            continue
        text += f"\n### {peer}\n\n"
        own = [case for case in cases if found.get(case.key, {}).get(peer) and not case.latency]
        text += markdown(own, found, ["neptrio", peer], base=peer, target=lambda case: PYTHON_PEERS_TARGET)
    return text


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
    folder = ROOT / "benchmarks" / "loadgen"
    newest = max(file.stat().st_mtime for file in folder.glob("*.[ch]"))
    if not LOADGEN.exists() or LOADGEN.stat().st_mtime < newest:
        sources = [str(file) for file in sorted(folder.glob("*.c"))]
        subprocess.run(["cc", "-O2", "-o", str(LOADGEN), *sources, "-lnghttp2"], check=True)


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


def write(part: str, data: Any, text: str, suffix: str = "", quietly: bool = False) -> None:
    """Stores a part's results with the machine's facts, and prints them unless `quietly`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    content = {"machine": machine(), "part": part, "results": data, "text": text}
    (RESULTS / f"{part}{suffix}.json").write_text(json.dumps(content, indent=1))
    (RESULTS / f"{part}{suffix}.md").write_text(text)
    if not quietly:
        print(f"\n{text}", flush=True)


def raise_file_limit() -> None:
    """Servers inherit it: thousands of connections are opened."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def example_repository(folder: Path) -> Path:
    """The example repository without its ONNX models and what is built on them."""
    for model in sorted((ROOT / "examples" / "model_repository").iterdir()):
        config = model / "config.pbtxt"
        if model.name.startswith("file_type") or (config.exists() and "onnxruntime" in config.read_text()):
            continue
        shutil.copytree(model, folder / model.name, dirs_exist_ok=True)
    return folder


def startup(tmp: Path, cpu: int | None, others: list[peers.Server], rounds: int) -> tuple[Any, str]:
    """Start to ready and idle memory: ours with the example repository, the peers' with the benchmark's."""
    repository = example_repository(tmp / "examples")
    mine = []
    for i in range(rounds):
        server = peers.neptrio(repository, cpu, tmp / f"startup{i}.log")
        server.settle()
        mine.append((server.ready_s, server.ready_cpu_s, server.rss_bytes() / 1e6))
        server.stop()
    rows = {
        "neptrio, example repository": tuple(statistics.median(column) for column in zip(*mine, strict=True))
    }
    rows |= {f"{s.name}, benchmark's models": (s.ready_s, s.ready_cpu_s, s.idle_rss / 1e6) for s in others}
    lines = ["| server | start to ready | CPU time of it | idle memory | target |", "|---|---|---|---|---|"]
    for i, (name, (ready, used, rss)) in enumerate(rows.items()):
        target = "" if i else "< 1.5 s, < 90 MB" + ("" if ready < 1.5 and rss < 90 else " **missed**")
        lines.append(f"| {name} | {ready:.2f} s | {used:.2f} s | {rss:.0f} MB | {target} |")
    return rows, "\n".join(lines) + "\n"


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--servers", default="neptrio,neptrio-python,tritonserver,mlserver,kserve")
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, of: " + ", ".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--only", default="", help="cases of the table and of Python models that contain this text"
    )
    parser.add_argument("--unpinned", action="store_true", help="let the scheduler place everyone")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    from benchmarks import frontends, onnx_cost, open_loop, python_models, scale

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers are stopped on the way out
    build_loadgen()
    raise_file_limit()
    cases = [case for case in table() if options.only in case.key]
    server_cpu, load_cpu = (None, None) if options.unpinned else (0, 1)
    suffix = "-unpinned" if options.unpinned else ""
    begin = time.monotonic()

    def passed(part: str) -> None:
        print(f"[{part} done after {time.monotonic() - begin:.0f} s]", flush=True)

    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)
        servers: list[peers.Server] = []
        try:
            if {"table", "open", "startup"} & set(parts):
                servers = start(options.servers.split(","), tmp, server_cpu)
            for server in servers:
                server.settle()
                server.idle_rss = server.rss_bytes()
            if "table" in parts:
                found = measure(servers, cases, options.rounds, options.seconds, load_cpu, tmp)
                names = [s.name for s in servers]
                write("table", found, tables(cases, found, names), suffix)
                plots.draw(cases, found, names, RESULTS / f"plots{suffix}")
                passed("table")
            if "open" in parts:
                both = [s for s in servers if s.name in ("neptrio", BASE) and s.process.poll() is None]
                for server in servers:
                    if server not in both:  # its timers would be in the tail: they want the core too
                        server.stop()
                write("open", *open_loop.measure(both, tmp, load_cpu, options.rounds), suffix)
                passed("open")
        finally:
            for server in servers:
                server.stop()
        for part, measured in (
            ("startup", lambda: startup(tmp, server_cpu, servers, options.rounds)),
            ("onnx", lambda: onnx_cost.measure(tmp, server_cpu, load_cpu, options.rounds)),
            ("scale", lambda: scale.measure(tmp, server_cpu, load_cpu)),
            ("python", lambda: python_models.measure(tmp, options.rounds, options.seconds, options.only)),
            ("frontends", lambda: frontends.measure(tmp, options.rounds, options.seconds, options.only)),
        ):
            if part in parts:
                write(part, *measured(), suffix)
                passed(part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
