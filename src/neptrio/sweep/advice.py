"""Decides what a sweep's measurements recommend: max_batch_size, the queue's delay, the number of instances.

The problem: a sweep is short and its clients are closed loops, so it cannot tell everything. A recommendation that
the figures do not carry costs more than none.
The choice: pure functions of the measurements with the thresholds below; each says what it looked at, and
"change nothing" is the answer wherever the evidence ends. docs/batching.md has the rules in words.
Points with failures, other clients' requests or answers from the cache count for nothing here. The cost of an
execution is the server's own account (batch_stats), so that a client at its limit does not falsify it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

ENOUGH = 0.95  # of the best throughput: beyond it, larger batches cost latency and buy nothing
GAIN = 1.10  # batching that makes a row less than 10 % cheaper is not worth a wait
BUSY = 0.85  # from this share of the time on an instance is saturated
QUEUE_SHARE = 0.3  # of a request's time in the server: requests wait for an instance
CPU_FULL = 0.85  # of the machine: another instance would only share it
IDLE = 0.1  # of the time: below it the model is not what requests wait for
CONTENTION = 1.2  # effective instances below which further ones only slow each other
CLIENT_FULL = 0.9  # of a core: the clients' own process is the limit
FAILED = 0.01  # share of failures from which a point is not used
KEEP = "  # beside what else stands there"  # a pasted block must not cost the settings it does not name
FEWEST = 5  # executions below which a batch size's cost is not known


@dataclass(frozen=True)
class Point:
    """What was measured with `concurrency` clients whose requests have `batch` rows."""

    batch: int
    concurrency: int
    seconds: float
    requests: int  # answered
    p50_ms: float = 0.0
    p90_ms: float = 0.0
    p99_ms: float = 0.0
    failures: int = 0
    failure: str = ""
    client_cpu: float = 0.0  # cores that the clients used
    host_cpu: float | None = None  # share of the server's machine in use, None: unknown
    stable: bool = True
    # from the server's statistics, after minus before
    inferences: int = 0
    executions: int = 0
    queue_us: float = 0.0  # mean per request
    compute_us: float = 0.0
    cache_hits: int = 0
    others: int = 0  # requests of other clients
    sizes: dict[int, tuple[int, float]] = field(default_factory=dict)  # executed size -> executions, seconds

    @property
    def requests_per_s(self) -> float:
        """Answered requests per second."""
        return self.requests / self.seconds if self.seconds else 0.0

    @property
    def rows_per_s(self) -> float:
        """Inferences per second."""
        return self.requests_per_s * self.batch

    @property
    def executed(self) -> float:
        """Mean rows of an execution."""
        return self.inferences / self.executions if self.executions else 0.0

    @property
    def usable(self) -> bool:
        """False where the figures are not those of the model under this load alone."""
        total = self.requests + self.failures
        return (
            self.requests > 0
            and self.failures <= FAILED * total
            and not self.cache_hits
            and self.others <= FAILED * self.requests
        )

    @property
    def client_bound(self) -> bool:
        """True when the clients themselves were the limit."""
        return self.client_cpu >= CLIENT_FULL

    def busy(self, instances: int) -> float:
        """Share of the time in which the instances executed, 0..1."""
        worked = sum(seconds for _, seconds in self.sizes.values())
        return min(1.0, worked / (instances * self.seconds)) if self.seconds else 0.0

    @property
    def queue_share(self) -> float:
        """Share of a request's time in the server that it waited, 0..1."""
        total = self.queue_us + self.compute_us
        return self.queue_us / total if total else 0.0


@dataclass(frozen=True)
class Tuned:
    """What the model's configuration says now. `scheduler`: none, dynamic, sequence or ensemble."""

    name: str
    max_batch_size: int
    scheduler: str = "dynamic"
    delay_us: int = 0
    instances: int = 1
    kind: str = "KIND_CPU"
    budget_ms: float | None = None  # what p99 may be
    decoupled: bool = False


@dataclass(frozen=True)
class Advice:
    """A recommendation about one setting. `config` is the line to paste, empty when nothing should change."""

    setting: str
    text: str
    evidence: tuple[str, ...] = ()
    config: str = ""


