"""The screen of `neptrio top`: turns two samples of the statistics into lines of text. No I/O.

Everything shown is the difference of the two samples. Percentiles are those of the interval, from the difference of
two histograms; a server without histograms gets averages. A model that was reloaded in between, which is seen by
falling counters, is counted from zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neptrio.terminal import counted

STAGES = ("request", "queue", "compute_input", "compute_infer", "compute_output")
DEMAND = 3  # where the column with the state of models stands that are loaded on demand
KEPT = 5  # columns that are never left out: model, version, requests, failures
COUNTERS = {"request": "success"}
# what happens to models that are loaded on demand, and how it is called
HAPPENS = {
    "hits": "hits",
    "misses": "misses",
    "loads": "loads",
    "load_failures": "failed loads",
    "put_away": "put away",
}
SHORT = {"compute_input": "input", "compute_infer": "infer", "compute_output": "output"}


@dataclass(frozen=True)
class Sample:
    """The $model_stat objects at one moment, by (name, version); `time` is in seconds of a steady clock."""

    seconds: float
    models: Mapping[tuple[str, str], Mapping[str, Any]]
    loop_lag: Mapping[str, Any] | None = None  # of the event loop, if the server gives it
    front_ends: Sequence[Mapping[str, Any]] = ()  # processes that speak HTTP and gRPC for it
    down: Sequence[Mapping[str, str]] = ()  # rows of the index that are not ready
    on_demand: Mapping[str, Any] | None = None  # models that are loaded on demand, where there are some


@dataclass(frozen=True)
class Row:
    """One model version during one interval. Latencies in nanoseconds: (p50, p99), or (mean,)."""

    name: str
    version: str
    requests_per_s: float
    inferences_per_s: float
    failures_per_s: float
    failures: int
    batch_size: float | None
    latencies: Mapping[str, tuple[float, ...]]
    live: Mapping[str, int] | None
    closings: Mapping[str, int]


def rows(before: Sample, now: Sample) -> list[Row]:
    """One Row for every model version of `now`, in its order."""
    seconds = max(now.seconds - before.seconds, 1e-9)
    return [_row(before.models.get(key), stat, seconds) for key, stat in now.models.items()]


def _row(old: Mapping[str, Any] | None, new: Mapping[str, Any], seconds: float) -> Row:
    if old is None or _count(old, "success") > _count(new, "success"):
        old = None

    def grown(stage: str, field: str = "count") -> int:
        stat = new["inference_stats"][stage][field]
        return int(stat) - (int(old["inference_stats"][stage][field]) if old else 0)

    def total(field: str) -> int:
        return int(new[field]) - (int(old[field]) if old else 0)

    latencies: dict[str, tuple[float, ...]] = {}
    for stage in STAGES:
        counter = COUNTERS.get(stage, stage)
        if not grown(counter):
            continue
        if "histograms" in new:
            latencies[stage] = _percentiles(
                new["histograms"][stage], old["histograms"][stage] if old and "histograms" in old else []
            )
        else:
            latencies[stage] = (grown(counter, "ns") / grown(counter),)
    executions = total("execution_count")
    closings = {
        reason: batches["count"] - (old or {}).get("batches", {}).get(reason, {}).get("count", 0)
        for reason, batches in new.get("batches", {}).items()
    }
    return Row(
        name=new["name"],
        version=new.get("version", ""),
        requests_per_s=grown("success") / seconds,
        inferences_per_s=total("inference_count") / seconds,
        failures_per_s=grown("fail") / seconds,
        failures=_count(new, "fail"),
        batch_size=total("inference_count") / executions if executions else None,
        latencies=latencies,
        live=new.get("live"),
        closings={reason: n for reason, n in closings.items() if n},
    )


def _count(stat: Mapping[str, Any], stage: str) -> int:
    return int(stat["inference_stats"][stage]["count"])


def _percentiles(new: list[list[int]], old: list[list[int]]) -> tuple[float, ...]:
    """(p50, p99) of the values that came between two histograms, as upper bounds of their buckets."""
    known = {bound: count for bound, count in old}
    grown = [(bound, count - known.get(bound, 0)) for bound, count in new]
    total = sum(count for _, count in grown)
    found = []
    for share in (0.50, 0.99):
        seen, answer = 0, 0
        for bound, count in grown:
            seen += count
            answer = bound
            if seen >= share * total:
                break
        found.append(float(answer))
    return tuple(found)


def duration(ns: float) -> str:
    """A duration in about four characters: 870us, 1.2ms, 35ms, 2.1s."""
    for limit, unit, size in ((1e6, "us", 1e3), (1e9, "ms", 1e6)):
        if ns < limit:
            value = ns / size
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return f"{ns / 1e9:.1f}s"


def render(url: str, before: Sample, now: Sample, width: int = 0) -> list[str]:
    """The lines of the screen: a header, a table, models that are down, and the reasons why batches were closed.

    Where the table does not fit into `width` characters (0: it always does), columns in its middle are left out: the last
    ones, failures, are those that nobody may miss.
    """
    found = rows(before, now)
    exact = any("histograms" in stat for stat in now.models.values())
    seconds = now.seconds - before.seconds
    states = {} if now.on_demand is None else {m["name"]: m["state"] for m in now.on_demand["models"]}
    head = ["MODEL", "VER", "REQ/S", "INF/S", "BATCH"]
    head += [("P50/P99 " if exact else "AVG ") + SHORT.get(stage, stage).upper() for stage in STAGES]
    head += ["QUEUED", "PREP", "EXEC", "SEQ"] if exact else []
    head += ["FAIL/S", "FAILED"]
    if states:
        head.insert(DEMAND, "ON DEMAND")
    table = [head]
    for row in found:
        cells = [row.name, row.version, f"{row.requests_per_s:.1f}", f"{row.inferences_per_s:.1f}"]
        cells.append("-" if row.batch_size is None else f"{row.batch_size:.1f}")
        for stage in STAGES:
            cells.append("/".join(duration(ns) for ns in row.latencies.get(stage, ())) or "-")
        if exact:
            live = row.live or {}
            cells += [str(live.get(key, "-")) for key in ("queued", "prepared", "executing", "sequences")]
        cells += [f"{row.failures_per_s:.1f}", str(row.failures)]
        if states:
            cells.insert(DEMAND, states.get(row.name, "-"))
        table.append(cells)
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    while width and sum(widths) + 2 * (len(widths) - 1) > width and len(widths) > KEPT:
        gone = len(widths) - 3  # the one before failures
        del widths[gone]
        for line in table:
            del line[gone]
    lines = [
        f"{url}  {counted(len(found), 'model')}, interval {seconds:.1f} s{_lag(before.loop_lag, now.loop_lag)}"
    ]
    if now.on_demand is not None:
        lines += on_demand(before.on_demand, now.on_demand, seconds)
    lines.append("")
    for line in table:
        cells = [
            cell.ljust(w) if i < 2 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    if now.down:
        lines += ["", "not ready:", *map(_down, now.down)]
    why = [
        f"  {row.name} {row.version}: " + ", ".join(f"{reason} {n}" for reason, n in row.closings.items())
        for row in found
        if row.closings
    ]
    if why:
        lines += ["", "batches closed in the interval:", *why]
    fronts = _front_ends(before, now)
    if fronts:
        lines += ["", "front ends:", *fronts]
    apart = _processes(before, now)
    return [*lines, "", "processes:", *apart] if apart else lines


def on_demand(before: Mapping[str, Any] | None, now: Mapping[str, Any], seconds: float) -> list[str]:
    """What becomes of models that are loaded on demand: how many are in which state, the memory that they hold, what happened
    in the interval, and a line for each that somebody waits for or whose last load has failed."""
    parts = [f"{count} {state}" for state, count in now["states"].items()]
    if now["budget_bytes"]:
        own = f" and the server's {_size(now['server_bytes'])}" if now.get("server_bytes") else ""
        parts.append(f"{_size(now['held_bytes'])}{own} of {_size(now['budget_bytes'])}")
    old = {} if before is None else {model["name"]: model for model in before["models"]}
    grown = dict.fromkeys(HAPPENS, 0)
    for model in now["models"] if before is not None else ():
        for key in HAPPENS:
            grown[key] += max(0, model[key] - old.get(model["name"], {}).get(key, 0))
    rates = [f"{grown[key] / max(seconds, 1e-9):.1f} {word}/s" for key, word in HAPPENS.items()]
    lines = [f"on demand: {', '.join(parts)}; {', '.join(rates)}"]
    for model in now["models"]:
        if model["waiting"] or model["state"] in ("loading", "failed"):
            reason = " ".join(model.get("reason", "").split())
            said = f"{model['state']}, {model['waiting']} waiting{f': {reason}' if reason else ''}"
            lines.append(f"  {model['name']}: {said}")
    return lines


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _down(row: Mapping[str, str]) -> str:
    reason = " ".join(row.get("reason", "").split())
    return "  " + " ".join(
        filter(None, (row["name"], row.get("version", ""), row.get("state", "not loaded"), reason))
    )


def _front_ends(before: Sample, now: Sample) -> list[str]:
    """A line per front end: what it has to do, its memory, its share of a core in the interval, its restarts."""
    seconds = max(now.seconds - before.seconds, 1e-9)
    earlier = {front["pid"]: front for front in before.front_ends}
    lines = []
    for front in now.front_ends:
        old = earlier.get(front["pid"])
        grown = {
            name: front[name] - (old[name] if old else front[name]) for name in ("requests", "cpu_seconds")
        }
        lines.append(
            f"  {front['number']}: pid {front['pid']}, {front['connections']} connections, "
            f"{grown['requests'] / seconds:.1f} req/s, {front['under_way']} under way"
            f"{_lag(old and old['loop_lag'], front['loop_lag'])}, {front['resident_bytes'] / 1e6:.0f} MB, "
            f"{100 * grown['cpu_seconds'] / seconds:.0f}% of a core, {front['restarts']} restarts"
        )
    return lines


def _lag(before: Mapping[str, Any] | None, now: Mapping[str, Any] | None) -> str:
    """Percentiles of a loop's lag in the interval, as upper bounds of their buckets."""
    if now is None:
        return ""
    old = dict(before["cumulative"]) if before is not None else {}
    grown, below = [], 0
    for bound, count in now["cumulative"]:
        passes = count - old.get(bound, 0)
        grown.append([bound, passes - below])
        below = passes
    p50, p99 = _percentiles(grown, [])
    return f", loop lag p50/p99 {duration(p50)}/{duration(p99)}"


def _processes(before: Sample, now: Sample) -> list[str]:
    """A line per instance in a process: its memory, its share of a core in the interval, its restarts."""
    seconds = max(now.seconds - before.seconds, 1e-9)
    lines = []
    for key, stat in now.models.items():
        earlier = {p["pid"]: p["cpu_seconds"] for p in before.models.get(key, {}).get("processes", ())}
        for p in stat.get("processes", ()):
            used = p["cpu_seconds"] - earlier.get(p["pid"], p["cpu_seconds"])
            lines.append(
                f"  {p['instance']}: pid {p['pid']}, {p['resident_bytes'] / 1e6:.0f} MB, "
                f"{100 * used / seconds:.0f}% of a core, "
                f"{p['restarts']} restarts, {p['ring']} ahead"
            )
    return lines
