"""Can a neighbour be felt: the latency of tiny requests beside one heavy client of another model.

A probe sends a tiny binary request every PERIOD_S, open loop: latency counts from when it was due. It runs in a
process of its own, on one connection, to a Python model and, on our server, to a built-in model too. Beside it
runs one neighbour, in another process, as fast as it is answered. Both servers are measured in turns.

A neighbour that is served three times as often is three times as heavy. So where ours serves it more often than
tritonserver, the probe is measured once more beside the neighbour at tritonserver's rate ("as often").

`make bench-neighbours` writes a table (p50, p90 and p99 of the probe, and the neighbour's own rate) and plots to
benchmarks/results after every row. ARGS='--only JSON,gzip' measures the neighbours whose names hold one of these texts
once more and keeps the other rows, `--turns` and `--seconds` make it longer. A turn of all takes about seven minutes.

The p99 of 5 s is the tenth slowest of a thousand requests: one burst of another process moves it. With several
turns the rows hold the median of each percentile, and the p99 of every turn is kept in the file beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import peers, plots, run
from benchmarks.neighbour_kinds import AFTER, NEIGHBOURS, Ports, binary, builtin, repository

Rows = dict[
    str, dict[str, dict[str, Any]]
]  # neighbour -> server and probe -> percentiles in ms, and its rate

PERIOD_S = 0.005
OFTEN = 1.1  # times as often as tritonserver's neighbour: from here on it is measured at the same rate, too


# ------------------------------------------------------------ the processes


def neighbour(name: str, ports: Ports, most: float = 0.0) -> None:
    """Works until its input ends, at most so many times a second (0: as often as it can), then prints how often."""
    once = NEIGHBOURS[name](ports)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    once()
    print("ready", flush=True)
    begun, times = time.perf_counter(), 0
    due = begun
    while not ended.is_set():
        once()
        times += 1
        if most:  # what is late is not made up for
            due = max(due + 1 / most, time.perf_counter())
            ended.wait(due - time.perf_counter())
    rate = times / (time.perf_counter() - begun)
    for undo in AFTER:
        undo()
    print(json.dumps({"rate": rate}), flush=True)


def probe(model: str, ports: Ports, seconds: float) -> None:
    """Prints the latencies in ms, each from when its request was due."""
    once = binary(ports, model, 1)
    for _ in range(20):
        once()
    begun = time.perf_counter()
    found = []
    for i in range(int(seconds / PERIOD_S)):
        due = begun + i * PERIOD_S
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
        once()
        found.append(1e3 * (time.perf_counter() - due))
    print(json.dumps(found))


def role(*arguments: Any) -> list[str]:
    """The command of one of the processes."""
    return [sys.executable, "-m", "benchmarks.neighbours", "--role", *map(str, arguments)]


def ports_of(server: peers.Server) -> Ports:
    """Where it listens."""
    return Ports(server.http_port, server.grpc_port, server.metrics_port)


@contextmanager
def beside(name: str, server: peers.Server, most: float = 0.0) -> Iterator[dict[str, float]]:
    """Runs a neighbour inside, see neighbour(); its rate is in the dictionary afterwards."""
    found: dict[str, float] = {}
    if not name:
        yield found
        return
    command = role("neighbour", name, *ports_of(server), most)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise RuntimeError(f"the neighbour '{name}' of {server.name} ended at once")
        yield found
        process.stdin.close()
        found.update(json.loads(process.stdout.read()))


def measure(
    name: str, server: peers.Server, model: str, seconds: float, most: float = 0.0
) -> dict[str, float]:
    """Percentiles of the probe in ms and the neighbour's calls per second, which are at most `most` (0: any number)."""
    with beside(name, server, most) as found:
        command = role("probe", model, *ports_of(server), seconds)
        latencies = sorted(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))
    row = {f"p{p}": latencies[min(len(latencies) - 1, len(latencies) * p // 100)] for p in (50, 90, 99)}
    return {**row, "rate": found.get("rate", 0.0)}


def visit(
    found: dict[str, list[dict[str, float]]],
    name: str,
    server: peers.Server,
    model: str,
    seconds: float,
    most: float = 0.0,
) -> None:
    """measure(), added to the turns that were found before."""
    try:
        measured = measure(name, server, model, seconds, most)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"{name}, {server.name}: {error}", file=sys.stderr, flush=True)
        return
    finally:  # gigabytes of traces would keep the disk busy beside whoever is measured next
        if server.trace_file is not None:
            for file in server.trace_file.parent.glob(server.trace_file.name + "*"):
                file.unlink(missing_ok=True)
    column = f"{server.name}, {model}" + (", as often" if most else "")
    found.setdefault(column, []).append(measured)
    print(name or "nobody", column, measured, file=sys.stderr, flush=True)


def turn(
    found: dict[str, list[dict[str, float]]],
    name: str,
    servers: list[peers.Server],
    models: list[str],
    seconds: float,
) -> None:
    """Every server beside one neighbour, then ours beside one that asks as often as tritonserver's."""
    cases = [(s, m) for s in servers for m in models if m != "builtin" or s.name == "neptrio"]
    for server, model in cases:
        visit(found, name, server, model, seconds)
    theirs = found.get("tritonserver, probe", [{}])[-1].get("rate", 0.0)
    for server, model in cases:
        ours = found.get(f"{server.name}, {model}", [{}])[-1].get("rate", 0.0)
        if server.name == "neptrio" and theirs and ours > OFTEN * theirs:
            visit(found, name, server, model, seconds, theirs)


def medians(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    """Of each column's turns; "p99 of turns" holds them all, in their order."""
    return {
        column: {
            **{key: statistics.median(each[key] for each in turns) for key in turns[0]},
            "p99 of turns": [each["p99"] for each in turns],
        }
        for column, turns in found.items()
    }


def start(names: list[str], folder: Path) -> list[peers.Server]:
    """The servers; one that is not installed is left out with a word."""
    made = []
    for name in names:
        models = repository(folder / name)
        port = peers.free_port()
        flags = (
            "--model-control-mode=explicit",
            "--load-model=*",
            "--allow-metrics=true",
            f"--metrics-port={port}",
            f"--trace-config=triton,file={folder / name}.trace",
        )
        try:
            if name == "neptrio":
                builtin(models)
                server = peers.neptrio(
                    models, None, folder / f"{name}.log", flags=(*flags, "--loop-lag-warning-ms=0")
                )
            else:
                server = peers.tritonserver(models, None, folder / f"{name}.log", flags=flags)
            server.metrics_port = port
            server.trace_file = folder / f"{name}.trace"
            made.append(server)
        except (RuntimeError, OSError, StopIteration) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return made


def markdown(rows: Rows) -> str:
    """neighbour -> server and probe -> percentiles, as a table."""
    columns = sorted({column for row in rows.values() for column in row})
    lines = ["| neighbour | " + " | ".join(f"{c}: p50 / p90 / p99 ms | its rate" for c in columns) + " |"]
    lines.append("|---|" + "---|---|" * len(columns))
    for name, row in rows.items():
        cells = []
        for column in columns:
            found = row.get(column)
            shown = " / ".join(f"{found[p]:.1f}" for p in ("p50", "p90", "p99")) if found else ""
            cells += [shown, f"{found['rate']:.1f}/s" if found and found["rate"] else ""]
        lines.append(f"| {name or 'nobody'} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def before() -> Rows:
    """The rows of the last run, which one with --only goes on with."""
    try:
        found: Rows = json.loads((run.RESULTS / "neighbours.json").read_text())["results"]
    except (OSError, ValueError, KeyError):
        return {}
    return found


def store(rows: Rows) -> None:
    """Writes what was measured so far: the table and the plots."""
    run.write("neighbours", rows, markdown(rows), quietly=True)
    for percentile in ("p50", "p99"):
        bars = {
            name or "nobody": {column: found[percentile] for column, found in row.items()}
            for name, row in rows.items()
        }
        text = plots.bars(f"A tiny request beside a heavy neighbour: {percentile}, ms", bars)
        (run.RESULTS / f"neighbours-{percentile}.svg").write_text(text)


def main() -> None:
    """`make bench-neighbours`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--role", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument(
        "--only",
        default="",
        help="neighbours whose name holds one of these texts, separated by commas; others keep their rows",
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of each row")
    parser.add_argument("--turns", type=int, default=1, help="of which the medians are taken")
    parser.add_argument("--servers", default="neptrio,tritonserver")
    parser.add_argument("--probes", default="probe,builtin", help="models that are probed")
    options = parser.parse_args()
    if options.role is not None:
        role, what, http, grpc, metrics, *rest = options.role
        ports = Ports(int(http), int(grpc), int(metrics))
        if role == "probe":
            probe(what, ports, float(rest[0]))
        else:
            neighbour(what, ports, float(rest[0]))
        return
    wanted = [name for name in NEIGHBOURS if any(text in name for text in options.only.split(","))]
    rows: Rows = before() if options.only else {}
    with tempfile.TemporaryDirectory() as folder:
        servers = start(options.servers.split(","), Path(folder))
        try:
            for name in (*([] if options.only and "" in rows else [""]), *wanted):
                found: dict[str, list[dict[str, float]]] = {}
                for _ in range(options.turns):
                    turn(found, name, servers, options.probes.split(","), options.seconds)
                rows[name] = medians(found)
                store(rows)
        finally:
            for server in servers:
                server.stop()
    print(markdown(rows))


if __name__ == "__main__":
    main()