def costs(points: Sequence[Point]) -> dict[int, float]:
    """Mean seconds of an execution by its rows, over all usable points, sizes with few executions left out."""
    sums: dict[int, tuple[int, float]] = {}
    for point in points:
        if point.usable:
            for size, (count, seconds) in point.sizes.items():
                before = sums.get(size, (0, 0.0))
                sums[size] = before[0] + count, before[1] + seconds
    return {
        size: seconds / count
        for size, (count, seconds) in sorted(sums.items())
        if size > 0 and count >= FEWEST and seconds > 0
    }


def advise(model: Tuned, points: Sequence[Point]) -> list[Advice]:
    """The recommendations, one per setting, in the order max_batch_size, delay, instances."""
    usable = [point for point in points if point.usable]
    if model.scheduler == "ensemble":
        return [
            Advice("ensemble", "Change nothing here: an ensemble executes nothing itself. Measure its steps.")
        ]
    if model.decoupled:
        reason = (
            "A decoupled model may go on working after its execution was counted, so costs are not known."
        )
        return [Advice("all", "Change nothing: decoupled models are measured and not judged.", (reason,))]
    if not usable:
        return [
            Advice(
                "all",
                "Change nothing: no point can be used (failures, the response cache, or other clients).",
            )
        ]
    if (most := max(point.busy(model.instances) for point in usable)) < IDLE:
        reason = f"At no point the instances executed in more than {100 * most:.2g} % of the time."
        return [Advice("all", "Change nothing: the model is not what requests wait for.", (reason,))]
    return [batch_advice(model, usable), delay_advice(model, usable), instance_advice(model, usable)]


# ------------------------------------------------------------ max_batch_size


def _line(curve: dict[int, float]) -> str:
    return "; ".join(
        f"{size} row{'s' if size > 1 else ''}: {1e3 * cost:.3g} ms, {size / cost:,.0f} rows/s per instance"
        for size, cost in curve.items()
    )


def best_size(curve: dict[int, float], budget_ms: float | None = None) -> int:
    """The smallest size that reaches 95 % of the best throughput of the curve; with a budget, of the sizes whose
    execution alone is within it. 0 when there is none."""
    fitting = {s: c for s, c in curve.items() if budget_ms is None or 1e3 * c <= budget_ms}
    if not fitting:
        return 0
    best = max(size / cost for size, cost in fitting.items())
    return min(size for size, cost in fitting.items() if size / cost >= ENOUGH * best)


def rising(curve: dict[int, float]) -> bool:
    """Whether the largest size made a row still 10 % cheaper than the one before it."""
    *_, before, top = sorted(curve)
    return top / curve[top] >= GAIN * before / curve[before]


def batch_advice(model: Tuned, points: Sequence[Point]) -> Advice:
    """max_batch_size from the measured cost of executions by size."""
    setting = "max_batch_size"
    if model.max_batch_size <= 1:
        return Advice(
            setting, f"Change nothing: the model takes no batches (max_batch_size {model.max_batch_size})."
        )
    if model.scheduler == "sequence":
        return Advice(setting, "Change nothing: for sequences it is how many of them an instance takes.")
    curve = costs(points)
    if len(curve) < 2:
        return Advice(
            setting,
            "Change nothing: executions of one size only were seen, which says nothing about others.",
            (_line(curve),) if curve else (),
        )
    evidence = [f"Measured executions: {_line(curve)}."]
    size = best_size(curve, model.budget_ms)
    if not size:
        return Advice(
            setting,
            f"Change nothing: even the smallest execution takes longer than the budget of {model.budget_ms:g} ms.",
            tuple(evidence),
        )
    top = max(curve)
    if model.budget_ms is not None and best_size(curve) != size:
        evidence.append(f"Larger executions alone take longer than the budget of {model.budget_ms:g} ms.")
    if size >= model.max_batch_size:
        more = (
            " It was still rising: a copy of the model with twice as much is worth a measurement."
            if rising(curve)
            else ""
        )
        return Advice(
            setting, f"Change nothing: {size} rows are the cheapest per row.{more}", tuple(evidence)
        )
    if size == top:
        risen = "was still rising at" if rising(curve) else "was highest at"
        return Advice(
            setting,
            f"Change nothing: throughput {risen} {top} rows, the most that was executed, and "
            f"max_batch_size is {model.max_batch_size}.",
            tuple(evidence),
        )
    reached = (size / curve[size]) / max(s / c for s, c in curve.items())
    evidence.append(f"{size} rows reach {100 * reached:.0f} % of the best throughput that was measured.")
    evidence.append(f"Clients whose requests have more than {size} rows would be refused.")
    return Advice(
        setting, f"Use {size} instead of {model.max_batch_size}.", tuple(evidence), f"max_batch_size: {size}"
    )


