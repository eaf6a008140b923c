"""What is generated is current: src/neptrio/_proto is what `make proto` writes, diagrams are what tools draw."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_generated_code_is_current(tmp_path: Path) -> None:
    out = tmp_path / "proto"
    subprocess.run([sys.executable, str(ROOT / "tools" / "gen_proto.py"), "--out", str(out)], check=True)
    fresh = sorted(p.relative_to(out) for p in out.rglob("*") if p.is_file())
    assert fresh, "the generator wrote nothing"
    stale = [
        str(path)
        for path in fresh
        if not filecmp.cmp(out / path, ROOT / "src" / "neptrio" / "_proto" / path, shallow=False)
    ]
    assert stale == [], "run `make proto`"


def test_the_kinds_on_the_rings_are_current() -> None:
    tool = ROOT / "tools" / "gen_kinds.py"
    checked = subprocess.run(
        [sys.executable, str(tool), "--check"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stderr


def diagram(page: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "sequence_diagram.py"), "--check", "--page", str(page)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_sequence_diagram_is_current(tmp_path: Path) -> None:
    page = ROOT / "docs" / "sequences.md"
    checked = diagram(page)
    assert checked.returncode == 0, checked.stderr
    # a row that the page does not have is noticed
    stale = tmp_path / "sequences.md"
    text = page.read_text(encoding="utf-8")
    assert "| ENDING | EMPTY | GONE | release |\n" in text
    stale.write_text(text.replace("| ENDING | EMPTY | GONE | release |\n", ""), encoding="utf-8")
    checked = diagram(stale)
    assert checked.returncode == 1 and "tools/sequence_diagram.py" in checked.stderr
