"""How soon the loop's thread runs again when other threads want the processor, or the interpreter, as well.

The problem: where threads that compute (workers, model processes, the clients of a test machine) keep all
processors busy, Linux lets each run for a time slice of some milliseconds before the next has its turn. The loop
sleeps and wakes for every small request, and every time it may wait for such a slice to end, although it needs
microseconds. The choice: the loop's thread asks for a short slice. Its share of the processor stays what it was;
but who asks for less at a time is served sooner, and may take over from a thread in the middle of its slice.

The same happens once more above the system: a thread that computes in Python keeps the interpreter's lock for 5 ms
before it lets the loop have it, at each of the loop's wake-ups. The choice: a tenth of that. Where nobody waits for the lock
it costs nothing.

Rules:
 1. Only an ordinary thread asks: whoever chose another policy, or a priority above the ordinary one, meant it.
 2. Threads and processes that the loop's thread starts have ordinary slices (the kernel's reset on fork).
 3. A kernel that does not know the request refuses or ignores it; then all is as it was. No privilege is needed.
Source: sched(7), sched_setattr(2); slices of ordinary threads can be chosen since Linux 6.12.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys

log = logging.getLogger("neptrio.loop")

SWITCH_SECONDS = 0.0005  # for so long a thread keeps the interpreter's lock that another wants
SHORT_NS = 100_000  # the shortest that the kernel grants
_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}  # of sched_setattr and sched_getattr
_RESET_ON_FORK = 1


class _Attributes(ctypes.Structure):
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


def serve_soon() -> None:
    """Called on the loop's thread of a server that has the process to itself."""
    sys.setswitchinterval(SWITCH_SECONDS)
    log.debug("the loop's time slice: %s", "short" if ask_for_a_short_one() else "the system's own")


def slice_ns(thread: int = 0) -> int:
    """The time slice of a thread (0: this one) in nanoseconds, as far as the kernel tells; 0 where it does not."""
    found = _read(thread)
    return 0 if found is None else found.runtime_ns


def ask_for_a_short_one() -> bool:
    """Asks for this thread. Returns whether its slice is a short one now."""
    wanted = _read(0)
    if wanted is None or wanted.policy != os.SCHED_OTHER or wanted.nice < 0:
        return False
    wanted.flags |= _RESET_ON_FORK
    wanted.runtime_ns = SHORT_NS
    numbers = _NUMBERS[platform.machine()]
    if ctypes.CDLL(None, use_errno=True).syscall(numbers[0], 0, ctypes.byref(wanted), 0) != 0:
        return False
    return slice_ns() == SHORT_NS


def _read(thread: int) -> _Attributes | None:
    numbers = _NUMBERS.get(platform.machine())
    if sys.platform != "linux" or numbers is None:
        return None
    found = _Attributes()
    size = ctypes.sizeof(found)
    if ctypes.CDLL(None, use_errno=True).syscall(numbers[1], thread, ctypes.byref(found), size, 0) != 0:
        return None
    return found
