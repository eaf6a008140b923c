# Decides which executions run on the trio thread. Any thread; no state of its own.
from libc.stdint cimport int64_t

cdef enum:
    INLINE_NS = 20000    # with a longer mean it is worth the 40 us of handing it to a thread and back
    CLIP_NS = 100000

cdef inline double mean_after(double mean, int64_t took) noexcept nogil:
    """The running mean of executions after one more that took `took` nanoseconds."""
    return mean + (<double>(took if took < CLIP_NS else CLIP_NS) - mean) * 0.1