# ------------------------------------------------------------ max_queue_delay_microseconds


def delay_advice(model: Tuned, points: Sequence[Point]) -> Advice:
    """Dynamic batching and its delay from what batching gains and how full the batches were."""
    setting = "max_queue_delay_microseconds"
    if model.scheduler == "sequence":
        return Advice(setting, "Change nothing: the delays of sequence batching are not judged here.")
    if model.max_batch_size <= 1:
        return Advice(setting, "Change nothing: the model takes no batches.")
    curve = costs(points)
    if len(curve) < 2:
        return Advice(
            setting, "Change nothing: what batching gains was not seen (executions of one size only)."
        )
    first, size = min(curve), best_size(curve, model.budget_ms) or min(curve)
    gain = (size / curve[size]) / (first / curve[first])
    evidence = [f"{size} rows in one execution are {gain:.2f} times as cheap per row as {first}."]
    if gain < GAIN:
        if model.delay_us:
            return Advice(
                setting,
                f"Use 0 instead of {model.delay_us}: waiting for company buys nothing.",
                tuple(evidence),
                f"dynamic_batching {{ max_queue_delay_microseconds: 0 }}{KEEP}",
            )
        return Advice(setting, "Change nothing: batching gains too little to wait for it.", tuple(evidence))
    small = min(point.batch for point in points)
    row = [point for point in points if point.batch == small]
    most = max(row, key=lambda point: point.concurrency)
    if model.scheduler == "none":
        evidence.append(
            f"At concurrency {most.concurrency} requests waited {100 * most.queue_share:.0f} % of their time in the "
            "server."
        )
        if most.queue_share < QUEUE_SHARE:
            return Advice(
                setting, "Change nothing: hardly any requests wait that could batch.", tuple(evidence)
            )
        return Advice(
            setting,
            "Add dynamic batching: requests that wait for an instance are then executed together.",
            tuple(evidence),
            "dynamic_batching { }",
        )
    if model.delay_us:
        return _shorter(model, row, evidence)
    full = row_of_saturated(model, row)
    if full is None:
        return Advice(
            setting,
            "Change nothing: no instance was saturated, so waiting would only add latency.",
            (*evidence, f"Busy at concurrency {most.concurrency}: {100 * most.busy(model.instances):.0f} %."),
        )
    evidence.append(f"At concurrency {full.concurrency} executions had {full.executed:.1f} rows on average.")
    if full.concurrency * full.batch < size:
        return Advice(
            setting, f"Change nothing: the clients were too few to fill {size} rows.", tuple(evidence)
        )
    if full.executed >= size / 2:
        return Advice(
            setting,
            "Change nothing: batches fill by themselves while the instances are busy.",
            tuple(evidence),
        )
    wait = min((size - full.executed) / full.rows_per_s, curve[size])
    evidence.append(
        f"At {full.rows_per_s:,.0f} rows/s the rest of {size} rows arrive in "
        f"{1e6 * (size - full.executed) / full.rows_per_s:,.0f} us; an execution takes {1e6 * curve[size]:,.0f} us."
    )
    if model.budget_ms is not None:
        headroom = (model.budget_ms - full.p99_ms) / 1e3
        evidence.append(f"p99 there is {full.p99_ms:.3g} ms of a budget of {model.budget_ms:g} ms.")
        wait = min(wait, headroom / 2)
    micros = 50 * round(1e6 * wait / 50)
    if micros <= 0:
        return Advice(setting, "Change nothing: there is no time to wait in.", tuple(evidence))
    return Advice(
        setting,
        f"Use {micros} instead of 0.",
        tuple(evidence),
        f"dynamic_batching {{ max_queue_delay_microseconds: {micros} }}{KEEP}",
    )


