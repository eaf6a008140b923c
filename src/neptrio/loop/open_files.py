"""How many descriptors this process may have."""

from __future__ import annotations

import resource

MOST = 1 << 20  # more than a machine has ports for; some systems set no limit at all


def raise_limit() -> None:
    """Raises the soft limit to the hard one, as far as that is of use."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass  # some systems know a lower limit than they say


def limit() -> int:
    """How many descriptors there may be."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
