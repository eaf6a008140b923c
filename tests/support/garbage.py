"""What only the garbage collector could free."""

from __future__ import annotations

import gc
from collections import Counter


def left_in_cycles() -> Counter[str]:
    """The server's objects that nobody can reach any more and that refer to each other, by type; they are freed. The collector
    must have been off while they were made."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        kinds = [type(one) for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return Counter(kind.__qualname__ for kind in kinds if str(kind.__module__).startswith("neptrio"))
