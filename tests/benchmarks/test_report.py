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


def test_the_readme_leads_with_the_same_model_in_both_servers() -> None:
    made = report.summary(report.PAGE.read_text())
    rows = [line for line in made.split("\n") if line.startswith("| ")][1:]
    assert len(rows) == 6
    assert [report.SAME in row for row in rows] == [True] * 4 + [False] * 2
    assert all(report.BUILT_IN in row for row in rows[4:])
    assert "nvidia-pytriton 0.7.0" in made and "Measured 20" in made and "cores" in made
    assert "target" not in made and "missed" not in made


def test_figures_are_those_of_the_row_with_their_unit() -> None:
    page = "Measured 2026-01-31.\n"
    for title in dict.fromkeys(row[0] for row in report.LEADING):
        page += f"\n{title}\n\n"
        for _, _, case, concurrency in (row for row in report.LEADING if row[0] == title):
            us = " us" if "latency" in case else ""
            page += f"| {case} | {concurrency} | 300{us} | 200{us} | 1.50 |  |\n| {case} | 8 | 1 | 1 | 1.00 |  |\n"
    made = report.summary(page)
    assert "| HTTP JSON | 32 | 300/s | 200/s | 1.5 times |" in made
    assert "| 1 | 300 us | 200 us | 0.7 times shorter |" in made
    with pytest.raises(ValueError, match="no row 'HTTP JSON', 32"):
        report.summary(page.replace("| HTTP JSON | 32 |", "| HTTP JSON | 33 |"))


def test_the_readme_shows_the_page_s_figures() -> None:
    readme = report.README.read_text()
    assert report.filled(readme, report.summary(report.PAGE.read_text())) == readme
