# The types that all packages share: requests, responses, tensors, and the compiled part of a model.
# Ownership:
#   A Tensor owns the memory it points at, or a reference to its owner; never a borrowed pointer.
#   A request owns its input tensors until its final response was delivered.
#   All these objects are created, changed and freed with the GIL held. The one exception is the memory behind
#   `ptr`, which instances' threads may read or write without it.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int32_t, int64_t, uint64_t

# The enums are cpdef, so Python has them as neptrio.request.infer_request.DataType and so on, and there is no second
# list of them. In Cython, passing an enum's member to Python creates an IntEnum's member, which costs an import and a
# chain of comparisons: convert with <int> where every request passes.

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

# The state of a request. A new one is TAKEN: it belongs to whoever made it.
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
    PINNED_MEMORY = 1   # page-locked host memory
    GPU_MEMORY = 2      # Tensor.ptr is a device address, read only in cext/backends/kernel/cuda_*.pyx

# The most elements that a tensor may have. At 8 bytes each at most, their bytes fit into 63 bits, so a product that
# times() has accepted needs no further check.
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
    # count * d; -1 when a dimension is negative and when the product exceeds MOST_ELEMENTS. Also -1 if count is.
    int64_t times "neptrio_times"(int64_t count, int64_t d) noexcept nogil

cdef int64_t now_ns() noexcept nogil

cdef extern from *:
    """
    #include <string.h>
    /* of two str objects; telling whether they are equal, not which comes first, takes a fraction of the instructions */
    static inline int neptrio_same_text(PyObject *one, PyObject *other) {
        Py_ssize_t length = PyUnicode_GET_LENGTH(one);
        return length == PyUnicode_GET_LENGTH(other) && PyUnicode_KIND(one) == PyUnicode_KIND(other)
            && memcmp(PyUnicode_DATA(one), PyUnicode_DATA(other), (size_t)length * PyUnicode_KIND(one)) == 0;
    }
    """
    bint same_text "neptrio_same_text"(object one, object other)

cdef inline bint same_name(str one, str other):
    """Whether two names are equal, which mostly their addresses tell: those of configurations are interned."""
    return one is other or (one is not None and other is not None and same_text(one, other))


cdef int element_size(int dtype) noexcept nogil   # bytes per element; 0 for BYTES and INVALID

cdef struct Strings:                   # the elements of a BYTES tensor
    bint walked                        # the rest is known
    bint cut                           # the tensor ends inside of an element
    int64_t count                      # lengths that were read
    int64_t left                       # bytes behind the last of them; with `cut` and length -1 those of half a length
    int64_t length                     # what the last of them says, where it is cut

# What an object has exported to a tensor: its memory stays where it is until this is gone.
cdef class Export:
    cdef Py_buffer view

cdef class Tensor:
    cdef public str name
    cdef public int dtype
    cdef public tuple shape            # ints; -1 never appears in a tensor  # type: tuple[int, ...]
    cdef public object owner           # keeps the memory behind ptr alive
    cdef const char* ptr               # row-major elements; BYTES in its length-prefixed form
    cdef readonly Py_ssize_t nbytes
    cdef public int memory_kind        # a MemoryKind
    cdef public int64_t memory_id
    cdef Strings strings               # of BYTES, once somebody walked over them (request/validate)
    cdef Export export                 # of `owner`, None where that cannot move its memory
    cdef int hold(self, object buffer, bint writable) except -1
    cpdef Py_ssize_t count(self) except -1

cpdef Tensor alias(Tensor tensor, str name, tuple shape)

cdef class RequestedOutput:
    cdef public str name
    cdef public int binary             # HTTP: 1 binary, 0 JSON, -1 the request's default
    cdef public int64_t class_count    # classification extension, 0 = off
    cdef public str shm_region         # None: not in shared memory  # type: str | None
    cdef public object shm_place       # the region of that name as it was when the request came, which stays open for it
    cdef public int64_t shm_offset
    cdef public int64_t shm_byte_size
    cdef public bint keep_on_device    # its reader takes device memory, so it need not be copied to the host

cpdef enum Protocol:                   # how a request came in
    NO_PROTOCOL = 0                    # not over the network: an ensemble's step, a call by a model
    HTTP_PROTOCOL = 1
    GRPC_PROTOCOL = 2

cdef class Responder:
    cdef public int protocol           # a Protocol: how the requests that it answers came in
    cpdef object respond(self, InferRequest request, InferResponse response, bint final)
    cpdef bint wait_for_room(self, InferRequest request, object callback) except -1
    cpdef bint waits_for_kernel(self, InferRequest request, object callback, int stage) except -1

# Who sent requests, where clients must say who they are (service.tokens). One object per client, whose requests have
# their sequences and cached answers for themselves.
cdef class Owner:
    cdef public str name
    cdef public int64_t open           # its requests from the network that were accepted and are not answered
    cdef public int64_t most           # how many of these it may have, 0 = any number
    cdef public int64_t generation     # grows when what it may do, or how it is known, may have changed

