# Requests, responses, tensors and what is known of a model: the types that all packages share.
# Who owns what:
#   A Tensor owns (a reference to) the memory it points at, never a borrowed pointer.
#   A request owns its input tensors until its final response has been delivered.
#   Everything here is created, changed and dropped with the GIL held; the one exception is
#   the memory behind `ptr`, which instance threads may read or write without it.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t, uint64_t

# The enums are cpdef: what is here is also neptrio.request.infer_request.DataType and so on in Python, and
# there is no second list. In Cython, mind that an enum's member given to Python becomes an IntEnum's, which
# costs an import and a chain of comparisons: say <int> where that is on a request's path.

cpdef enum DataType:  # numbers as in model_config.proto; a test holds them to it and to neptrio.datatypes
    DT_INVALID = 0
    DT_BOOL = 1
    DT_UINT8 = 2
    DT_UINT16 = 3
    DT_UINT32 = 4
    DT_UINT64 = 5
    DT_INT8 = 6
    DT_INT16 = 7
    DT_INT32 = 8
    DT_INT64 = 9
    DT_FP16 = 10
    DT_FP32 = 11
    DT_FP64 = 12
    DT_BYTES = 13
    DT_BF16 = 14

cpdef enum Timestamp:  # index into InferRequest.timestamps, CLOCK_MONOTONIC nanoseconds, 0 = not reached
    RECV_START = 0
    RECV_END = 1
    REQUEST_START = 2
    QUEUE_START = 3
    COMPUTE_START = 4
    COMPUTE_INPUT_END = 5
    COMPUTE_OUTPUT_START = 6
    COMPUTE_END = 7
    REQUEST_END = 8
    SEND_START = 9
    SEND_END = 10
    CACHE_LOOKUP_START = 11
    CACHE_LOOKUP_END = 12
    CACHE_INSERT_START = 13
    CACHE_INSERT_END = 14
    RESPONSE_COMPLETE = 15

cdef enum:
    TIMESTAMP_COUNT = 16

# Where a request is. A new one is TAKEN: whoever made it has it.
#
#           set by                                              checked by
#   QUEUED  every scheduler's enqueue(), when the request has   cancel(): a queued request leaves its queue
#           to wait there; an iterative sequence's requeue      alone, a taken one has to be withdrawn from
#                                                               its batch; dispatch() steps over those gone
#   TAKEN   whoever takes it out of its queue into a batch      (not QUEUED is what the above looks for)
#           (dispatch); an ensemble, which has no queue
#   DONE    execution.batch.complete(), with the final          complete(), which drops late answers;
#           response; nothing follows it                        deliver() and whoever answers later
cpdef enum RequestState:
    TAKEN = 0
    QUEUED = 1
    DONE = 2

cpdef enum MemoryKind:  # where a tensor's bytes are
    CPU_MEMORY = 0
    PINNED_MEMORY = 1   # the host's, page-locked
    GPU_MEMORY = 2      # Tensor.ptr is a device address, read only in cext/backends/kernel/cuda_*.pyx

# Elements that a tensor may have. Their bytes, 8 each at most, fit 63 bits, so that a product that times()
# has let through needs no further check.
cdef extern from *:
    """
    #include <stdint.h>
    #define NEPTRIO_MOST_ELEMENTS ((int64_t)1 << 56)
    static inline int64_t neptrio_times(int64_t count, int64_t d) {
        int64_t product;
        if (count < 0 || d < 0 || __builtin_mul_overflow(count, d, &product)
                || product > NEPTRIO_MOST_ELEMENTS)
            return -1;
        return product;
    }
    """
    const int64_t MOST_ELEMENTS "NEPTRIO_MOST_ELEMENTS"
    # count * d; -1 for a dimension below 0 and for a product that no tensor has. -1 stays -1.
    int64_t times "neptrio_times"(int64_t count, int64_t d) noexcept nogil

cdef int64_t now_ns() noexcept nogil
cdef int element_size(int dtype) noexcept nogil   # bytes per element; 0 for BYTES and INVALID

cdef class Tensor:
    cdef public str name
    cdef public int dtype
    cdef public tuple shape            # ints; -1 never appears in a tensor
    cdef public object owner           # keeps the memory behind ptr alive
    cdef const char* ptr               # row-major elements; BYTES in its length-prefixed form
    cdef readonly Py_ssize_t nbytes
    cdef public int memory_kind        # a MemoryKind
    cdef public int64_t memory_id
    cdef Py_buffer view
    cdef bint has_view
    cdef int hold(self, object buffer, bint writable) except -1
    cpdef Py_ssize_t count(self) except -1

cpdef Tensor alias(Tensor tensor, str name, tuple shape)

