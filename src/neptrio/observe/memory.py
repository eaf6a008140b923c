"""What a model's load took, and how it comes back: the statistics extension's memory_usage.

The meaning: an estimate of what an unload returns. CPU is the growth of the process's anonymous
resident memory while the version loaded; mapped files (libraries, memory-mapped weights) are not
in it, as most of them stay or cost nothing to drop. Loads that overlap share what grew while they
overlapped in equal parts, so that all loads together never claim more than what grew. Memory that
the allocator had free before and gave to the model again does not show. A backend that keeps its
own accounts (pinned pools, GPU memory) adds them with Backend.memory_usage().
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neptrio.errors import TritonError

PAGE = os.sysconf("SC_PAGE_SIZE")
M_ARENA_MAX = -8  # of malloc.h


def anonymous_resident_bytes() -> int:
    """The process's resident memory without mapped files; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * PAGE


def keep_one_arena() -> None:
    """Makes every thread allocate from one arena, unless MALLOC_ARENA_MAX is set. Call before threads start.

    glibc gives threads arenas of their own (8 for each core), and malloc_trim() shrinks the top of the
    first one only: each of the others keeps up to 64 MiB of what was freed there, so that a server which
    loads and unloads for ever, every time on another thread, grows by a model's size per arena.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        try:
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
        except (AttributeError, OSError):
            pass  # another C library


def give_back() -> None:
    """Returns what unloaded models held: cycles are collected (the server's collector looks rarely),
    and the allocator's free pages go back to the system where it can do that (glibc).

    Takes a few milliseconds, during the first part of which no other Python code runs.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError):
        pass  # another C library


class Load:
    """One load under measurement; `cpu_bytes` is its share of the growth so far."""

    def __init__(self) -> None:
        self.cpu_bytes = 0.0


class MemoryProbe:
    """Attributes the growth of the process's memory to the loads under way. One thread only."""

    def __init__(self, measure: Callable[[], int] = anonymous_resident_bytes) -> None:
        self._measure = measure
        self._loads: list[Load] = []
        self._last = 0

    def _share(self) -> None:
        now = self._measure()
        for load in self._loads:
            load.cpu_bytes += (now - self._last) / len(self._loads)
        self._last = now

    @contextmanager
    def measure(self) -> Iterator[Measured]:
        """Measures the load in the block: memory and seconds."""
        measured, load, start = Measured(), self.begin(), time.monotonic()
        try:
            yield measured
        finally:
            measured.cpu_bytes = self.end(load)
            measured.seconds = time.monotonic() - start

    def begin(self) -> Load:
        """A load starts."""
        self._share()
        load = Load()
        self._loads.append(load)
        return load

    def end(self, load: Load) -> int:
        """The load is over, done or failed; returns the bytes it took, at least 0."""
        self._share()
        self._loads.remove(load)
        return max(0, int(load.cpu_bytes))


class Measured:
    """What the load under `with MemoryProbe.measure()` took; set when the block ends."""

    def __init__(self) -> None:
        self.cpu_bytes = 0
        self.seconds = 0.0


def usage(cpu_bytes: int, own: list[tuple[str, int, int]]) -> list[dict[str, object]]:
    """The $memory_usage objects: measured CPU growth and the backend's (type, id, bytes), non-zero."""
    sums: dict[tuple[str, int], int] = {}
    for kind, id_, size in [("CPU", 0, cpu_bytes), *own]:
        sums[kind, id_] = sums.get((kind, id_), 0) + size
    return [{"type": k, "id": i, "byte_size": size} for (k, i), size in sorted(sums.items()) if size > 0]


def pinned_pools(limit: int) -> tuple[int, int]:
    """(total, used) bytes of the pinned pools: `limit` for each GPU that models use, and for the first
    one even before a model does, as a Triton server reports its pool."""
    module = sys.modules.get("neptrio.backends.kernel.device")  # loaded by the first model on a GPU
    devices = list(module.Device._open.values()) if module is not None else []
    return limit * max(1, len(devices)), sum(d.pinned.used for d in devices)


def device_pools() -> list[tuple[str, int, int]]:
    """(uuid, reserved, used) bytes of the memory pool of each GPU that models use."""
    module = sys.modules.get("neptrio.backends.kernel.device")
    rows = []
    for _, device in sorted(module.Device._open.items()) if module is not None else ():
        try:
            statistics = device.statistics()
        except TritonError:
            continue  # its context broke just now
        rows.append((device.uuid, statistics.pool_reserved, statistics.pool_used))
    return rows
