"""Control groups that limit the memory of models' processes, where the server may make any.

The problem: a limit that a process sets for itself (RLIMIT_DATA) counts what it has mapped, not what it uses, and each
of its own children has another. The choice: where the server runs in a control group (version 2) whose parent was
delegated to it, each such process gets a group beside the server's with `memory.max`.

Rules:
 1. A group with processes in it cannot divide its memory. So groups are made beside the server's own, never in it, and
    the server itself is never moved: who starts it has to delegate the parent (systemd: Delegate=memory and
    DelegateSubgroup=server). Without that there is none, and the process limits itself.
 2. A group belongs to one process and those that it starts. When the process has ended, the others are killed and the
    group is removed.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import time
from pathlib import Path

log = logging.getLogger("neptrio.python")

REMOVE_SECONDS = 2.0  # for the processes of a group to end after they were killed
_numbers = itertools.count(1)


def parent(root: Path = Path("/")) -> Path | None:
    """The group in which groups for models can be made, None where there is none. `root` is where /proc and /sys are."""
    top = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
        if not own or ".." in own.split("/") or not (top / own).is_dir():
            return None
        above = (top / own).parent
        if not os.access(above, os.W_OK) or not os.access(above / "cgroup.procs", os.W_OK):
            return None
        if "memory" not in (above / "cgroup.controllers").read_text().split():
            return None
        given = above / "cgroup.subtree_control"
        if "memory" not in given.read_text().split():
            given.write_text("+memory")
    except OSError:
        return None
    return above


class MemoryGroup:
    """A control group for one process."""

    def __init__(self, path: Path, limit: int) -> None:
        """Makes the group; `limit` in bytes. Raises OSError."""
        self.path = path
        self.limit = limit
        path.mkdir()
        try:
            (path / "memory.max").write_text(str(limit))
            for name, value in (("memory.swap.max", "0"), ("memory.oom.group", "1")):
                with contextlib.suppress(OSError):  # a kernel without swap, or an old one, has no such file
                    (path / name).write_text(value)
        except OSError:
            path.rmdir()
            raise

    def add(self, pid: int) -> None:
        """Moves a process into the group. Raises OSError."""
        (self.path / "cgroup.procs").write_text(str(pid))

    @property
    def exceeded(self) -> bool:
        """The kernel has killed a process of the group because the group used more than its limit."""
        try:
            rows = dict(line.split() for line in (self.path / "memory.events").read_text().splitlines())
        except (OSError, ValueError):
            return False
        return int(rows.get("oom_kill", 0)) > 0

    def remove(self) -> None:
        """Kills what is left in the group and removes it."""
        with contextlib.suppress(OSError):  # Linux before 5.14 has no such file
            (self.path / "cgroup.kill").write_text("1")
        until = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if time.monotonic() > until:
                    log.warning("control group %s cannot be removed: %s", self.path, error)
                    return
            time.sleep(0.01)  # what was killed is still ending


def made(name: str, limit: int) -> MemoryGroup | None:
    """A group for the process of an instance; None where the process has to limit itself."""
    above = parent()
    if above is None:
        return None
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)[:100]
    try:
        return MemoryGroup(above / f"neptrio-{os.getpid()}-{next(_numbers)}-{safe}", limit)
    except OSError as error:
        log.warning("no control group can be made for '%s', its process limits itself: %s", name, error)
        return None
