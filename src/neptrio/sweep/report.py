"""`neptrio explain MODEL --plot`: flags, the sweep, the page, and the summary on the terminal."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from neptrio.client.client import InferenceError
from neptrio.client.connection import ConnectionLost
from neptrio.errors import InvalidArgument
from neptrio.sweep.advice import Advice, Point, Tuned, advise
from neptrio.sweep.inputs import Inputs, rows_of
from neptrio.sweep.measure import Plan, Target, chosen_batches
from neptrio.sweep.page import config_lines, html, notes

CLIENTS = (1, 2, 4, 8, 16, 32)
NAMES = ("seconds", "concurrency", "batch_sizes", "latency_budget_ms", "shape", "input_data", "sequence_length",
         "metrics_url")  # fmt: skip


def numbers(text: str) -> tuple[int, ...]:
    """A flag's list of numbers above 0, ascending, each once."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise argparse.ArgumentTypeError(f"expected numbers above 0 with commas between them, got '{text}'")
    return tuple(found)


def above_zero(text: str) -> float:
    """A flag's number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return value


def shape(text: str) -> tuple[str, tuple[int, ...]]:
    """NAME:1,224,224"""
    name, _, dims = text.rpartition(":")
    if not name or not re.fullmatch(r"\d+(,\d+)*", dims):
        raise argparse.ArgumentTypeError(f"expected NAME:DIM,DIM,..., got '{text}'")
    return name, tuple(map(int, dims.split(",")))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that go with --plot."""
    group = parser.add_argument_group("measuring a running server")
    add = group.add_argument
    add("--plot", nargs="?", const="", metavar="FILE.html",
        help="measure latency and throughput, write a page and recommend settings (default: MODEL.html)")  # fmt: skip
    add("--seconds", type=above_zero, metavar="N", help="measure every point so long (default: 1)")
    add("--concurrency", type=numbers, metavar="N,N,...",
        help=f"clients at a time (default: {','.join(map(str, CLIENTS))})")  # fmt: skip
    add("--batch-sizes", type=numbers, metavar="N,N,...",
        help="rows per request (default: powers of two up to max_batch_size, at most 128)")  # fmt: skip
    add("--latency-budget-ms", type=above_zero, metavar="X", help="what the 99th percentile may be")
    add("--shape", type=shape, action="append", metavar="NAME:1,224,224",
        help="dims of an input without the batch dimension, where the model's are variable; repeatable")  # fmt: skip
    add("--input-data", type=Path, metavar="FILE", help='real inputs: {"data": [{"INPUT": [...]}, ...]}')
    add("--sequence-length", type=int, metavar="N", help="requests of a sequence (default: 16)")
    add("--metrics-url", metavar="HOST:PORT",
        help="where a server on another machine tells nv_cpu_utilization")  # fmt: skip


def unused(options: argparse.Namespace) -> list[str]:
    """The flags that were given and mean something with --plot only."""
    return [f"--{name.replace('_', '-')}" for name in NAMES if getattr(options, name) is not None]


def _private(path: str, flags: int) -> int:
    """An opener for open(): the page tells how much a server can take."""
    return os.open(path, flags, 0o600)


def _can_be_written(file: str) -> bool:
    place = file if os.path.exists(file) else os.path.dirname(file) or "."
    return not os.path.isdir(file) and os.access(place, os.W_OK)


