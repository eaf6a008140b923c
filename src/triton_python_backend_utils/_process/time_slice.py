"""For how long at a time Linux lets a thread compute while others wait, and what a model's process asks for.

The problem: a model that computes for milliseconds keeps a processor from whoever wakes meanwhile and needs microseconds: a
quick model's process, the server's loop, a client. Linux looks at a thread that wakes and at the one that computes; with equal
time slices it often lets the latter finish its own, up to the next tick of its clock. The choice: a process whose batches take
long asks for a longer slice. Its share of the processor stays what it was, but whoever has an ordinary slice takes over at
once, if it has had less than its share.

Rules:
 1. A batch longer than LONG_NS makes the slice a long one, QUICK_BATCHES shorter ones in a row make it ordinary again.
 2. Whoever chose another policy, or a priority above the ordinary, meant it; so did whoever chose a slice.
 3. Threads and processes that the model starts have ordinary slices (the kernel's reset on fork).
 4. A kernel that does not know the request refuses or ignores it, and is not asked again. No privilege is needed.
Source: sched(7), sched_setattr(2); slices of ordinary threads can be chosen since Linux 6.12.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Callable

LONG_NS = 4_000_000  # of a batch: the kernel's tick where it is longest in practice
SLICE_NS = 20_000_000  # five ticks: two models that compute take turns that often
QUICK_BATCHES = 16
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # of sched_setattr and sched_getattr
_RESET_ON_FORK = 1


class Attributes(ctypes.Structure):
    """`struct sched_attr`, its first version."""

    _fields_ = [
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime_ns", ctypes.c_uint64),
        ("deadline_ns", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint64),
    ]


def read(thread: int = 0) -> Attributes | None:
    """What the kernel tells of a thread (0: this one), if it does."""
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return None
    found = Attributes()
    size = ctypes.sizeof(found)
    if ctypes.CDLL(None, use_errno=True).syscall(numbers[1], thread, ctypes.byref(found), size, 0) != 0:
        return None
    return found


def slice_ns(thread: int = 0) -> int:
    """The time slice of a thread (0: this one) in nanoseconds, as far as the kernel tells; 0 where it does not."""
    found = read(thread)
    return 0 if found is None else found.runtime_ns


def ask(nanoseconds: int) -> bool:
    """Asks for a slice for this thread, 0 for an ordinary one. Returns whether it was granted."""
    wanted = read()
    if wanted is None or wanted.policy != os.SCHED_OTHER or wanted.nice < 0:
        return False
    wanted.flags |= _RESET_ON_FORK
    wanted.runtime_ns = nanoseconds
    numbers = _NUMBERS[platform.machine()]
    if ctypes.CDLL(None, use_errno=True).syscall(numbers[0], 0, ctypes.byref(wanted), 0) != 0:
        return False
    return nanoseconds in (0, slice_ns())


class ModelSlice:
    """The slice of the thread that executes a model."""

    def __init__(self, ask: Callable[[int], bool] = ask, slice_ns: Callable[[], int] = slice_ns) -> None:
        self.watched = LONG_NS  # after() wants to hear of batches that took longer, in ns
        self._ask = ask
        self._slice_ns = slice_ns
        self._ordinary = slice_ns()
        self._long = False
        self._quick = 0

    def after(self, took_ns: int) -> None:
        """Called behind a batch that took longer than `watched`."""
        if took_ns > LONG_NS:
            self._quick = 0
            if not self._long:
                self._lengthen()
            return
        self._quick += 1
        if self._quick == QUICK_BATCHES:
            self._long = False
            self.watched = LONG_NS
            if self._slice_ns() == SLICE_NS:
                self._ask(0)

    def _lengthen(self) -> None:
        self._long = self._slice_ns() == self._ordinary and self._ask(SLICE_NS)
        self.watched = -1 if self._long else sys.maxsize
