"""What a plain start does without: modules that only some clients, models or settings need."""

from __future__ import annotations

import subprocess
import sys

LATER = ("asyncio", "betterproto2", "cuda", "h2", "hypercorn", "onnxruntime", "opentelemetry", "pydantic")


def test_a_plain_start_imports_no_more_than_it_needs() -> None:
    code = f"from neptrio import cli, server; import sys; print(sorted({set(LATER)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
