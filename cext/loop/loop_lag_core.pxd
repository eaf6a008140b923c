# Measures the passes of the loop and notes large work in them (neptrio/loop/loop_lag.py). Trio thread only.
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    FIRST_EXPONENT = 14      # the first bucket ends at 2**14 ns, 16 us
    BUCKET_COUNT = 24        # the last but one ends at 2**36 ns, 69 s; the last takes everything longer

cdef class LoopLagCore:
    cdef int64_t begun_ns            # when the current pass began; 0: the loop waits
    cdef public int64_t warning_ns   # late() is called for longer passes; 0: for none
    cdef uint64_t[BUCKET_COUNT] counts
    cdef readonly uint64_t count
    cdef readonly uint64_t sum_ns
    cdef readonly int64_t max_ns
    # the callback of the connection that is being read, as given to the poller's read()
    cdef public object source
    cdef list notes                  # large work in this pass: (begun, kind, model, source, bytes)
    cdef int64_t step_ns
    cdef int64_t longest_step_ns
    cdef object longest_step         # the trio task that took longest
    cpdef woke(self)
    cpdef waits(self)
    cpdef note(self, str kind, str model, Py_ssize_t nbytes, int64_t begun_ns=*)
