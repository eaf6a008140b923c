# The counting half of a scope of trace settings (observe.trace_settings.Scope). Trio thread only.
from libc.stdint cimport int64_t

from neptrio.observe.trace_block cimport TraceBlock

cdef class Sampling:
    cdef tuple levels
    cdef readonly bint timestamps    # what they say
    cdef readonly bint with_tensors
    cdef public int64_t rate         # every rate-th request, 0 = none
    cdef public int64_t left         # traces still to be taken, -1 = no limit
    cdef public int64_t tail_us      # > 0: only requests that took as long, or failed, are kept and counted
    cdef public int64_t seen         # requests since the scope was made or last taken from
    cdef public int64_t open         # sampled traces that are not finished
    cdef public bint retired         # out of use, but for the traces that are open
    cdef public bint to_file         # there is a file to write to
    cdef public TraceBlock block     # what is finished and not with the writer's thread yet
    cpdef bint sample(self)
    cpdef bint keep(self, bint slow_or_failed)
