"""Python models in processes of their own beside tritonserver's Python backend: the same model.py in both.

Every case runs twice: with the server on one core and the generator on the other, and with both on all cores. Each visits
the two servers in turn, round after round, and medians count. Ratios are of this server to tritonserver; the last case
compares this server with itself: four instances of 5 ms of pure Python with one.

`make bench ARGS='--parts python'` runs only these, in some 12 minutes; `--only` narrows them by title. The latency of a
probe beside a busy model is `make bench-neighbours ARGS='--only busy'`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import models, peers, run

OURS = "neptrio-python"
CLIENTS = 32
FOUR, ONE = "pure_4", "pure"
MIB = 1 << 18  # elements
LATENCY = run.Case("small tensors, median latency", "binary", "simple", 1, latency=True)
# case, target on one core, target on two
CASES: tuple[tuple[run.Case, float, float], ...] = (
    (LATENCY, 0.8, 0.8),
    (run.Case("small tensors, HTTP binary", "binary", "simple", CLIENTS), 3, 4.5),
    (run.Case("small tensors, HTTP JSON", "json", "simple", CLIENTS), 3, 4.5),
    (run.Case("small tensors, gRPC", "unary", "simple", CLIENTS), 3, 4.5),
    (run.Case("small tensors, gRPC stream", "stream", "simple", CLIENTS), 3, 4.5),
    (run.Case("dynamic batching, gRPC", "unary", "simple_batched", CLIENTS), 2.5, 3),
    (run.Case("1 MiB, HTTP binary", "binary", "large", 1, elements=MIB), 2, 2),
    (run.Case("1 MiB, gRPC", "unary", "large", 1, elements=MIB), 2, 2),
    (run.Case("16 MiB, HTTP binary", "binary", "large", 1, elements=16 * MIB), 2, 2),
    (run.Case("16 MiB, gRPC", "unary", "large", 1, elements=16 * MIB), 2, 2),
    (run.Case("a call to another Python model", "binary", "bls", CLIENTS), 2, 2.5),
)
PURE = tuple(run.Case("5 ms of pure Python", "binary", model, CLIENTS) for model in (ONE, FOUR))
PURE_TARGET = 1.9


def _round(
    server: peers.Server, case: run.Case, folder: Path, seconds: float, cpu: int | None, found: dict[str, Any]
) -> None:
    """One visit; what fails is said and left out."""
    runs = found.setdefault(f"{case.key} {case.model}", {}).setdefault(server.name, [])
    try:
        runs.append(run.load(case, server, folder, seconds, cpu))
    except RuntimeError as error:
        print(f"  failed: {error}", flush=True)


def measure(tmp: Path, rounds: int, seconds: float, only: str = "") -> tuple[Any, str]:
    """All of it: (results, Markdown)."""
    results: dict[str, Any] = {}
    repository = tmp / "python-models"
    models.python_repository(repository)
    models.pure_python(repository, ONE)
    models.with_instances(repository, ONE, 4)
    cases = [case for case, *_ in CASES if only in case.title]
    pure = [case for case in PURE if only in case.title]
    for cores, server_cpu, load_cpu in ((1, 0, 1), (2, None, None)):
        found = results.setdefault(f"{cores} core(s)", {})
        servers: list[peers.Server] = []
        try:
            servers.append(peers.neptrio(repository, server_cpu, tmp / f"own-{cores}.log", OURS))
            servers.append(peers.tritonserver(repository, server_cpu, tmp / f"peer-{cores}.log"))
            for server in servers:
                server.settle()
            for i in range(rounds):
                for case in cases:
                    for server in servers:
                        _round(server, case, tmp, seconds, load_cpu, found)
                for case in pure if cores == 2 else ():
                    for server in servers:
                        _round(server, case, tmp, seconds, load_cpu, found)
                print(f"{cores} core(s), round {i + 1} of {rounds}", flush=True)
        finally:
            for server in servers:
                server.stop()
    return results, markdown(results, only)


def markdown(results: dict[str, Any], only: str = "") -> str:
    """The table of ratios and targets; figures are of this server and tritonserver."""
    lines = ["| case | cores | this server | tritonserver | ratio | target |", "|---|---|---|---|---|---|"]
    for case, *targets in CASES:
        if only not in case.title:
            continue
        for (cores, found), target in zip(results.items(), targets, strict=True):
            row = found.get(f"{case.key} {case.model}", {})
            value = run.ratio(row, OURS, run.BASE, case)
            shown = [run.shown(row.get(name), case) for name in (OURS, run.BASE)]
            said = "" if value is None else f"{value:.2f}"
            lines.append(
                f"| {case.key} | {cores[0]} | {' | '.join(shown)} | {said} | "
                f"{run.verdict(value, target, case.latency)} |"
            )
    found = results.get("2 core(s)", {})
    one, four = (found.get(f"{case.key} {case.model}", {}) for case in PURE)
    if one.get(OURS) and four.get(OURS):
        ratios = [
            run.median(four[name], "per_second") / run.median(one[name], "per_second")
            if one.get(name) and four.get(name)
            else None
            for name in (OURS, run.BASE)
        ]
        peer = "" if ratios[1] is None else f"{ratios[1]:.2f} times"
        lines.append(
            f"| 4 instances of 5 ms of pure Python: times the rate of one | 2 | {ratios[0]:.2f} times | {peer} | "
            f"{ratios[0]:.2f} | {run.verdict(ratios[0], PURE_TARGET)} |"
        )
    return "\n".join(lines) + "\n"
