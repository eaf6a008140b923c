"""How many cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """At least 1; fewer than the machine has where the process is bound to some of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
