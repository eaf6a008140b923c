# The executions of one model version. Written and read on the trio thread only.
from libc.stdint cimport int64_t, uint64_t

cdef struct Duration:
    uint64_t count
    uint64_t ns
    uint64_t us            # sum over events of ns // 1000, for the metrics

cdef inline void add(Duration* d, int64_t ns) noexcept:
    d.count += 1
    more(d, ns)

cdef inline void more(Duration* d, int64_t ns) noexcept:
    if ns > 0:
        d.ns += <uint64_t>ns
        d.us += <uint64_t>ns // 1000

cdef inline void take(Duration* d, int64_t ns) noexcept:  # undoes add()
    d.count -= 1
    if ns > 0:
        d.ns -= <uint64_t>ns
        d.us -= <uint64_t>ns // 1000

cdef inline dict plain(Duration* d):
    return {"count": d.count, "ns": d.ns}

cdef class BatchCounters:
    cdef readonly uint64_t batch_size
    cdef Duration compute_input
    cdef Duration compute_infer
    cdef Duration compute_output

cdef class ExecutionCounters:
    cdef readonly uint64_t execution_count
    cdef readonly uint64_t last_inference_ms
    cdef readonly uint64_t changes       # of what the statistics extension shows, and of closings
    cdef dict batches                    # batch size -> BatchCounters
    cdef BatchCounters last_size
    cdef int executed(self, uint64_t batch_size, int64_t start, int64_t input_end,
                      int64_t output_start, int64_t end) except -1
    cpdef execution_reported(self, tuple row, tuple instead_of)
