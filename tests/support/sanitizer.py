"""Whether this is a run of `make test-sanitized`, and a mark for tests that cannot run there."""

from __future__ import annotations

import os

import pytest

SANITIZED = os.environ.get("NEPTRIO_SANITIZED") == "1"
# the sanitizers reserve terabytes of address space for their own data, and keep freed memory for a while
no_memory_figures = pytest.mark.skipif(SANITIZED, reason="memory is another's under the sanitizers")
