"""Settings for the whole suite.

Generated examples are the same in every run, so that a change is judged by its own effect;
HYPOTHESIS_PROFILE=explore draws new ones.
"""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import Phase, settings

if (
    signal.getsignal(signal.SIGINT) == signal.SIG_IGN
):  # a shell's background job, whose children would ignore it, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # some tests import ONNX Runtime themselves

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None)
# whether a failure is found is all that tools/mutants.py asks
settings.register_profile(
    "mutants",
    derandomize=True,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],
    report_multiple_bugs=False,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))

# what takes longer on a quiet machine has the mark `slow`: `make test` leaves it to `make test-all`
QUICK_SECONDS = 0.25


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that lack the mark `slow`, with NEPTRIO_DURATIONS=1: whether a machine is quiet, only people know."""
    if os.environ.get("NEPTRIO_DURATIONS") != "1":
        return
    passed = [report for report in terminalreporter.stats.get("passed", []) if report.when == "call"]
    late = [one for one in passed if one.duration > QUICK_SECONDS and "slow" not in one.keywords]
    terminalreporter.section(f"longer than {QUICK_SECONDS} s without the mark `slow`: {len(late)} tests")
    for one in sorted(late, key=lambda one: -one.duration):
        terminalreporter.write_line(f"{one.duration:7.2f} s {one.nodeid}")
