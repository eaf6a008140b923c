"""Settings for the whole suite.

Generated examples are the same in every run, so that a change is judged by its own effect;
HYPOTHESIS_PROFILE=explore draws new ones.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import Phase, settings

_durations = None
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


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes what took how long, for NEPTRIO_DURATIONS=FILE."""
    if _durations is not None:
        _durations.write(f"{report.duration:.3f} {report.when} {report.outcome} {report.nodeid}\n")
        _durations.flush()


def pytest_configure(config: pytest.Config) -> None:
    global _durations
    # taken out: the reports of all workers come to this process, and a test that runs pytest is to leave the file alone
    place = os.environ.pop("NEPTRIO_DURATIONS", None)
    if place:
        _durations = open(place, "w")