def _shorter(model: Tuned, row: Sequence[Point], evidence: list[str]) -> Advice:
    """For a model with a delay: whether a lone client waits for nothing longer than the budget allows."""
    setting = "max_queue_delay_microseconds"
    least = min(row, key=lambda point: point.concurrency)
    evidence.append(
        f"At concurrency {least.concurrency} a request waited {least.queue_us:,.0f} us on average and p99 was "
        f"{least.p99_ms:.3g} ms."
    )
    if model.budget_ms is not None and least.p99_ms > model.budget_ms:
        over = 1e3 * (least.p99_ms - model.budget_ms)
        micros = max(0, 50 * math.floor((model.delay_us - over) / 50))
        return Advice(
            setting,
            f"Use {micros} instead of {model.delay_us}: under light load the wait alone passes the budget of "
            f"{model.budget_ms:g} ms.",
            tuple(evidence),
            f"dynamic_batching {{ max_queue_delay_microseconds: {micros} }}{KEEP}",
        )
    return Advice(
        setting,
        f"Change nothing: one sweep with a delay of {model.delay_us} us cannot tell what another would do.",
        tuple(evidence),
    )


def row_of_saturated(model: Tuned, row: Sequence[Point]) -> Point | None:
    """The point with the highest throughput of those whose instances were saturated."""
    full = [point for point in row if point.busy(model.instances) >= BUSY]
    return max(full, key=lambda point: point.rows_per_s) if full else None


# ------------------------------------------------------------ instances


def growth(model: Tuned, points: Sequence[Point]) -> tuple[int, float] | None:
    """(size, factor): how much longer executions of one size take with enough clients for all instances than with
    one client. None when no size was seen in both."""
    few = costs([point for point in points if point.concurrency == 1])
    many = costs([point for point in points if point.concurrency >= 2 * model.instances])
    both = sorted(few.keys() & many.keys())
    return (both[0], many[both[0]] / few[both[0]]) if both else None


def instance_advice(model: Tuned, points: Sequence[Point]) -> Advice:
    """The number of instances from how busy they were, whether they slow each other, and the machine's CPU."""
    setting, count = "instance_group", model.instances
    best = max(points, key=lambda point: point.rows_per_s)
    busy = best.busy(count)
    cpu = "unknown" if best.host_cpu is None else f"{100 * best.host_cpu:.0f} %"
    evidence = [
        f"At the best throughput (requests of {best.batch}, concurrency {best.concurrency}) {count} "
        f"instance{'s were' if count > 1 else ' was'} busy {100 * busy:.0f} % of the time, requests waited "
        f"{100 * best.queue_share:.0f} % of theirs, CPU of the machine: {cpu}."
    ]
    grown = growth(model, points)
    if count > 1 and grown is not None:
        size, factor = grown
        evidence.append(f"An execution of {size} took {factor:.2f} times as long with all instances at work.")
        # an execution that takes `factor` times as long beside others is worth 1/factor of one alone
        if count / factor < CONTENTION:
            return Advice(
                setting,
                f"Use 1 instead of {count}: side by side they do hardly more than one.",
                tuple(evidence),
                f"instance_group [ {{ count: 1 kind: {model.kind} }} ]{KEEP}",
            )
    if busy < BUSY:
        who = " The clients themselves were the limit." if best.client_bound else ""
        return Advice(setting, f"Change nothing: the instances were not saturated.{who}", tuple(evidence))
    if best.queue_share < QUEUE_SHARE:
        return Advice(setting, "Change nothing: hardly any requests waited for an instance.", tuple(evidence))
    if best.host_cpu is None or model.kind != "KIND_CPU":
        return Advice(
            setting,
            f"Change nothing yet: requests wait for {count} saturated instance{'s' if count > 1 else ''}, but what the "
            f"device has left was not measured. {count + 1} are worth a measurement.",
            tuple(evidence),
        )
    if best.host_cpu >= CPU_FULL:
        return Advice(setting, "Change nothing: the CPU is what is short, not instances.", tuple(evidence))
    more = min(2 * count, max(count + 1, math.floor(count * CPU_FULL / max(best.host_cpu, 0.01))))
    return Advice(
        setting,
        f"Use {more} instead of {count}: requests wait while the machine has CPU left.",
        tuple(evidence),
        f"instance_group [ {{ count: {more} kind: {model.kind} }} ]{KEEP}",
    )
