# When a waiting thread asks again whether a run on a GPU has ended. Any thread; no state of its own.
from libc.stdint cimport int64_t

cdef enum:
    DROWSY_NS = 50000       # until then, waiting threads ask without pause
    NAP_NS = 20000          # the shortest nap
    LONG_NAP_NS = 2000000
    LONG_NS = 200000        # an execution that took longer so far is slept through at first
    AROUND_NS = 250000      # so long before and after the expected end, or a quarter of it, they ask without pause

cdef inline int64_t nap_after(int64_t waited) noexcept nogil:
    """How long to sleep before asking again, when `waited` ns have passed: what a nap adds to a wait stays small."""
    if waited < DROWSY_NS:
        return 0
    return min(max(waited // 16, <int64_t>NAP_NS), <int64_t>LONG_NAP_NS)

cdef inline int64_t around(int64_t expected) noexcept nogil:
    return min(expected // 4, <int64_t>AROUND_NS)

cdef inline bint slept_through(int64_t waited, int64_t expected) noexcept nogil:
    """Whether the end is so far off that nobody asks for it (rule 1)."""
    return expected > LONG_NS and waited < expected - around(expected)

cdef inline int64_t pause_after(int64_t waited, int64_t expected) noexcept nogil:
    """How long to sleep before asking again, when `waited` ns have passed of about `expected`."""
    if slept_through(waited, expected):
        return min(expected - around(expected) - waited, <int64_t>LONG_NAP_NS)
    if expected > LONG_NS and waited < expected + around(expected):
        return 0
    return nap_after(waited) if waited >= max(<int64_t>DROWSY_NS, expected + around(expected)) else 0

cdef inline double expected_after(double expected, double took, bint asleep) noexcept nogil:
    """What is expected after a run of `took` ns. `asleep`: it had ended when it was asked for after a sleep of rule 1."""
    if expected == 0:
        return took
    return took * 0.8 if asleep else expected + (took - expected) / 8
