# Sampled requests. Everything here is the trio thread's, but for text(), times and document() of a
# trace that is closed, which any thread may call.
from libc.stdint cimport int64_t

from neptrio._cext.request cimport InferRequest, InferResponse
from neptrio._cext.trace_block cimport Record, TraceBlock
from neptrio._cext.turn cimport TurnCore

cdef enum:
    RECENT_TRACES = 128
    RECENT_BYTES = 512               # a larger trace is kept as the object that it is

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

cdef class Recent:
    cdef char* data
    cdef Py_ssize_t sizes[RECENT_TRACES]  # bytes of the records in a place, 0 = `whole` has it
    cdef list whole
    cdef int64_t count               # traces that were added
    cdef int add(self, Trace root, const char* records, Py_ssize_t size) except -1

cdef class Sampler:
    cdef public TurnCore turn
    cdef public object writer
    cdef public Recent recent
    cdef public int64_t tensor_bytes
    cdef public dict models          # model name -> the scope of models that have their own
    cdef public Sampling default     # the scope of all others
    cdef public int64_t open         # traces that are not finished
    cdef public bint disabled        # files cannot be written
    cdef public bint may_force       # requests may ask for their own trace
    cdef public bint spans           # mode opentelemetry
    cdef object begin(self, InferRequest request)
    cdef Trace begin_root(self, InferRequest request, Sampling scope, bint asked)
    cdef object finish(self, Trace root)

cdef class Trace:
    cdef Record record               # its stamps are there once it is closed
    cdef readonly Trace root         # of a part below; None in a root itself
    cdef readonly str error
    cdef readonly list tensors       # [observe.trace_record.Copied], None = not traced
    cdef readonly dict parameters    # of a client's request whose tensors are traced, or None
    cdef int answers                 # with outputs
    cdef public tuple headers        # ((name, value), ...) of the answer
    cdef public object span_id       # of OpenTelemetry, 0 in mode triton
    cdef public object span          # what a model adds to that span, or None
    cdef InferRequest request        # None once closed
    cdef str model_name              # these are there once it is closed
    cdef str model_version
    cdef str request_id
    cdef bytes head                  # how its object in a file begins
    cdef bytes rest                  # its further members there, made when first needed
    cdef bint deferred, has_left, flushing, again, ended, abandoned
    cdef int64_t sending             # one by one: when the front began to send, 0 = it does not
    cdef list waiting                # further responses that are not sent: when they were there
    cdef list more                   # further responses: (made, send start, send end)
    # of a root, for itself and its children
    cdef Sampler sampler
    cdef readonly Sampling scope
    cdef readonly bint timestamps
    cdef readonly bint with_tensors
    cdef readonly bint asked         # the request or its parent wants this trace: it is kept and counts nowhere
    cdef readonly int64_t open       # parts that have not ended
    cdef list children               # the parts below, None = none
    cdef public object trace_id      # of OpenTelemetry, 0 in mode triton
    cdef public object root_span_id
    cdef public object remote        # the observe.propagation.Asked with the parent's span, or None
    cdef Trace top(self)
    cdef object answering(self, InferResponse response, bint final, int64_t now)
    cdef object answered(self, bint final)
    cdef object sent(self)
    cdef object close(self)
    cdef object follow(self)
    cdef object mark_sent(self, int64_t made, int64_t start, int64_t end)
    cdef int note(self, int64_t now) except -1
    cdef Py_ssize_t size(self) except -1
    cdef char* pack(self, char* at) except NULL
    cdef Py_ssize_t pack_into(self, TraceBlock block) except -1
