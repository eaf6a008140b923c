"""Measures the memory that loading a model takes, and gives it back after an unload (memory_usage in the statistics).

The number estimates what an unload gives back. For CPU memory it is the growth of the process's anonymous resident
memory during the load, and what the processes of the version's instances hold, with their shared memory
(observe.processes). Mapped files (libraries, memory-mapped weights) are not counted, as most of them stay or cost nothing
to drop. Memory that the allocator had free and used again is not seen. A backend with accounts of its own (pinned pools,
GPU memory) adds them through Backend.memory_usage().

Nobody can say which of the loads that overlap has taken a page. They share the growth of that time by weight, so that
all loads together never claim more than the whole growth: the size of the version's files, nothing for models whose
instances are processes, something for those whose code may allocate whatever it likes here. Without any weights the
parts are equal.

A server that starts begins all of its loads at once, thousands, so that nothing may be done for each of them whenever one
begins or ends: the growth is added up for a byte of weight and for a load without, and what a load was there for is its
share (a whole number of parts of a byte, so that nothing gets lost).

What unloads free in that time would make the growth too small. So each says how much its load took before it begins: what the
process shrinks by until it has ended is taken for that, and what is missing then was allocated again by loads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neptrio import process_parts
from neptrio.errors import TritonError
from neptrio.loop import allocator, collector
from neptrio.loop.allocator import anonymous_resident_bytes


def give_back(with_cycles: bool) -> None:
    """Returns the allocator's free pages to the system where it can do that (glibc), after unloads.

    `with_cycles`: Python code of an unloaded model ran in this process. Its modules and classes refer to themselves, so
    what is left of them is collected first. Of other models reference counts have freed all.
    """
    if with_cycles:
        collector.look_at_all()
    allocator.give_back()


PARTS = 1 << 64  # of a byte, in which shares are counted


class Load:
    """One load being measured. Its share is `taken` and what has come since the probe's sums were as they are noted here."""

    def __init__(self, for_weight: int, for_each: int) -> None:
        self.weight = 0  # bytes that it is expected to take
        self.taken = 0
        self.for_weight = for_weight
        self.for_each = for_each


class Release:
    """An unload under way."""

    def __init__(self, size: int) -> None:
        self.left = size  # bytes that its load took, and that the process has not shrunk by


class MemoryProbe:
    """Divides the growth of the process's memory among the loads under way. One thread only."""

    def __init__(self, measure: Callable[[], int] = anonymous_resident_bytes) -> None:
        self._measure = measure
        self._loads = 0
        self._weight = 0  # of all loads
        self._for_weight = 0  # the growth of all times for each byte of weight
        self._for_each = 0  # the growth of all times without weights for each load
        self._releases: list[Release] = []
        self._last = 0

    def _share(self) -> None:
        now = self._measure()
        growth = now - self._last
        for release in self._releases:
            if growth >= 0:
                break
            freed = min(-growth, release.left)
            release.left -= freed
            growth += freed
        if self._weight:
            self._for_weight += growth * PARTS // self._weight
        elif self._loads:
            self._for_each += growth * PARTS // self._loads
        self._last = now

    def _settle(self, load: Load) -> int:
        """The load's share so far."""
        load.taken += load.weight * (self._for_weight - load.for_weight) + self._for_each - load.for_each
        load.for_weight, load.for_each = self._for_weight, self._for_each
        return load.taken

    def releasing(self, size: int) -> Release:
        """An unload begins that will free so many bytes; released() ends it."""
        self._share()
        release = Release(size)
        self._releases.append(release)
        return release

    def released(self, releases: list[Release]) -> None:
        """These unloads have freed all that they will."""
        self._share()
        for release in releases:
            self._releases.remove(release)
            self._last -= release.left

    @contextmanager
    def measure(self) -> Iterator[Measured]:
        """Measures memory and time of the load in the block."""
        load, start = self.begin(), time.monotonic()
        measured = Measured(self, load)
        try:
            yield measured
        finally:
            measured.cpu_bytes = self.end(load)
            measured.seconds = time.monotonic() - start

    def begin(self) -> Load:
        """Starts measuring a load."""
        self._share()
        self._loads += 1
        return Load(self._for_weight, self._for_each)

    def weigh(self, load: Load, size: int) -> None:
        """The load is expected to take so many bytes of this process, which counts for the time since anything began or
        ended."""
        self._settle(load)
        self._weight += size - load.weight
        load.weight = size

    def end(self, load: Load) -> int:
        """The load has ended, successfully or not; returns the bytes it took, at least 0."""
        self._share()
        self._loads -= 1
        self._weight -= load.weight
        return max(0, (self._settle(load) + PARTS // 2) // PARTS)


class Measured:
    """Memory and seconds of the load in a block under MemoryProbe.measure(); set when the block ends."""

    def __init__(self, probe: MemoryProbe, load: Load) -> None:
        self._probe = probe
        self._load = load
        self.cpu_bytes = 0
        self.seconds = 0.0

    def weigh(self, size: int) -> None:
        """The load is expected to take so many bytes of this process."""
        self._probe.weigh(self._load, size)


def usage(cpu_bytes: int, own: list[tuple[str, int, int]]) -> list[dict[str, object]]:
    """The $memory_usage objects: the measured CPU growth and the backend's (type, id, bytes); zeros are left out."""
    sums: dict[tuple[str, int], int] = {}
    for kind, id_, size in [("CPU", 0, cpu_bytes), *own]:
        sums[kind, id_] = sums.get((kind, id_), 0) + size
    return [{"type": k, "id": i, "byte_size": size} for (k, i), size in sorted(sums.items()) if size > 0]


def pinned_pools(limit: int) -> tuple[int, int]:
    """(total, used) bytes of the pinned memory pools: `limit` for each GPU that models use. The first GPU's
    counts even before a model uses it, as in a Triton server's report."""
    devices = list(process_parts.gpus.values())
    return limit * max(1, len(devices)), sum(d.pinned.used for d in devices)


def device_pools() -> list[tuple[str, int, int]]:
    """(uuid, reserved bytes, used bytes) of the memory pool of each GPU that models use."""
    rows = []
    for _, device in sorted(process_parts.gpus.items()):
        try:
            statistics = device.statistics()
        except TritonError:
            continue  # its context broke during the call
        rows.append((device.uuid, statistics.pool_reserved, statistics.pool_used))
    return rows
