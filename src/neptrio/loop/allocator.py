"""Free memory stays with the process while it works, and goes back to the system when it rests.

The problem: glibc gives the end of its heap back as soon as a little is free there, on the thread that frees. For the
loop that is half a millisecond behind a body of 2 MiB, and longer while a worker frees, because the allocator's
lock is held meanwhile. The next body finds pages that the system must clear again, 0.3 ms per MiB, most of it
inside the loop's own recv(). The choice: what is freed is kept, and a thread gives it back when no large work has
come for a while. Then it is in nobody's way.

Rules:
 1. Only a process of our own is set up so: never the program that embeds a server, nor one whose environment says
    how its allocator is to be (OWN_WISHES).
 2. free() gives nothing back but what was too large for the heap (LARGEST), which is mapped for itself.
 3. What the process has grown by since it last gave back goes back after CALM_LOOKS looks without large work, all of
    it; beside work that does not end, what exceeds MUCH, every BUSY_LOOKS looks, but for KEPT of it.
 4. It is given back in steps: who allocates waits for one of them at most. Holes between what is in use are one step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from functools import cache

import trio

from neptrio.loop import threads

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
NEVER = (1 << 31) - 1  # bytes that are free at the end of the heap
LARGEST = 32 << 20  # glibc refuses more
OWN_WISHES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")

LOOK_SECONDS = 1.0
CALM_LOOKS = 2
BUSY_LOOKS = 10
LITTLE = 4 << 20  # bytes of growth that are not worth the work
MUCH = 256 << 20
KEPT = 64 << 20
STEP = 2 << 20  # bytes; about half a millisecond

PAGE = os.sysconf("SC_PAGE_SIZE")


class _MallInfo(ctypes.Structure):
    """mallinfo2 of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",  # bytes that are free at the end of the heap
        )
    ]


@cache
def _library() -> ctypes.CDLL:
    """The C library. Each such object refers to itself, so there is one. Raises OSError."""
    return ctypes.CDLL(None)


def anonymous_resident_bytes() -> int:
    """The process's resident memory in bytes without mapped files; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * PAGE


_keeps = False  # set_up() has made it so that free() gives nothing back


def set_up() -> None:
    """Sets the allocator up (rules 1 and 2), before threads start, where the C library has something of the kind (glibc).

    All threads allocate from one arena, unless MALLOC_ARENA_MAX is set. glibc gives threads arenas of their own (up to 8 per
    core), and malloc_trim() shrinks only the top of the first one. Each other arena keeps up to 64 MiB of freed memory, so a
    server that loads and unloads models on changing threads would grow by a model's size per arena.
    """
    global _keeps
    try:
        mallopt = _library().mallopt
    except (AttributeError, OSError):
        return
    if "MALLOC_ARENA_MAX" not in os.environ:
        mallopt(M_ARENA_MAX, 1)
    if not any(name in os.environ for name in OWN_WISHES):
        _keeps = bool(mallopt(M_MMAP_THRESHOLD, LARGEST) and mallopt(M_TRIM_THRESHOLD, NEVER))


def give_back(keep: int = 0) -> None:
    """Returns the allocator's free pages to the system where it can do that (glibc), all but `keep` bytes at the heap's
    end, in steps. Without the GIL; milliseconds in all."""
    library = _library()
    try:
        trim = library.malloc_trim
    except AttributeError:
        return
    trim.argtypes = (ctypes.c_size_t,)
    try:
        library.mallinfo2.restype = _MallInfo
        at_end = int(library.mallinfo2().keepcost)
    except AttributeError:
        at_end = 0  # an older one: in one step
    for left in range(at_end - STEP, keep, -STEP):
        trim(left)
    trim(keep)


class FreeMemory:
    """Decides when to give back, and how much to keep."""

    def __init__(self, resident: int) -> None:
        """`resident`: what the process has now, in bytes."""
        self._since = resident  # as it was when memory was last given back
        self._work = -1
        self._calm = 0
        self._busy = 0

    def look(self, resident: int, work: int) -> int | None:
        """Called every LOOK_SECONDS; None: nothing is to be given back now. `work` changes with each piece of large work. After
        giving back, gave_back() is to be called."""
        calm = work == self._work
        self._work = work
        self._calm = self._calm + 1 if calm else 0
        self._busy += 1
        grown = resident - self._since
        if self._calm >= CALM_LOOKS:
            return 0 if grown > LITTLE else None
        if self._busy >= BUSY_LOOKS and grown > MUCH:
            return KEPT
        return None

    def gave_back(self, resident: int) -> None:
        """That is done, and so much is left."""
        self._since = resident
        self._busy = 0


async def give_back_at_rest(work: Callable[[], int]) -> None:
    """Gives memory back by rule 3 until it is cancelled, if set_up() has been called; see FreeMemory.look() for `work`."""
    if not _keeps:
        return
    memory = FreeMemory(anonymous_resident_bytes())
    while True:
        await trio.sleep(LOOK_SECONDS)
        keep = memory.look(anonymous_resident_bytes(), work())
        if keep is not None:
            try:
                await threads.run(give_back, keep, abandon_on_cancel=True)
            except threads.NoThread:
                continue
            memory.gave_back(anonymous_resident_bytes())
