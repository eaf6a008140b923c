"""The resources that processes of model instances use, as the kernel counts them at this moment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

PAGE = os.sysconf("SC_PAGE_SIZE")
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessUse:
    """One instance's process now. The last two are 0 when it has just ended."""

    instance: str
    pid: int
    restarts: int  # since the instance was made
    ring: int  # batches and other messages in its ring that it has not read
    copied_bytes: int  # of tensors, on their way to it and back; counted once for each copy
    in_place_bytes: int  # of tensors that crossed without a copy
    resident_bytes: int  # including pages shared with the template process
    cpu_seconds: float


def processes(model: Any) -> list[ProcessUse]:
    """The processes of `model` (a Model), [] where its instances are threads. Trio thread only."""
    found = []
    for instance in model.pool.all:
        process = instance.backend.process()
        if process is not None:
            pid, restarts, ring, copied, in_place = process
            found.append(ProcessUse(instance.name, pid, restarts, ring, copied, in_place, *use(pid)))
    return found


def use(pid: int) -> tuple[int, float]:
    """Resident bytes and seconds of processor time of a process; zeros when it has ended."""
    try:
        with open(f"/proc/{pid}/statm") as statm, open(f"/proc/{pid}/stat") as stat:
            resident = int(statm.read().split()[1])
            fields = stat.read().rpartition(")")[2].split()
    except (OSError, ValueError):
        return 0, 0.0
    return resident * PAGE, (int(fields[11]) + int(fields[12])) / TICKS


def held_bytes(pid: int) -> int:
    """The anonymous memory of a process, with its part of the pages that it shares with what it was forked from; 0 when it
    has ended. Takes milliseconds where that is much."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as rollup:
            return sum(
                int(line.split()[1]) << 10 for line in rollup if line.startswith(("Pss_Anon:", "SwapPss:"))
            )
    except (OSError, ValueError):
        return 0


def allocated_bytes(descriptor: int) -> int:
    """The pages that shared memory has, which may be fewer than its size; 0 for a descriptor that is closed."""
    try:
        return os.fstat(descriptor).st_blocks * 512
    except OSError:
        return 0
