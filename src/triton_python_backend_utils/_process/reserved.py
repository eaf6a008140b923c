"""Shared memory that is there when it is written to.

A page of a memory file takes memory when it is first written. Where the system promises no more than it has (strict
overcommit, vm.overcommit_memory=2) there may be none left by then, and whoever writes is ended by SIGBUS. There the pages are
taken when the file is made, and if there are too few that is an error. Elsewhere nothing is promised to anybody, and pages
that are never written take no memory.
"""

from __future__ import annotations

import os

OVERCOMMIT = "/proc/sys/vm/overcommit_memory"


def reserve(fd: int, size: int) -> None:
    """Takes the memory of the first `size` bytes of a file, if the system is strict. Raises OSError."""
    try:
        with open(OVERCOMMIT, "rb") as file:
            strict = file.read().strip() == b"2"
    except OSError:
        strict = False
    if strict and size:
        os.posix_fallocate(fd, 0, size)
