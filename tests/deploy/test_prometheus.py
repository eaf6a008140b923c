"""The rules for Prometheus do what rules_test.yaml says, according to Prometheus' own tool."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy" / "prometheus"
PROMTOOL = shutil.which("promtool")
pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool (Debian: prometheus) is not installed")


def promtool(*arguments: str) -> tuple[int, str]:
    done = subprocess.run([str(PROMTOOL), *arguments], capture_output=True, text=True, timeout=60, cwd=FOLDER)
    return done.returncode, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    status, text = promtool("check", "rules", "rules.yaml")
    assert status == 0 and "SUCCESS" in text, text


def test_the_rules_fire_when_they_should() -> None:
    status, text = promtool("test", "rules", "rules_test.yaml")
    assert status == 0, text


def test_every_alert_is_tested_and_explained() -> None:
    alerts = {
        line.split()[-1] for line in (FOLDER / "rules.yaml").read_text().splitlines() if "- alert:" in line
    }
    assert len(alerts) >= 9
    tests = (FOLDER / "rules_test.yaml").read_text()
    page = (FOLDER.parents[1] / "docs" / "production.md").read_text()
    assert [name for name in sorted(alerts) if f"alertname: {name}" not in tests] == []
    assert [name for name in sorted(alerts) if f"`{name}`" not in page] == []


def test_a_rule_that_never_fires_would_be_found(tmp_path: Path) -> None:
    for name in ("rules.yaml", "rules_test.yaml"):
        (tmp_path / name).write_text((FOLDER / name).read_text().replace("> 0.05", "> 0.5"))
    status, text = promtool("test", "rules", str(tmp_path / "rules_test.yaml"))
    assert status != 0 and "NeptrioRequestsFail" in text
