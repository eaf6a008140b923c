"""What the log shows now, in memory that models' processes can read.

The problem: a backend asks before each line that is dear to make whether anybody would see it, and the settings change while
it runs. A message to each process would come some time later, and a question would take longer than the line. The choice:
four bytes that this process writes and others only read.

Rules:
 1. There is one byte for each level, in the order in which Triton numbers them, 1 where its lines are shown.
 2. The memory is made when the first process needs it. Only this process can write to it (F_SEAL_FUTURE_WRITE).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from collections.abc import Sequence

from triton_python_backend_utils._process.reserved import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SEAL, F_SEAL_SHRINK

F_SEAL_FUTURE_WRITE = 16
INFO, WARNING, ERROR, VERBOSE = range(4)


class LogLevels:
    """Which levels are shown. Any thread."""

    def __init__(self) -> None:
        self._shown = bytes((1, 1, 1, 0))
        self._lock = threading.Lock()
        self._memory: mmap.mmap | None = None
        self._descriptor = -1

    def tell(self, shown: Sequence[bool]) -> None:
        """Sets what is shown, in the order of rule 1."""
        with self._lock:
            self._shown = bytes(shown)
            if self._memory is not None:
                self._memory[:] = self._shown

    @property
    def descriptor(self) -> int:
        """The memory, for a process to map. Raises OSError."""
        with self._lock:
            if self._memory is None:
                fd = os.memfd_create("neptrio-log-levels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
                try:
                    os.write(fd, self._shown)
                    memory = mmap.mmap(fd, len(self._shown))
                    seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_FUTURE_WRITE | F_SEAL_SEAL
                    fcntl.fcntl(fd, F_ADD_SEALS, seals)
                except BaseException:
                    os.close(fd)
                    raise
                weakref.finalize(self, os.close, fd)
                self._descriptor, self._memory = fd, memory
            return self._descriptor
