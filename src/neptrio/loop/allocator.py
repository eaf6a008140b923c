"""The C library's allocator: free memory goes back to the system after the unload of a model."""

from __future__ import annotations

import ctypes
import os
from functools import cache

M_ARENA_MAX = -8  # of malloc.h
PAGE = os.sysconf("SC_PAGE_SIZE")


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
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    try:
        _library().mallopt(M_ARENA_MAX, 1)
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
