"""What the README is told of a benchmark run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import report, run

FACTS = {"date": "2026-01-31", "cores": 2, "cpu": "A CPU", "kernel": "6.1.0-x", "python": "3.11.7"}


def test_parts_come_in_order_and_only_those_that_were_measured(tmp_path: Path) -> None:
    for part in ("scale", "table"):
        (tmp_path / f"{part}.json").write_text(json.dumps({"machine": FACTS, "text": f"of {part}\n"}))
    made = report.text(report.results(tmp_path))
    assert made.index("2026-01-31") < made.index("of table") < made.index("### Scale\n\nof scale")
    assert "A CPU, Linux 6.1.0, Python 3.11.7" in made
    assert "Open loop" not in made


def test_only_what_lies_between_the_marks_changes() -> None:
    once = report.filled(f"a\n{report.BEGIN}\nold\n{report.END}\nb\n", "new\n")
    assert once == f"a\n{report.BEGIN}\nnew\n{report.END}\nb\n"
    assert report.filled(once, "new") == once


def test_a_readme_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="once each"):
        report.filled("nothing here", "new")


def test_the_readme_has_its_marks() -> None:
    assert report.filled(report.README.read_text(), "x")


def test_a_missed_target_is_said() -> None:
    case = run.Case("HTTP binary", "binary", "simple", 32, 6)
    found = {case.key: {"neptrio": [{"per_second": 500.0}], "tritonserver": [{"per_second": 100.0}]}}
    assert "| 500 | 100 | 5.00 | >= 6 **missed** |" in run.markdown(
        [case], found, ["neptrio", "tritonserver"]
    )
    found[case.key]["neptrio"][0]["per_second"] = 700.0
    assert "| 700 | 100 | 7.00 | >= 6 |" in run.markdown([case], found, ["neptrio", "tritonserver"])


def test_a_latency_target_is_met_from_below() -> None:
    assert run.verdict(0.4, 0.45, latency=True) == "<= 0.45"
    assert run.verdict(0.5, 0.45, latency=True) == "<= 0.45 **missed**"
    assert run.verdict(None, 0.45, latency=True) == "<= 0.45 **missed**"


def test_the_readme_gets_the_rows_that_have_a_target() -> None:
    content = (
        "Measured.\n\n### Beside a peer\n\n| case | ratio | target |\n|---|---|---|\n| one | 3.64 |  |\n"
        "| two | 5.00 | >= 6 **missed** |\n| three | 0.28 | <= 0.45 |\n\n| other | table | >= 1 |\n"
    )
    made = report.summary(content)
    assert made.startswith("Measured.\n\n| case | ratio | target |\n|---|---|---|\n| two |")
    assert "| one |" not in made and "| three | 0.28 | <= 0.45 |" in made and "| other |" not in made
    assert "the 1 missed targets" in made
