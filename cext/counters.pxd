# The statistics counters of one model version. Written and read on the trio thread only, so a
# snapshot is always consistent; no lock, no atomic.
from libc.stdint cimport int64_t, uint64_t
from neptrio._cext.request cimport InferRequest, InferResponse

cdef struct Duration:
    uint64_t count
    uint64_t ns

cdef class BatchCounters:
    cdef readonly uint64_t batch_size
    cdef Duration compute_input
    cdef Duration compute_infer
    cdef Duration compute_output

cdef class ModelCounters:
    cdef readonly uint64_t inference_count
    cdef readonly uint64_t execution_count
    cdef readonly uint64_t last_inference_ms
    cdef Duration success
    cdef Duration fail
    cdef Duration queue
    cdef Duration compute_input
    cdef Duration compute_infer
    cdef Duration compute_output
    cdef Duration cache_hit
    cdef Duration cache_miss
    cdef dict batches              # batch size -> BatchCounters
    cdef readonly dict failures    # reason -> count
    cdef int answered(self, InferRequest request, InferResponse response) except -1
    cdef int executed(self, uint64_t batch_size, int64_t start, int64_t input_end,
                      int64_t output_start, int64_t end) except -1
