"""Offers the processor's core to others in the middle of long work.

The problem: a thread that computes keeps its core until the system's next tick, up to 4 ms, also from a client, a model or
this server's loop that was woken there and needs it for microseconds. Another core may be idle meanwhile: in a virtual
machine, a processor that is idle is given back, and counts as one that cannot be had. The choice: whoever works for long
offers the core every fraction of a millisecond.

Rules:
 1. Never with the GIL held: who gets the core may keep it for milliseconds, and the loop would wait for all of them.
 2. Work in C calls sched_yield() itself, where it looks whether it should stop (Stop).
"""
from neptrio.request.sched cimport sched_yield


def yield_cpu():
    """Lets whoever waits for this core have it first, without the GIL."""
    with nogil:
        sched_yield()