cdef class InferRequest:
    cdef public str model_name
    cdef public str model_version      # as the client wrote it, "" = latest
    cdef public str id
    cdef public dict parameters        # custom parameters, None when there are none  # type: dict[str, Any] | None
    cdef public list inputs            # [Tensor]  # type: list[Tensor]
    cdef public list outputs           # [RequestedOutput], None = all  # type: list[RequestedOutput] | None
    cdef public object sequence_id     # 0, a positive int or a non-empty str  # type: int | str
    cdef public bint sequence_start
    cdef public bint sequence_end
    cdef public uint64_t priority
    cdef public uint64_t timeout_us
    cdef public bint want_empty_final
    cdef public int64_t batch_size     # 1 for models without batching
    cdef public object model           # its ModelCore
    cdef public Responder responder
    cdef public object scheduler       # the scheduler that holds it while QUEUED
    cdef public object scheduler_data  # that scheduler's own record
    cdef public object batch
    cdef public object trace           # observe.trace.Trace, None = not sampled
    cdef public object asked           # what its headers say about tracing (observe.propagation), or None
    cdef public object context         # the transport's own record
    cdef public object stream          # the stream it came on if that holds sequences (scheduling.base.SequenceStream)
    cdef public InferRequest parent    # the ensemble or BLS request that it is a part of  # type: InferRequest | None
    cdef public Owner owner            # who sent it, or whose request it is a part of; None = not known  # type: Owner | None
    cdef bint counted                  # it is one of its owner's open requests
    cdef public bytes cache_key  # type: bytes | None
    cdef public int state              # a RequestState
    cdef public bint cancelled
    cdef public bint still_read        # cancelled by a model that still reads its responses
    cdef public object on_cancel       # set by whoever executes it; called on the trio thread  # type: Callable[[], object] | None
    cdef public bint owed              # its batch is back, but its instance has yet to answer it
    cdef public int release_flags      # the flags with which the model released it: 2 = execute it again
    cdef public bint collect_statistics
    cdef public int64_t deadline_ns    # of its queue policy, 0 = none
    cdef public int64_t responses      # responses delivered so far
    # needed by statistics in addition to the timestamps (cext/observe/counters)
    cdef public int64_t cancelled_ns   # when `cancelled` was set, 0 = never
    cdef public int64_t input_bytes    # bytes of its inputs while it is counted as accepted
    cdef public bint cache_hit         # answered from the response cache, nothing was executed
    cdef public bint composing         # an ensemble's request: the durations of its steps are added up
    cdef public object stated          # what its backend says of its statistics (observe.counters.Stated), None = nothing
    cdef public object failure         # error of its last response with contents, or None  # type: TritonError | None
    cdef int64_t previous_response_ns
    cdef public object timing          # whether its client wants to know its times (observe.timing)  # type: bool | dict[str, int] | None
    cdef int64_t steps_queue_ns
    cdef int64_t steps_input_ns
    cdef int64_t steps_infer_ns
    cdef int64_t steps_output_ns
    cdef int64_t timestamps[TIMESTAMP_COUNT]

cdef class InferResponse:
    cdef public str model_name
    cdef public str model_version
    cdef public str id
    cdef public dict parameters  # type: dict[str, Any] | None
    cdef public list outputs           # [Tensor]  # type: list[Tensor] | None
    cdef public object error           # TritonError or None  # type: TritonError | None
    cdef public bint null              # a final response of a decoupled model without contents
    cdef public int64_t produced_ns    # when the model produced it; 0 = when it is delivered

cdef class ModelCore:
    cdef public str name
    cdef public str version
    cdef public str platform
    cdef public int64_t max_batch_size
    cdef public list input_specs       # [InputSpec] in config order  # type: list[InputSpec]
    cdef public dict input_index       # name -> InputSpec  # type: dict[str, InputSpec]
    cdef public set output_names  # type: set[str]
    cdef public int64_t required_inputs
    cdef int64_t fitted_rows           # the batch size of the shapes that its input_specs remember
    cdef public bint decoupled
    cdef public bint ready
    cdef public object scheduler       # enqueue(request), cancel(request), ...
    cdef public object counters        # counters.ModelCounters
    cdef public int64_t inflight       # accepted requests without a final response
    cdef public object input_reshapes  # converts clients' shapes of inputs to the backend's, or None
    cdef public bint tells_times       # answers tell their times unless a client does not want that (observe.timing)
    cdef public object reshape_outputs # converts outputs to clients' shapes  # type: Callable[[list[Tensor]], list[Tensor]] | None
    cdef public object on_idle         # called when inflight falls to 0, or None  # type: Callable[[], object] | None

cdef class InputSpec:
    cdef public str name
    cdef public int dtype
    cdef public tuple dims             # without the batch dimension, -1 = any  # type: tuple[int, ...]
    cdef public bint optional
    cdef public bint ragged
    cdef public int64_t fixed_elements # product of dims, -1 when a dim is variable
    # its shape in the last request with all inputs that request/validate found right, and the bytes of a tensor of that shape
    cdef tuple fitted
    cdef int64_t fitted_nbytes         # -1: not known by the shape, or there was none
