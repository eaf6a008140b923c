"""`neptrio trace replay`: runs a Replay and prints its results."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict

import trio

from neptrio.client.client import InferenceError
from neptrio.client.connection import ConnectionLost
from neptrio.traces.reader import opened
from neptrio.traces.replay import Outcome, Plan, Replay, connected

PORTS = {"http": "localhost:8000", "grpc": "localhost:8001"}


class Report:
    """Counts outcomes and prints those that differ from the recording, `limit` of each kind."""

    def __init__(self, limit: int, as_json: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.outputs = self.in_part = 0
        self._limit = limit
        self._json = as_json

    def take(self, outcome: Outcome) -> None:
        """Counts and prints one outcome."""
        kind = ("skipped" if outcome.skipped else "failed" if outcome.failed
                else "different" if outcome.differences else "same")  # fmt: skip
        self.counts[kind] += 1
        self.outputs += outcome.compared
        self.in_part += outcome.in_part
        if outcome.skipped:
            self.reasons[outcome.skipped] += 1
        if kind == "same":
            return
        if self._json:
            print(json.dumps({"result": kind, **asdict(outcome)}))
        elif self.counts[kind] <= self._limit:
            self._print(outcome)

    def _print(self, outcome: Outcome) -> None:
        name = f"request {outcome.number} of {outcome.model}"
        if outcome.request_id:
            name += f" (id {outcome.request_id!r})"
        if outcome.skipped:
            print(f"warning: {name} left out: {outcome.skipped}", file=sys.stderr)
        if outcome.failed:
            print(f"{name} failed: {outcome.failed}")
        for difference in outcome.differences:
            what = f"output '{difference.output}'" if difference.output else "responses"
            if difference.response:
                what = f"response {difference.response + 1}, {what}"
            print(f"{name}: {what} {difference.what}")

    def finish(self) -> int:
        """Prints the summary; returns the exit status."""
        sent = self.counts["same"] + self.counts["different"] + self.counts["failed"]
        if self._json:
            keys = ("same", "different", "failed", "skipped")
            print(json.dumps({"result": "summary", **{key: self.counts[key] for key in keys},
                              "outputs": self.outputs, "outputs_in_part": self.in_part}))  # fmt: skip
        else:
            for kind in ("different", "failed", "skipped"):
                if self.counts[kind] > self._limit:
                    print(f"... and {self.counts[kind] - self._limit} more {kind}")
            print(
                f"{sent} requests replayed: {self.counts['same']} as recorded, {self.counts['different']} different, "
                f"{self.counts['failed']} failed; {self.counts['skipped']} left out; {self.outputs} outputs compared"
                + (f", {self.in_part} of them in part" if self.in_part else "")
            )
        if not sent:
            print("error: no request of the trace could be replayed", file=sys.stderr)
            return 2
        return 1 if sent > self.counts["same"] else 0


def replay(options: argparse.Namespace, warn: Callable[[str, str], None]) -> int:
    """Replays every file; returns the exit status: 0 all the same, 1 some differ, 2 it could not be done."""
    report = Report(options.report, options.json)
    plan = Plan(
        options.rtol, options.atol, options.concurrency, options.model_version, frozenset(options.model)
    )
    url = options.url or PORTS[options.protocol]

    async def run() -> None:
        async with connected(options.protocol, url, plan.concurrency) as target:
            replaying = Replay(target, plan, report.take)
            for name in options.files:
                with opened(name) as source:
                    await replaying.run(source, lambda text, name=name: warn(name, text))  # type: ignore[misc]

    try:
        for name in options.files:
            open(name).close()  # an unreadable file is reported before anything is sent
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    problems: list[BaseException] = []
    interrupted = False
    try:
        trio.run(run)
    except* (ConnectionLost, InferenceError, OSError, ValueError) as group:
        problems.append(group)
    except* KeyboardInterrupt:
        interrupted = True
    if interrupted:
        raise KeyboardInterrupt  # alone, as the command expects it
    if not problems:
        return report.finish()
    first: BaseException = problems[0]
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    print(f"error: cannot replay to {url}: {first}", file=sys.stderr)
    if report.counts:
        report.finish()
    return 2
