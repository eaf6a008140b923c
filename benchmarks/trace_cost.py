"""What tracing costs: one server, its settings switched between short runs, ratios of medians.

Machines are noisy, so everything compared runs in turn (A B C A B C ...) against the same process,
and the measure to trust is the server's CPU time per request (all its threads, the trace writer's
too); throughput is shown beside it. The variants:

    off        level OFF
    rate 1000  level TIMESTAMPS, every 1000th request
    rate 1     level TIMESTAMPS, every request

For level OFF against a server without any tracing code there is no second binary to compare with:
`--fresh` adds a second server that was never traced, which shows what is left behind (nothing) and
the noise; and the tests that OFF leaves on a request's path are timed by themselves.

    python -m benchmarks.trace_cost [--rounds 15] [--seconds 0.7] [--forms binary,unary,stream]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
import timeit
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import peers
from benchmarks.requests import Workload, write_bodies
from benchmarks.run import LOADGEN, build_loadgen

CONFIG = """
backend: "identity" max_batch_size: 8
input [ { name: "INPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "INPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "OUTPUT0" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "OUTPUT1" data_type: TYPE_INT32 dims: [ 16 ] } ]
"""
A = np.arange(16, dtype=np.int32).reshape(1, 16)
WORK = Workload("identity", (("INPUT0", A), ("INPUT1", A + 1)), A + 1)
VARIANTS: dict[str, dict[str, Any]] = {
    "off": {"trace_level": ["OFF"]},
    "rate 1000": {"trace_level": ["TIMESTAMPS"], "trace_rate": "1000"},
    "rate 1": {"trace_level": ["TIMESTAMPS"], "trace_rate": "1"},
}


def switch(server: peers.Server, variant: str) -> None:
    """Applies a variant's settings; what was traced before is on disk afterwards."""
    url = f"http://127.0.0.1:{server.http_port}/v2/trace/setting"
    with urllib.request.urlopen(url, json.dumps(VARIANTS[variant]).encode()) as answer:
        answer.read()


def load(
    server: peers.Server, form: str, clients: int, seconds: float, folder: Path, cpu: int | None
) -> dict[str, float]:
    """One run of the generator: requests per second and the server's CPU time per request (us)."""
    options = write_bodies(WORK, form, folder / form)
    http = form in ("binary", "json")
    shape = {"connections": clients if http else 1, "streams": clients if form == "unary" else 1}
    command = [str(LOADGEN), *options, "--port", str(server.http_port if http else server.grpc_port)]
    command += ["--connections", str(shape["connections"]), "--streams", str(shape["streams"])]
    command += [
        "--depth",
        str(clients if form == "stream" else 1),
        "--duration",
        str(seconds),
        "--warmup",
        "0",
    ]
    if cpu is not None:
        command += ["--cpu", str(cpu)]
    before = server.cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{form}: {done.stderr.strip()[:300]} {done.stdout[:300]}")
    found = json.loads(done.stdout)
    return {
        "per_second": found["per_second"],
        "cpu_us": (server.cpu_seconds() - before) * 1e6 / max(1, found["requests"]),
    }


def tests_ns() -> float:
    """Nanoseconds of what level OFF leaves on a request's path: one attribute test in submit()."""

    class Inference:
        tracing = False

    number = 200_000
    with_test = min(timeit.repeat("if s.tracing: pass", globals={"s": Inference()}, number=number, repeat=7))
    without = min(timeit.repeat("pass", number=number, repeat=7))
    return (with_test - without) / number * 1e9


def main() -> int:
    """See the module's text."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.7)
    parser.add_argument("--forms", default="binary,unary,stream")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--fresh", action="store_true", help="also a server that was never traced")
    parser.add_argument("--unpinned", action="store_true", help="let the scheduler place everyone")
    options = parser.parse_args()
    build_loadgen()
    server_cpu, load_cpu = (None, None) if options.unpinned else (0, 1)
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        (folder / "models" / "identity" / "1").mkdir(parents=True)
        (folder / "models" / "identity" / "config.pbtxt").write_text(CONFIG)
        flags = (
            f"--trace-config=triton,file={folder}/trace.json",
            "--trace-config=triton,log-frequency=5000",
        )
        servers = [peers.neptrio(folder / "models", server_cpu, folder / "log", flags=flags)]
        if options.fresh:
            servers.append(peers.neptrio(folder / "models", server_cpu, folder / "log2", "never traced"))
        try:
            for form in options.forms.split(","):
                found: dict[str, list[dict[str, float]]] = {}
                for _ in range(options.rounds + 1):  # the first warms everything up
                    for variant in VARIANTS:
                        switch(servers[0], variant)
                        run = load(servers[0], form, options.clients, options.seconds, folder, load_cpu)
                        found.setdefault(variant, []).append(run)
                    for fresh in servers[1:]:
                        run = load(fresh, form, options.clients, options.seconds, folder, load_cpu)
                        found.setdefault(fresh.name, []).append(run)
                    for file in folder.glob("trace.json.*"):
                        file.unlink(missing_ok=True)
                report(form, options.clients, {name: runs[1:] for name, runs in found.items()})
        finally:
            for server in servers:
                server.stop()
    print(f"the test that level OFF leaves in a request's path: {tests_ns():.0f} ns")
    return 0


def report(form: str, clients: int, found: dict[str, list[dict[str, float]]]) -> None:
    """A line per variant: medians, and the median over the rounds of the ratio to `off`."""
    for name, runs in found.items():
        ratios = {}
        for key in ("per_second", "cpu_us"):
            ratios[key] = statistics.median(
                run[key] / base[key] for run, base in zip(runs, found["off"], strict=True)
            )
        rate = statistics.median(run["per_second"] for run in runs)
        cpu = statistics.median(run["cpu_us"] for run in runs)
        print(
            f"{form} @{clients}  {name:13} {rate:8.0f} req/s ({ratios['per_second']:.3f})  "
            f"{cpu:6.2f} us CPU ({ratios['cpu_us']:.3f})",
            flush=True,
        )


if __name__ == "__main__":
    raise SystemExit(main())