cdef class RequestedOutput:
    cdef public str name
    cdef public int binary             # HTTP: 1 binary, 0 JSON, -1 the request's default
    cdef public int64_t class_count    # classification extension, 0 = off
    cdef public str shm_region         # None: not in shared memory
    cdef public int64_t shm_offset
    cdef public int64_t shm_byte_size
    cdef public bint keep_on_device    # its reader takes device memory: it need not be brought to the host

cpdef enum Protocol:                   # what a request came through
    NO_PROTOCOL = 0                    # none: an ensemble's step, a call of a model
    HTTP_PROTOCOL = 1
    GRPC_PROTOCOL = 2

cdef class Responder:
    cdef public int protocol           # a Protocol: what the requests that it answers came through
    cpdef object respond(self, InferRequest request, InferResponse response, bint final)
    cpdef bint wait_for_room(self, InferRequest request, object callback) except -1

cdef class InferRequest:
    cdef public str model_name
    cdef public str model_version      # as asked for, "" = latest
    cdef public str id
    cdef public dict parameters        # custom parameters, None when there are none
    cdef public list inputs            # [Tensor]
    cdef public list outputs           # [RequestedOutput], None = all
    cdef public object sequence_id     # 0, a positive int or a non-empty str
    cdef public bint sequence_start
    cdef public bint sequence_end
    cdef public uint64_t priority
    cdef public uint64_t timeout_us
    cdef public bint want_empty_final
    cdef public int64_t batch_size     # 1 for models without batching
    cdef public object model           # the ModelCore it was accepted by
    cdef public Responder responder
    cdef public object scheduler       # who owns it while QUEUED
    cdef public object scheduler_data  # that owner's own record
    cdef public object batch
    cdef public object trace           # observe.trace.Trace, None = not sampled
    cdef public object asked           # what its headers ask of tracing (observe.propagation), or None
    cdef public object context         # the transport's own record
    cdef public object stream          # what it came on if that holds sequences (scheduling.base.SequenceStream)
    cdef public InferRequest parent    # ensemble or BLS request this one is a part of
    cdef public bytes cache_key
    cdef public int state              # a RequestState
    cdef public bint cancelled
    cdef public bint still_read        # cancelled by a model that goes on reading: what is answered reaches it
    cdef public object on_cancel       # set by whoever executes it; called on the trio thread when it is cancelled
    cdef public bint owed              # its batch is back and its instance has yet to answer it
    cdef public int release_flags      # what the model released it with: 2 = to be executed again
    cdef public bint collect_statistics
    cdef public int64_t deadline_ns    # of the queue policy, 0 = none
    cdef public int64_t responses      # responses delivered so far
    # what statistics need beside the timestamps (cext/observe/counters)
    cdef public int64_t cancelled_ns   # when `cancelled` was set, 0 = never
    cdef public int64_t input_bytes    # of its inputs, while it is in its model's accounts
    cdef public bint cache_hit         # answered from the response cache, nothing was executed
    cdef public bint composing         # an ensemble's request: its steps' durations are summed
    cdef public object failure         # error of the last response that was not flag-only, or None
    cdef int64_t previous_response_ns
    cdef int64_t steps_input_ns
    cdef int64_t steps_infer_ns
    cdef int64_t steps_output_ns
    cdef int64_t timestamps[TIMESTAMP_COUNT]

cdef class InferResponse:
    cdef public str model_name
    cdef public str model_version
    cdef public str id
    cdef public dict parameters
    cdef public list outputs           # [Tensor]
    cdef public object error           # TritonError or None
    cdef public bint null              # flag-only final response of a decoupled model
    cdef public int64_t produced_ns    # when the model handed it over, 0 = when it is delivered

cdef class ModelCore:
    cdef public str name
    cdef public str version
    cdef public str platform
    cdef public int64_t max_batch_size
    cdef public list input_specs       # [InputSpec] in config order
    cdef public dict input_index       # name -> InputSpec
    cdef public set output_names
    cdef public int64_t required_inputs
    cdef public bint decoupled
    cdef public bint ready
    cdef public object scheduler       # enqueue(request), cancel(request), ...
    cdef public object counters        # counters.ModelCounters
    cdef public int64_t inflight       # accepted requests without their final response
    cdef public object input_reshapes  # what the clients' shapes of its inputs become, or None
    cdef public object reshape_outputs # [Tensor] -> [Tensor] in the clients' shapes, or None
    cdef public object on_idle         # called when inflight falls to 0, or None

cdef class InputSpec:
    cdef public str name
    cdef public int dtype
    cdef public tuple dims             # without the batch dimension, -1 = any
    cdef public bint optional
    cdef public bint ragged
    cdef public int64_t fixed_elements # product of dims, -1 when a dim is variable
