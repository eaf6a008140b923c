"""Whether this run is one of `make test-sanitized`, and what cannot be asked of it."""

from __future__ import annotations

import os

import pytest

SANITIZED = os.environ.get("NEPTRIO_SANITIZED") == "1"
# the sanitizers keep terabytes of address space for their notes, and freed memory for a while
no_memory_figures = pytest.mark.skipif(SANITIZED, reason="memory is another's under the sanitizers")
