"""What a process holds, and whether a series of memory sizes is flat: noise does not decide, a slow leak does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

PAGE = 4096


def resident(pid: int) -> int:
    """Resident bytes of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


@dataclass(frozen=True)
class Held:
    """What a server process holds."""

    descriptors: int
    threads: int
    shared: frozenset[str]  # mapped
    children: int

    def within(self, limit: Held) -> bool:
        """Nothing more than `limit`: what was still ending when that was taken may have ended since."""
        return (
            self.descriptors <= limit.descriptors
            and self.threads <= limit.threads
            and self.shared <= limit.shared
            and self.children <= limit.children
        )


def held(pid: int) -> Held:
    """What a process holds now."""
    process = Path(f"/proc/{pid}")
    threads = children = 0
    for task in (process / "task").iterdir():
        try:
            # trio's idle workers are not counted: they end by themselves after ten seconds
            threads += not (task / "comm").read_text().startswith(("Trio thread", "trio.to_thread"))
            children += len((task / "children").read_text().split())
        except OSError:  # it has just ended
            continue
    return Held(
        len(list((process / "fd").iterdir())),
        threads,
        frozenset(re.findall(r"(?:/dev/shm/|/memfd:)\S+", (process / "maps").read_text())),
        children,
    )


def growth(sizes: list[int]) -> float:
    """Bytes by which equally spaced sizes grow from the first to the last: the median slope over all
    pairs (Theil and Sen), which up to a quarter of wild samples does not move."""
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(sizes), 2)]
    return median(slopes) * (len(sizes) - 1)


def peak(sizes: list[int]) -> float:
    """Bytes by which the largest size lies above the median one."""
    return max(sizes) - median(sizes)
