"""What a plain start does without: modules that only some clients, models or settings need."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATER = ("asyncio", "betterproto2", "cuda", "h2", "hypercorn", "onnxruntime", "opentelemetry", "pydantic")


@pytest.mark.slow
def test_a_plain_start_imports_no_more_than_it_needs() -> None:
    code = f"from neptrio import cli, server; import sys; print(sorted({set(LATER)!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_the_first_grpc_call_imports_nothing() -> None:
    """What the first message of a class needs is there when the handlers are: importing it would stop the loop."""
    code = """
import sys
from neptrio.transport.grpc.handler_import import all_handlers
found = all_handlers(None, None)
before = set(sys.modules)
for handler in found.values():
    handler.request_type.parse(b"")
    bytes(handler.reply_type())
print(sorted(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
