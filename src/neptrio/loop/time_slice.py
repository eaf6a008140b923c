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
How the kernel is asked, and what models' processes ask for: triton_python_backend_utils/_process/time_slice.py.
"""

from __future__ import annotations

import logging
import sys

from triton_python_backend_utils._process.time_slice import ask

log = logging.getLogger("neptrio.loop")

SWITCH_SECONDS = 0.0005  # for so long a thread keeps the interpreter's lock that another wants
SHORT_NS = 100_000  # the shortest that the kernel grants


def serve_soon() -> None:
    """Called on the loop's thread of a server that has the process to itself."""
    sys.setswitchinterval(SWITCH_SECONDS)
    log.debug("the loop's time slice: %s", "short" if ask(SHORT_NS) else "the system's own")
