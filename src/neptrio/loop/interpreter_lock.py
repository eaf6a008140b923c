"""How soon the loop has the interpreter's lock when another thread computes in Python.

Such a thread keeps it for 5 ms before it lets the loop have it, at each of the loop's wake-ups. The choice: a tenth of that.
Where nobody waits for the lock it costs nothing.
"""

from __future__ import annotations

import sys

SWITCH_SECONDS = 0.0005  # for so long a thread keeps the lock that another wants


def serve_soon() -> None:
    """Called on the loop's thread of a server that has the process to itself."""
    sys.setswitchinterval(SWITCH_SECONDS)
