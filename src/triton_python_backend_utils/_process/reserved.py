"""Shared memory that keeps its size, and that is there when it is written to.

A page of a memory file takes memory when it is first written. Where the system promises no more than it has (strict
overcommit, vm.overcommit_memory=2) there may be none left by then, and whoever writes is ended by SIGBUS. There the pages are
taken when the file is made, and if there are too few that is an error. Elsewhere nothing is promised to anybody, and pages
that are never written take no memory. Whoever reads beyond the end of a file that was shortened is ended, too: so it is sealed.
"""

from __future__ import annotations

import fcntl
import os

OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
# the kernel's numbers: the module fcntl has their names from Python 3.9 on
F_ADD_SEALS = 1033
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4


def reserve(fd: int, size: int) -> None:
    """Takes the memory of the first `size` bytes of a file, if the system is strict. Raises OSError."""
    try:
        with open(OVERCOMMIT, "rb") as file:
            strict = file.read().strip() == b"2"
    except OSError:
        strict = False
    if strict and size:
        os.posix_fallocate(fd, 0, size)


def sealed_memory(name: str, size: int) -> int:
    """Makes `size` bytes of shared memory without a place in the file system; returns its descriptor. Raises OSError."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        reserve(fd, size)
        fcntl.fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
