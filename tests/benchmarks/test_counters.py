"""The counters' benchmark runs and prints a cost for everything it promises."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_it_prints_every_cost() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.counters", "--requests=200", "--rounds=1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[:3]] == [
        "per request", "per decoupled response and request", "per execution",
    ]  # fmt: skip
    assert all(line.split()[-2].replace(".", "").isdigit() for line in lines[3:]) and len(lines) == 6
