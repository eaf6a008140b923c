"""The process's limit of open file descriptors, and who may take the last one."""

from __future__ import annotations

import os
import resource
import threading

# Held by a thread of the server's own while it opens files again and again, and by who gives a descriptor up for a
# moment to have it back at once: between the two system calls, the other would take it.
taking = threading.Lock()

MOST = 1 << 20  # more than the ports of a machine; some systems set no limit at all


def raise_limit() -> None:
    """Raises the soft limit to the hard limit, but not above MOST."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):
            pass  # some systems refuse values below the hard limit they report


def some_left() -> bool:
    """Whether the process can open a file now."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError:
        return False
    return True


def limit() -> int:
    """The current soft limit, at most MOST."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(soft, MOST)
