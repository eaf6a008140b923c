# Sampled requests. Everything here is the trio thread's, but for text(), times and document() of a
# trace that is closed, which any thread may call, and for a TextBlock that was taken from its scope.
from libc.stdint cimport int64_t

from neptrio._cext.request cimport STAMPS, InferRequest, InferResponse
from neptrio._cext.turn cimport TurnCore

cdef struct Point:
    int64_t ns
    int name            # index into the names of a trace file

cdef class TextBlock:
    cdef char* data                  # objects of an array, joined by commas
    cdef Py_ssize_t size, room
    cdef readonly int64_t traces
    cdef public int64_t most         # traces that it may hold
    cdef int reserve(self, Py_ssize_t n) except -1
    cdef int add(self, Trace root) except -1

cdef class Sampling:
    cdef public tuple level
    cdef public int64_t rate         # every rate-th request, 0 = none
    cdef public int64_t left         # traces still to be taken, -1 = no limit
    cdef public int64_t tail_us      # > 0: only requests that took as long, or failed, are kept and counted
    cdef public int64_t seen         # requests since the scope was made or last taken from
    cdef public int64_t open         # sampled traces that are not finished
    cdef public bint retired         # out of use, but for the traces that are open
    cdef public TextBlock block      # what is finished and not with the writer's thread yet
    cpdef bint sample(self)
    cpdef bint keep(self, bint slow_or_failed)

cdef class Sampler:
    cdef public TurnCore turn
    cdef public object writer
    cdef public object recent        # a deque of root traces
    cdef public int64_t tensor_bytes
    cdef public dict models          # model name -> the scope of models that have their own
    cdef public Sampling default     # the scope of all others
    cdef public int64_t open         # traces that are not finished
    cdef public bint disabled        # files cannot be written
    cdef public bint may_force       # requests may ask for their own trace
    cdef public bint spans           # mode opentelemetry
    cpdef object begin(self, InferRequest request)
    cdef object finish(self, Trace root)

cdef class Trace:
    cdef readonly int64_t id
    cdef readonly int64_t parent     # id of the part above, 0 = the root
    cdef readonly Trace root         # of a part below; None in a root itself
    cdef readonly str error
    cdef readonly list tensors       # [observe.trace_record.Copied], None = not traced
    cdef readonly dict parameters    # of a client's request whose tensors are traced, or None
    cdef int answers                 # with outputs
    cdef public tuple headers        # ((name, value), ...) of the answer
    cdef public object span_id       # of OpenTelemetry, 0 in mode triton
    cdef public object span          # what a model adds to that span, or None
    cdef readonly bint composing
    cdef InferRequest request        # None once closed
    cdef TurnCore turn
    cdef object model
    cdef str request_id
    cdef int front                   # 0 a step or a call, 1 HTTP, 2 gRPC
    cdef bint deferred, has_left, flushing, again, ended, told_by_front
    cdef int64_t stamps[STAMPS]
    cdef int64_t made                # the first response: when it was there, and when it was sent
    cdef int64_t send_start
    cdef int64_t send_end
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
    cpdef object answering(self, InferResponse response, bint final)
    cpdef object answered(self, bint final)
    cpdef object sent(self)
    cpdef object close(self)
    cdef int note(self, int64_t now) except -1
    cdef int response(self, Point* points, int n, int64_t made, int64_t start, int64_t end) noexcept
    cdef int collect(self, Point* points) noexcept
    cdef int64_t most(self) except -1
    cdef char* write(self, char* at) except NULL
    cdef Py_ssize_t room(self) except -1
