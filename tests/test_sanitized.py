"""The tools of docs/memory-safety.md: what they say where they cannot run, and how findings are told apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.sanitized import findings

ROOT = Path(__file__).resolve().parents[1]
UNDEFINED = """cext/x.pyx:12:3: runtime error: load of misaligned address 0x7f12345678 for type 'int'
0x7f12345678: note: pointer points here
    #0 0x7f0000000001 in f cext/x.pyx:12
"""
OVERFLOW = """=================================================================
==17==ERROR: AddressSanitizer: heap-buffer-overflow on address 0x602000000018
    #0 0x7f0000000002 in g cext/y.pyx:3
SUMMARY: AddressSanitizer: heap-buffer-overflow cext/y.pyx:3 in g
"""


@pytest.mark.parametrize("tool", ["sanitized", "fuzz"])
def test_without_sanitizers_it_is_said_that_nothing_was_run(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, f"tools/{tool}.py"],
        cwd=ROOT,
        env={**os.environ, "CC": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and ": NOT RUN, " in done.stdout, done


def test_each_finding_is_told_once(tmp_path: Path) -> None:
    """The same line in two processes is one finding, at other addresses or not."""
    (tmp_path / "report.1").write_text(UNDEFINED + UNDEFINED.replace(":12", ":99"))
    (tmp_path / "report.2").write_text(UNDEFINED.replace("5678", "9999"))
    (tmp_path / "report.3").write_text(OVERFLOW)
    found = findings(tmp_path)
    assert len(found) == 3
    assert [("x.pyx:12" in f, "x.pyx:99" in f, "y.pyx" in f) for f in found] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert findings(tmp_path / "nothing") == []
