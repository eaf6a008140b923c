"""The open loop: latency at half of the saturation rate, without coordinated omission.

Saturation is measured first, in a closed loop with CONCURRENCY requests in flight. Then requests are
due at fixed times at half that rate and every latency counts from the due time, sent or not: a
server that stalls is charged for all that was due meanwhile (benchmarks/loadgen/loadgen.c).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import peers, run

CONCURRENCY = 32
TARGET = 5.0  # p99 / p50
FORMS = (
    ("HTTP binary", "binary"),
    ("HTTP JSON", "json"),
    ("gRPC unary, one channel", "unary"),
    ("gRPC stream", "stream"),
)


def measure(
    servers: list[peers.Server], folder: Path, cpu: int | None, rounds: int, seconds: float = 2.0
) -> tuple[Any, str]:
    """Every form on every server: (results, Markdown). The round with the median ratio counts."""
    results: dict[str, Any] = {}
    for title, form in FORMS:
        case = run.Case(title, form, "simple", CONCURRENCY)
        row = results.setdefault(title, {})
        for server in servers:
            try:
                full = run.load(case, server, folder, 1.0, cpu)["per_second"]
                row[server.name] = {"saturation": full, "rounds": []}
            except RuntimeError as error:
                print(f"  failed: {error}", flush=True)
        for _ in range(rounds):
            for server in servers:
                if server.name not in row:
                    continue
                try:
                    half = row[server.name]["saturation"] / 2
                    row[server.name]["rounds"].append(run.load(case, server, folder, seconds, cpu, rate=half))
                except RuntimeError as error:
                    print(f"  failed: {error}", flush=True)
    return results, _markdown(results)


def _markdown(results: dict[str, Any]) -> str:
    lines = [
        "| case | server | saturation | rate | p50 | p99 | p99 / p50 | target |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for title, row in results.items():
        for name, entry in row.items():
            rounds = sorted(entry["rounds"], key=lambda r: r["p99_us"] / r["p50_us"])
            if not rounds:
                continue
            middle = rounds[len(rounds) // 2]
            value = middle["p99_us"] / middle["p50_us"]
            target = ("< 5" if value < TARGET else "< 5 **missed**") if name == "neptrio" else ""
            lines.append(
                f"| {title} | {name} | {entry['saturation']:,.0f} | {entry['saturation'] / 2:,.0f} "
                f"| {middle['p50_us']:.0f} us | {middle['p99_us']:.0f} us | {value:.1f} | {target} |"
            )
    return "\n".join(lines) + "\n"
