"""How much memory this process may have: what its control groups allow (a container's limit), or else the machine's.

Limits of the server are shares of it. In a container the machine's memory is a neighbour's: a server that holds half of
that is killed by the kernel long before it refuses anything.

Control groups lie in each other, and the smallest limit on the way up counts. Both versions are read, because a machine
may have either, or both with memory under the first. Inside a container the own group is often the top of what can be
seen, whatever path /proc shows for it: groups that are not there are passed over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def physical() -> int:
    """The machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_limit(root: Path = Path("/")) -> int:
    """Bytes that this process may use: of its control groups or the machine, whichever is less.

    `root` is where /proc and /sys are.
    """
    return min([physical(), *_limits(root)])


def share(part: int, at_least: int) -> int:
    """A `part`-th of memory_limit() in bytes; where no control group has a limit, at least `at_least`."""
    limit, machine = memory_limit(), physical()
    return limit // part if limit < machine else max(machine // part, at_least)


def _limits(root: Path) -> Iterator[int]:
    """The limits of the process' group and of those around it; none where there are no control groups."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in kinds.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(path.lstrip("/"))
        for one in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit
                yield int((top / one / name).read_text())
