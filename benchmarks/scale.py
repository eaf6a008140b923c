"""Scale-up: instances, connections, and what idle connections cost.

Throughput over 1, 2 and 4 instances and over 1 to 1,000 connections, one request in flight on each.
Idle connections have answered one request each; memory is the server's growth per connection, and
the throughput of 32 busy connections is measured beside them and without them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks import models, peers, run

INSTANCES = (1, 2, 4)
CONNECTIONS = (1, 4, 16, 64, 256, 1000)
IDLE = 10_000
BUSY = 32
FORMS = (("HTTP binary", "binary"), ("gRPC unary", "unary"))


def idle_load(
    case: run.Case, server: peers.Server, folder: Path, seconds: float, cpu: int | None, idle: int
) -> tuple[dict[str, Any], int]:
    """A run beside `idle` idle connections: its result and the server's memory growth in bytes."""
    before = server.rss_bytes()
    options = [*run.command(case, server, folder, seconds, cpu), "--idle", str(idle)]
    with subprocess.Popen(options, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        grown = server.rss_bytes() - before if line.startswith("idle") else 0
        out, error = process.communicate()
        if process.returncode:
            raise RuntimeError(
                f"{server.name}, {case.key}, {idle} idle: {error.strip()[:300]} {line}{out[:300]}"
            )
    result: dict[str, Any] = json.loads(out)
    return result, grown


def _once(case: run.Case, server: peers.Server, folder: Path, seconds: float, cpu: int | None) -> Any:
    try:
        return run.load(case, server, folder, seconds, cpu)["per_second"]
    except RuntimeError as error:
        print(f"  failed: {error}", flush=True)
        return None


def measure(
    tmp: Path, server_cpu: int | None, cpu: int | None, seconds: float = 1.0, idle: int = IDLE
) -> tuple[Any, str]:
    """All of it, for this server and tritonserver: (results, Markdown)."""
    results: dict[str, Any] = {"instances": {}, "connections": {}, "idle": {}}
    native, python = tmp / "scale-native", tmp / "scale-python"
    models.native_repository(native)
    models.python_repository(python)
    for count in INSTANCES[1:]:
        models.with_instances(native, "simple", count)
        models.with_instances(python, "simple", count)
    servers = []
    for name, start in (
        ("neptrio", lambda: peers.neptrio(native, server_cpu, tmp / "scale-neptrio.log")),
        (
            "neptrio-python",
            lambda: peers.neptrio(python, server_cpu, tmp / "scale-python.log", "neptrio-python"),
        ),
        ("tritonserver", lambda: peers.tritonserver(python, server_cpu, tmp / "scale-triton.log")),
    ):
        try:
            servers.append(start())
        except (RuntimeError, OSError, StopIteration) as error:
            print(f"{name} is left out: {error}", flush=True)
    try:
        for title, form in FORMS:
            for count in INSTANCES:
                model = "simple" if count == 1 else f"simple_{count}"
                case = run.Case(title, form, model, BUSY, channels=True)
                row = results["instances"].setdefault(title, {})
                for server in servers:
                    row.setdefault(server.name, {})[count] = _once(case, server, tmp, seconds, cpu)
            for count in CONNECTIONS:
                case = run.Case(title, form, "simple", count, channels=True)
                row = results["connections"].setdefault(title, {})
                for server in servers:
                    if server.name != "neptrio-python":
                        row.setdefault(server.name, {})[count] = _once(case, server, tmp, seconds, cpu)
            case = run.Case(title, form, "simple", BUSY, channels=True)
            for server in servers:
                if server.name == "neptrio-python":
                    continue
                try:
                    alone = run.load(case, server, tmp, 2 * seconds, cpu)
                    beside, grown = idle_load(case, server, tmp, 2 * seconds, cpu, idle)
                except RuntimeError as error:
                    print(f"  failed: {error}", flush=True)
                    continue
                results["idle"].setdefault(title, {})[server.name] = {
                    "connections": idle,
                    "bytes_per_connection": grown / idle,
                    "alone": alone["per_second"],
                    "beside": beside["per_second"],
                    "alone_p50_us": alone["p50_us"],
                    "beside_p50_us": beside["p50_us"],
                }
            print(f"scale, {title}: {json.dumps({k: v.get(title) for k, v in results.items()})}", flush=True)
    finally:
        for server in servers:
            server.stop()
    return results, _markdown(results)


def _curve(rows: dict[str, Any], heads: tuple[int, ...], unit: str) -> list[str]:
    lines = [
        f"| form | server | {' | '.join(f'{h:,} {unit}' for h in heads)} |",
        "|---|---|" + "---|" * len(heads),
    ]
    for title, row in rows.items():
        for name, points in row.items():
            cells = ("" if points.get(h) is None else f"{points[h]:,.0f}" for h in heads)
            lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
    return [*lines, ""]


def _markdown(results: dict[str, Any]) -> str:
    lines = ["Requests per second over instances, 32 connections:", ""]
    lines += _curve(results["instances"], INSTANCES, "instances")
    lines += ["Requests per second over connections, one request in flight on each:", ""]
    lines += _curve(results["connections"], CONNECTIONS, "connections")
    lines += [
        f"{BUSY} busy connections alone and beside idle ones:",
        "",
        "| form | server | idle connections | memory each | alone | beside | p50 alone | p50 beside |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, row in results["idle"].items():
        for name, e in row.items():
            lines.append(
                f"| {title} | {name} | {e['connections']:,} | {e['bytes_per_connection'] / 1024:.1f} KiB "
                f"| {e['alone']:,.0f} | {e['beside']:,.0f} | {e['alone_p50_us']:.0f} us | {e['beside_p50_us']:.0f} us |"
            )
    return "\n".join(lines) + "\n"
