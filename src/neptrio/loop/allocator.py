"""The C library's allocator: free memory goes back to the system after the unload of a model.

The problem: glibc keeps large blocks in its heap once some of their size were freed. Where models of different sizes come and
go, the weights of one are then cut out of the hole that another has left, and what is too small for the next load stays: a
process that held 50 MiB of weights was seen to take 90. The choice: while models are loaded, what is large is mapped by
itself, and goes back to the system when it is freed. Between loads large blocks, which are requests' then, stay in the heap,
where they cost no page faults.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # of malloc.h
PAGE = os.sysconf("SC_PAGE_SIZE")
LARGE_WEIGHTS = 256 << 10  # bytes of a block that is mapped by itself while models are loaded
LARGE_OTHERS = (
    32 << 20
)  # and otherwise: the largest that glibc, which learns it from what is freed, would come to
KEPT_FREE = 64 << 20  # at the heap's end, as glibc has it for blocks of that size

_ours = False  # set_up() was called in this process
_loading = 0  # loads under way
_lock = threading.Lock()


@cache
def _library() -> ctypes.CDLL:
    """The C library. Each such object refers to itself, so there is one. Raises OSError."""
    return ctypes.CDLL(None)


def set_up() -> None:
    """Sets the allocator up, before threads start, where the C library has something of the kind (glibc). Only for a process
    of our own, never the program that embeds a server.

    All threads allocate from one arena, unless MALLOC_ARENA_MAX is set. glibc gives threads arenas of their own (up to 8 per
    core), and malloc_trim() shrinks only the top of the first one. Each other arena keeps up to 64 MiB of freed memory, so a
    server that loads and unloads models on changing threads would grow by a model's size per arena.
    """
    global _ours
    _ours = True
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    _set(M_ARENA_MAX, 1)


def is_set_up() -> bool:
    """Whether set_up() was called: this process is the server's alone."""
    return _ours


@contextmanager
def mapping_weights() -> Iterator[None]:
    """While a model is loaded in the block, large blocks are mapped by themselves. Any thread; not in a process that embeds a
    server, nor where MALLOC_MMAP_THRESHOLD_ is set."""
    global _loading
    if not _ours or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        yield
        return
    with _lock:
        _loading += 1
        if _loading == 1:
            _set(M_MMAP_THRESHOLD, LARGE_WEIGHTS)
    try:
        yield
    finally:
        with _lock:
            _loading -= 1
            if not _loading:
                _set(M_MMAP_THRESHOLD, LARGE_OTHERS)
                _set(M_TRIM_THRESHOLD, KEPT_FREE)


def _set(parameter: int, value: int) -> None:
    try:
        _library().mallopt(parameter, value)
    except (AttributeError, OSError):
        pass


def give_back() -> None:
    """Returns the allocator's free pages to the system where it can do that (glibc). Without the GIL; milliseconds."""
    try:
        _library().malloc_trim(0)
    except (AttributeError, OSError):
        pass


def anonymous_resident_bytes() -> int:
    """The process's resident memory in bytes without mapped files; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            fields = file.read().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * PAGE
