"""The generated code in src/neptrio/_proto is what `make proto` writes."""

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
