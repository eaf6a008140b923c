"""tools/test_versions.py: which failures are tried a second time, and what is said of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools.test_versions import LEFT_OUT, ROOT, TESTS, outcome_of

ONCE = """
from pathlib import Path
def test_{name}():
    seen = Path(__file__).with_suffix(".{name}")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "text, outcome",
    [
        ("def test_a(): pass", "passed"),
        (ONCE.format(name="a"), "passed, the second time only: test_it.py::test_a"),
        ("def test_a(): assert 1 == 2", "failed (1), twice"),
        (ONCE.format(name="a") + "def test_b(): assert 1 == 2", "failed (1), twice"),
        ("".join(ONCE.format(name=name) for name in "abcd"), "failed (1)"),
        ("import nothing_of_that_name", "failed (1)"),
        ("import os\ndef test_a(): os.abort()", "failed ("),
        (ONCE.format(name="a") + "import os\ndef test_b(): os.abort()", "failed ("),
    ],
    ids=["passes", "fails once", "fails", "one of two", "too many", "no import", "dies", "one dies"],
)
def test_a_few_failures_are_tried_again(tmp_path: Path, text: str, outcome: str) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_it.py").write_text(text)
    got = outcome_of(Path(sys.executable), ["test_it.py"], tmp_path)
    assert got == outcome if not outcome.endswith("(") else got.startswith(outcome) and "twice" not in got


def test_what_is_left_out_is_there() -> None:
    """A file that was renamed would be run again, and nobody would see why it takes longer."""
    for path in LEFT_OUT:
        assert (ROOT / path).is_file() and path.startswith(TESTS)
