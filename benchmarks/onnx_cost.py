"""An ONNX model beside the kernel model of the same tensors, less the session's own run time.

    expected = 1 / (1 / throughput of the kernel model + time of one session.run)

Both servers and the bare session (a process of its own) have the same core in the same rounds; what
the server adds to the session may cost at most a tenth of the throughput that is left. Beside that
stands the same share by CPU time per request, which a busy neighbour disturbs less:

    (CPU time of a request of the kernel model + of one session.run) / of a request of the ONNX model
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import models, peers, run

TARGET = 0.9
FORMS = (("HTTP binary", "binary"), ("HTTP JSON", "json"), ("gRPC unary, one channel", "unary"))
BARE = """
import sys, time
import numpy as np
import onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
feeds = {name: np.arange(16, dtype=np.int32).reshape(1, 16) for name in ("INPUT0", "INPUT1")}
names = ["OUTPUT0", "OUTPUT1"]
for _ in range(500):
    session.run(names, feeds)
begin, cpu, count = time.perf_counter(), time.process_time(), 0
while time.perf_counter() - begin < 1:
    for _ in range(100):
        session.run(names, feeds)
    count += 100
print((time.perf_counter() - begin) / count, (time.process_time() - cpu) / count)
"""


def bare_seconds(path: Path, cpu: int | None) -> tuple[float, float]:
    """Seconds that one run of the session takes: by the clock, and of CPU time."""
    pin = ["taskset", "-c", str(cpu)] if cpu is not None else []
    out = subprocess.run([*pin, sys.executable, "-c", BARE, str(path)], capture_output=True, check=True)
    wall, busy = out.stdout.split()
    return float(wall), float(busy)


def measure(
    tmp: Path, server_cpu: int | None, cpu: int | None, rounds: int, seconds: float = 1.0
) -> tuple[Any, str]:
    """(results, Markdown)."""
    native, onnx = tmp / "onnx-native", tmp / "onnx"
    models.native_repository(native)
    path = models.onnx_repository(onnx)
    cases = [run.Case(title, form, "simple", 32) for title, form in FORMS]
    results: dict[str, Any] = {"session_us": [], "session_cpu_us": [], "cases": {}, "cpu_us": {}}
    servers = []
    try:
        servers.append(peers.neptrio(native, server_cpu, tmp / "onnx-native.log", "kernel"))
        servers.append(peers.neptrio(onnx, server_cpu, tmp / "onnx.log", "onnx"))
        for _ in range(rounds):
            wall, busy = bare_seconds(path, server_cpu)
            results["session_us"].append(wall * 1e6)
            results["session_cpu_us"].append(busy * 1e6)
            for case in cases:
                row = results["cases"].setdefault(case.title, {})
                busy_row = results["cpu_us"].setdefault(case.title, {})
                for server in servers:
                    got = run.load(case, server, tmp, seconds, cpu)
                    row.setdefault(server.name, []).append(got["per_second"])
                    busy_row.setdefault(server.name, []).append(got["server_cpu_us"])
    finally:
        for server in servers:
            server.stop()
    session = statistics.median(results["session_us"])
    session_cpu = statistics.median(results["session_cpu_us"])
    lines = [
        f"One run of the bare session: {session:.1f} us, {session_cpu:.1f} us of CPU time.",
        "",
        "| case | kernel model | less the session | ONNX model | share | target | CPU: kernel | CPU: ONNX | share by CPU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for title, row in results["cases"].items():
        kernel, got = statistics.median(row["kernel"]), statistics.median(row["onnx"])
        expected = 1 / (1 / kernel + session / 1e6)
        target = run.verdict(got / expected, TARGET)
        busy_row = results["cpu_us"][title]
        kernel_cpu, got_cpu = statistics.median(busy_row["kernel"]), statistics.median(busy_row["onnx"])
        lines.append(
            f"| {title} | {kernel:,.0f} | {expected:,.0f} | {got:,.0f} | {got / expected:.2f} | {target} "
            f"| {kernel_cpu:.1f} us | {got_cpu:.1f} us | {(kernel_cpu + session_cpu) / got_cpu:.2f} |"
        )
    return results, "\n".join(lines) + "\n"
