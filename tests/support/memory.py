"""What a process holds, and whether memory grows over time: noise is ignored, a slow leak is found."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

from tests.support.server import is_front_end

PAGE = 4096


def resident(pid: int) -> int:
    """The resident bytes of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def anonymous(pid: int) -> int:
    """The resident bytes of a process without mapped files."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return (int(fields[1]) - int(fields[2])) * PAGE


@dataclass(frozen=True)
class Held:
    """Resources that a server process holds."""

    descriptors: int
    threads: int
    shared: frozenset[str]  # files and libraries mapped into memory
    children: int

    def within(self, limit: Held) -> bool:
        """True when nothing exceeds `limit`; less is fine, as some of it may have ended since."""
        return (
            self.descriptors <= limit.descriptors
            and self.threads <= limit.threads
            and self.shared <= limit.shared
            and self.children <= limit.children
        )


def held(pid: int) -> Held:
    """The resources that a process holds now."""
    process = Path(f"/proc/{pid}")
    threads = children = 0
    for task in (process / "task").iterdir():
        try:
            # trio's idle worker threads are not counted, because they end by themselves after ten seconds
            threads += not (task / "comm").read_text().startswith(("Trio thread", "trio.to_thread"))
            each = (task / "children").read_text().split()
            children += sum(not is_front_end(int(child)) for child in each)
        except OSError:  # the thread has just ended
            continue
    return Held(
        len(list((process / "fd").iterdir())),
        threads,
        frozenset(re.findall(r"(?:/dev/shm/|/memfd:)\S+", (process / "maps").read_text())),
        children,
    )


def growth(sizes: list[int]) -> float:
    """The bytes by which equally spaced sizes grow from the first to the last, by the median slope over all pairs
    (Theil-Sen), which up to a quarter of outliers do not change."""
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(sizes), 2)]
    return median(slopes) * (len(sizes) - 1)


def peak(sizes: list[int]) -> float:
    """The difference in bytes of the largest size and the median."""
    return max(sizes) - median(sizes)
