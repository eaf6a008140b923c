# Histograms of durations with a known relative error. Trio thread only.
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    SUB_BITS = 6                        # 64 buckets per power of two
    SUB_BUCKETS = 1 << SUB_BITS
    MAX_BITS = 42                       # values above 2**42 ns (73 minutes) are counted in the last bucket
    ROWS = MAX_BITS - SUB_BITS + 1
    BUCKETS = ROWS * SUB_BUCKETS

cdef int bucket_of(int64_t value) noexcept nogil

cdef class Histogram:
    cdef (uint64_t*)[ROWS] rows         # of SUB_BUCKETS cells each; NULL: all of it is 0 (rule 5)
    cdef readonly uint64_t count
    cdef readonly uint64_t sum
    cdef readonly int64_t max
    cdef void add(self, int64_t value) noexcept
    cdef void add_first(self, int index, int64_t value) noexcept
    cdef uint64_t at(self, int index) noexcept

cdef class SlidingHistogram:
    cdef readonly int64_t window_ns
    cdef list slices                    # [Histogram]; `current` is the index of the newest
    cdef int current
    cdef int64_t slice_end_ns           # when the current slice ends, 0 before the first value
    cdef readonly uint64_t count        # of all values since the start
    cdef readonly uint64_t sum
    cdef int advance(self, int64_t now_ns) except -1
    cpdef record(self, int64_t value, int64_t now_ns)
