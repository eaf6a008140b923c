# How long the loop looks at nothing else, and what it did then (neptrio/loop/loop_lag.py). Trio thread only.
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    FIRST_EXPONENT = 14      # the first bucket ends at 2**14 ns, 16 us
    BUCKET_COUNT = 24        # the last but one at 2**36 ns, 69 s; one more for what is above

cdef class LoopLagCore:
    cdef int64_t begun_ns            # of the pass under way; 0: the loop waits
    cdef public int64_t warning_ns   # a longer pass is told by late(); 0: none is
    cdef uint64_t[BUCKET_COUNT] counts
    cdef readonly uint64_t count
    cdef readonly uint64_t sum_ns
    cdef readonly int64_t max_ns
    cdef public object source        # whose socket is read: what was given to the poller's read()
    cdef list notes                  # of large work in this pass: (begun, kind, model, source, bytes)
    cdef int64_t step_ns
    cdef int64_t longest_step_ns
    cdef object longest_step         # the task that made it
    cpdef woke(self)
    cpdef waits(self)
    cpdef note(self, str kind, str model, Py_ssize_t nbytes, int64_t begun_ns=*)