def plot(options: argparse.Namespace) -> int:
    """Measures, writes the page, prints the summary. Returns 0, or 1 when the sweep could not be made or finished."""
    points: list[Point] = []
    error = ""
    file = options.plot or re.sub(r"[^\w.-]", "_", options.model) + ".html"
    if not _can_be_written(file):  # said before minutes of measuring
        print(f"error: '{file}' cannot be written: --plot=FILE.html names another", file=sys.stderr)
        return 1
    try:
        with closing(Target(options.url, options.model, options.metrics_url or "")) as target:
            model = target.tuned(options.latency_budget_ms)
            rows = (
                rows_of(options.input_data, target.metadata, model.max_batch_size > 0)
                if options.input_data
                else []
            )
            inputs = Inputs(target.metadata, target.config, dict(options.shape or ()), rows)
            length = 16 if options.sequence_length is None else options.sequence_length
            if length < 1:
                raise InvalidArgument(f"--sequence-length: expected a number above 0, got {length}")
            plan = Plan(
                # a request of a sequence has one row
                chosen_batches(
                    options.batch_sizes or (), 1 if model.scheduler == "sequence" else model.max_batch_size
                ),
                options.concurrency or CLIENTS,
                options.seconds or 1.0,
                length,
            )
            count = len(plan.points())
            print(
                f"Measuring '{model.name}' at {count} points, about {count * plan.seconds * 1.25:.0f} s; Ctrl-C ends it "
                "early."
            )
            print(HEAD, flush=True)
            try:
                for point in target.sweep(plan, inputs):
                    points.append(point)
                    print(_row(point), flush=True)
            except (InferenceError, ConnectionLost) as reason:
                error = str(reason)
            except KeyboardInterrupt:
                error = f"stopped after {len(points)} of {count} points"
            how = _how(target, plan, inputs, options, points)
    except ConnectionLost as reason:
        error = f"no answer from a server at {reason} (--url=HOST:PORT names another)"
    except (InferenceError, InvalidArgument, OSError, ValueError) as reason:
        error = str(reason)
    if points:
        advices = advise(model, points)
        try:
            with open(file, "w", encoding="utf-8", opener=_private) as out:
                out.write(html(model, target.version, points, advices, how))
        except OSError as reason:
            print(f"error: {reason}", file=sys.stderr)
            return 1
        _summary(model, points, advices)
        print(f"{file}: {len(points)} points")
    if error:
        print(f"error: {error}", file=sys.stderr)
    return 1 if error else 0


HEAD = "  rows clients  requests/s      rows/s   p50 ms   p90 ms   p99 ms  rows/exec  queue us  compute us"


def _row(point: Point) -> str:
    text = notes(point)
    return (
        f"{point.batch:6} {point.concurrency:7} {point.requests_per_s:11,.1f} {point.rows_per_s:11,.1f} "
        f"{point.p50_ms:8.3f} {point.p90_ms:8.3f} {point.p99_ms:8.3f} {point.executed:10.2f} {point.queue_us:9,.0f} "
        f"{point.compute_us:11,.0f}" + (f"  ({text})" if text else "")
    )


def _how(
    target: Target, plan: Plan, inputs: Inputs, options: argparse.Namespace, points: Sequence[Point]
) -> list[str]:
    """Sentences about how the figures came about."""
    lines = [
        f"Closed-loop clients over HTTP against {options.url}: each sends its next request when it has its answer. Every "
        f"point was measured for {plan.seconds:g} s after a warm-up of {plan.seconds / 4:g} s, and once more if its "
        "halves differed by more than a tenth.",
        "Inputs are those of " + options.input_data.name + "."
        if options.input_data
        else 'Inputs were made up: floats random in [0, 1), integers 0, booleans false, strings "0".',
    ]
    if inputs.left_out:
        lines.append(f"Optional inputs that were left out: {', '.join(inputs.left_out)}.")
    if target.decoupled:
        lines.append("The model is decoupled: a request counts once, when its last response has come.")
    if target.config.get("sequence_batching") is not None:
        lines.append(f"Each client sends sequences of {plan.sequence_length} requests, one after the other.")
    if any(point.client_bound for point in points):
        lines.append(
            "At some points the clients' own process was the limit; there the server could have done more."
        )
    return lines


def best_point(model: Tuned, points: Sequence[Point]) -> Point | None:
    """The usable point with the most inferences per second, of those within the budget."""
    fitting = [p for p in points if p.usable and (model.budget_ms is None or p.p99_ms <= model.budget_ms)]
    return max(fitting, key=lambda point: point.rows_per_s, default=None)


def _summary(model: Tuned, points: Sequence[Point], advices: Sequence[Advice]) -> None:
    best = best_point(model, points)
    within = "" if model.budget_ms is None else f" with p99 within {model.budget_ms:g} ms"
    if best is not None:
        print(
            f"Most inferences per second{within}: {best.rows_per_s:,.0f}, by {best.concurrency} "
            f"client{'s' if best.concurrency > 1 else ''} with {best.batch} row{'s' if best.batch > 1 else ''} per request (p99 {best.p99_ms:.3f} ms)."
        )
    elif within:
        print(f"No point had its p99 within {model.budget_ms:g} ms.")
    for advice in advices:
        print(textwrap.fill(f"{advice.setting}: {advice.text}", 100, subsequent_indent="  "))
        for text in advice.evidence:
            print(textwrap.fill(text, 100, initial_indent="  - ", subsequent_indent="    "))
    if lines := config_lines(advices):
        print(
            "For config.pbtxt, in place of what is there (each was judged alone: measure again after a change):"
        )
        for line in lines:
            print(f"  {line}")
