"""Is a series of memory sizes flat? Judged so that noise does not decide and a slow leak does."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from statistics import median

PAGE = 4096


def resident(pid: int) -> int:
    """Resident bytes of a process now."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


def growth(sizes: list[int]) -> float:
    """Bytes by which equally spaced sizes grow from the first to the last: the median slope over all
    pairs (Theil and Sen), which up to a quarter of wild samples does not move."""
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(sizes), 2)]
    return median(slopes) * (len(sizes) - 1)


def peak(sizes: list[int]) -> float:
    """Bytes by which the largest size lies above the median one."""
    return max(sizes) - median(sizes)
