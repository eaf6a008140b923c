# The statistics counters of one model version. Written and read on the trio thread only, so a
# snapshot is always consistent; no lock, no atomic.
from libc.stdint cimport int64_t, uint64_t
from neptrio.observe.histogram cimport Histogram
from neptrio.request.infer_request cimport InferRequest, InferResponse

cdef struct Duration:
    uint64_t count
    uint64_t ns
    uint64_t us            # ns // 1000 summed per event: what the metrics report

cdef class BatchCounters:
    cdef readonly uint64_t batch_size
    cdef Duration compute_input
    cdef Duration compute_infer
    cdef Duration compute_output

cdef class ResponseCounters:
    cdef Duration compute_infer
    cdef Duration compute_output
    cdef Duration success
    cdef Duration fail
    cdef Duration empty_response
    cdef Duration cancel
    cdef dict snapshot(self)

cdef class CloseCounters:
    cdef readonly dict sizes         # batch size -> executions
    cdef readonly uint64_t count
    cdef readonly uint64_t size_sum
    cdef readonly uint64_t oldest_wait_ns

cdef class ModelCounters:
    cdef readonly uint64_t inference_count
    cdef readonly uint64_t execution_count
    cdef readonly uint64_t last_inference_ms
    cdef public int64_t inflight_bytes   # input tensors of accepted, unanswered requests
    cdef public list memory_usage        # the $memory_usage objects measured at load
    cdef Duration success
    cdef Duration fail
    cdef Duration queue
    cdef Duration compute_input
    cdef Duration compute_infer
    cdef Duration compute_output
    cdef Duration cache_hit
    cdef Duration cache_miss
    cdef dict batches                    # batch size -> BatchCounters
    cdef list responses                  # [ResponseCounters] by index of the response
    cdef readonly dict failures          # reason -> count
    cdef readonly int64_t accepted       # requests since the load: accepted = answered (success) +
    cdef public int64_t refused          # by the scheduler, so not in accepted: a full queue, mostly
    cdef readonly int64_t failed         # failed + cancelled + in flight; an ensemble's count once
    cdef readonly int64_t cancelled
    cdef readonly dict closings          # close reason -> CloseCounters
    cdef readonly Histogram request_histogram
    cdef readonly Histogram queue_histogram
    cdef readonly Histogram input_histogram
    cdef readonly Histogram infer_histogram
    cdef readonly Histogram output_histogram
    cdef readonly object summaries       # stage -> SlidingHistogram, None when off
    cdef readonly object first_response  # BoundedHistogram, None when off
    cdef bytes trace_head                # how the model's objects in a trace file begin; made by cext/observe/trace
    cdef int answered(self, InferRequest request, InferResponse response) except -1
    cdef int responded(self, InferRequest request, InferResponse response, int64_t now) except -1
    cdef int executed(self, uint64_t batch_size, int64_t start, int64_t input_end,
                      int64_t output_start, int64_t end) except -1
    cdef int closed(self, str reason, uint64_t batch_size, int64_t oldest_wait_ns) except -1
    cdef int summarize(self, str stage, int64_t ns, int64_t now) except -1
    cpdef cache_missed(self, InferRequest request)
