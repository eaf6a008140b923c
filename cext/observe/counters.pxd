# The statistics counters of one model version. Written and read on the trio thread only, so that a snapshot is always
# consistent without locks or atomics.
from libc.stdint cimport int64_t, uint64_t
from neptrio.observe.executions cimport Duration, ExecutionCounters
from neptrio.observe.histogram cimport Histogram
from neptrio.observe.stated cimport Stated
from neptrio.request.infer_request cimport InferRequest, InferResponse

cdef class ResponseCounters:
    cdef Duration compute_infer
    cdef Duration compute_output
    cdef Duration success
    cdef Duration fail
    cdef Duration empty_response
    cdef Duration cancel
    cdef dict snapshot(self)

cdef class CloseCounters:
    cdef uint64_t[64] few            # executions of batches of this size
    cdef dict many                   # size -> executions, of larger ones
    cdef readonly uint64_t count
    cdef readonly uint64_t size_sum
    cdef readonly uint64_t oldest_wait_ns

cdef class ModelCounters(ExecutionCounters):
    cdef readonly uint64_t inference_count
    cdef public int64_t inflight_bytes   # bytes of inputs of accepted, unanswered requests
    cdef public list memory_usage        # the $memory_usage objects; changed by setting another list only  # type: list[dict[str, Any]]
    cdef dict texts                      # form -> (changes, memory_usage, text), see text_in()
    cdef Duration success
    cdef Duration fail
    cdef Duration queue
    cdef Duration compute_input
    cdef Duration compute_infer
    cdef Duration compute_output
    cdef Duration cache_hit
    cdef Duration cache_miss
    cdef list responses                  # [ResponseCounters], by the response's index
    cdef ResponseCounters unseen         # rule 10: what is measured here; None until the backend has reported a response
    cdef readonly dict failures          # reason -> count  # type: dict[str, int]
    cdef readonly int64_t accepted       # since the load; = answered + failed + cancelled + in flight
    cdef public int64_t refused          # requests that the scheduler refused (mostly: queue full); not in `accepted`
    cdef readonly int64_t failed         # an ensemble's failed request counts once
    cdef readonly int64_t cancelled
    cdef readonly dict closings          # close reason -> CloseCounters  # type: dict[str, CloseCounters]
    cdef str last_reason                 # of the batch before, with its counters: most batches are like it
    cdef CloseCounters last_closing
    cdef readonly Histogram request_histogram
    cdef readonly Histogram queue_histogram
    cdef readonly Histogram input_histogram
    cdef readonly Histogram infer_histogram
    cdef readonly Histogram output_histogram
    cdef readonly object summaries       # by stage, None when not enabled  # type: dict[str, SlidingHistogram] | None
    cdef readonly object first_response  # a BoundedHistogram, None when not enabled  # type: BoundedHistogram | None
    cdef readonly object errors          # what requests met last; None before the first failure  # type: LastErrors | None
    cdef bytes trace_head                # beginning of the model's objects in trace files; made by cext/observe/trace
    cdef int answered(self, InferRequest request, InferResponse response) except -1
    cdef int responded(self, InferRequest request, InferResponse response, int64_t now) except -1
    cdef ResponseCounters at(self, uint64_t place)
    cpdef measured(self, uint64_t place, int outcome, int64_t computing_ns, int64_t output_ns)
    cpdef reported(self, Stated stated, int how, times)
    cdef int closed(self, str reason, uint64_t batch_size, int64_t oldest_wait_ns) except -1
    cpdef note_error(self, error, bint refused=*)
    cdef int summarize(self, str stage, int64_t ns, int64_t now) except -1
    cpdef cache_missed(self, InferRequest request, bint succeeded=*)
