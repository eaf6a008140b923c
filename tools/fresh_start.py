"""Measures how long a new user waits: from an empty folder to the first answered request.

    python tools/fresh_start.py [--source URL_OR_FOLDER] [--python PYTHON]

Clones the source (by default the repository that this file lies in, as committed), then does what
`make run` does, step by step in the Makefile's own targets, and prints the seconds of each. Nothing is
shared with this checkout: the clone has its own environment and builds its own modules. Packages come
from where pip is set up to find them, so the figure holds for this machine and its network; say both
when quoting it. The second column is processor time: on a machine that does something else as well it
says more than the first.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = {
    "environment and system libraries": ".venv/.system",
    "packages that running needs": ".venv/.deps",
    "modules translated and compiled": ".venv/.built",
}
FLAGS = (
    "--http-address=127.0.0.1 --grpc-address=127.0.0.1 --metrics-address=127.0.0.1 "
    "--http-port=0 --grpc-port=0 --metrics-port=0"
)
SERVE_SECONDS = 120
REST = "REST     on "


def children() -> float:
    """Processor seconds of the child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Times:
    """The seconds of each step, in order."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float]] = []

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begun, used = time.monotonic(), children()
        yield
        self.rows.append((name, time.monotonic() - begun, children() - used))

    def table(self) -> str:
        rows = [*self.rows, ("in all", sum(r[1] for r in self.rows), sum(r[2] for r in self.rows))]
        width = max(len(name) for name, _, _ in rows)
        return "\n".join(
            f"{name:<{width}}  {seconds:6.1f} s  {used:6.1f} s of processors" for name, seconds, used in rows
        )


def address_of(log: Path, server: subprocess.Popen[bytes]) -> str:
    """The REST address that the server names in its log when it serves. Raises SystemExit if it ends before."""
    deadline = time.monotonic() + SERVE_SECONDS
    while time.monotonic() < deadline:
        lines = log.read_text().splitlines()
        if any(line.strip().endswith("serving") for line in lines):
            return next(line.partition(REST)[2].split()[0] for line in lines if REST in line)
        if server.poll() is not None:
            break
        time.sleep(0.02)
    raise SystemExit(f"the server does not serve:\n{log.read_text()[-3000:]}")


def first_request(base: str) -> None:
    """README's first request: `simple` of the example repository."""
    body = json.dumps(
        {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": list(range(16))},
                    {"name": "INPUT1", "datatype": "INT32", "shape": [1, 16], "data": [1] * 16}]}
    ).encode()  # fmt: skip
    with urllib.request.urlopen(f"{base}/v2/models/simple/infer", body, timeout=60) as answer:
        assert json.load(answer)["outputs"], "an answer has outputs"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", default=str(ROOT), help="what git clones")
    parser.add_argument("--python", default=sys.executable, help="the interpreter that make is given")
    options = parser.parse_args()
    times = Times()
    with tempfile.TemporaryDirectory(prefix="neptrio-fresh-") as folder:
        clone, log = Path(folder) / "neptrio", Path(folder) / "log"
        with times.step("git clone"):
            subprocess.run(["git", "clone", "-q", options.source, clone], check=True)
        make = ["make", "-s", f"PYTHON={options.python}"]
        for name, target in STEPS.items():
            with times.step(name):
                subprocess.run([*make, target], cwd=clone, check=True)
        with times.step("example models, start, first answer"), log.open("wb") as stderr:
            server = subprocess.Popen(
                [*make, "run", f"ARGS={FLAGS}"],
                cwd=clone,
                stderr=stderr,
                stdout=stderr,
                start_new_session=True,
            )
            try:
                first_request(address_of(log, server))
            finally:
                os.killpg(server.pid, signal.SIGTERM)
                server.wait(60)
    print(times.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
