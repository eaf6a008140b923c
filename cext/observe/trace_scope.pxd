# The sampling counters of a scope of trace settings (observe.trace_settings.Scope). Trio thread only.
from libc.stdint cimport int64_t

from neptrio.observe.trace_block cimport TraceBlock

cdef class Sampling:
    cdef tuple levels
    cdef readonly bint timestamps    # whether the settings' level contains TIMESTAMPS
    cdef readonly bint with_tensors
    cdef public int64_t rate         # every rate-th request is traced, 0 = none
    cdef public int64_t left         # traces that may still be made, -1 = no limit
    cdef public int64_t tail_us      # > 0: only traces of requests that took as long or failed are kept and counted
    cdef public int64_t seen         # requests since the last one that was selected
    cdef public int64_t open         # unfinished traces
    cdef public bint retired         # the scope was replaced; only unfinished traces still use it
    cdef public bint to_file         # there is a file to write to
    cdef public TraceBlock block     # finished traces that the writer's thread has not taken  # type: TraceBlock | None
    cpdef bint sample(self)
    cpdef bint keep(self, bint slow_or_failed)
