# Traced requests. Used on the trio thread, except that any thread may call text(), times and document() of a trace that
# is closed.
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport InferRequest, InferResponse, ModelCore
from neptrio.observe.activities cimport Activities
from neptrio.observe.trace_block cimport Record, TraceBlock
from neptrio.observe.trace_scope cimport Sampling
from neptrio.observe.traced_tensors cimport TracedTensors
from neptrio.loop.loop_pass_core cimport LoopPassCore

cdef class Tracing:
    cdef public LoopPassCore loop_pass
    cdef public int64_t tensor_bytes # most bytes of a tensor that a trace copies
    cdef public object copier        # the observe.tensor_copier.TensorCopier for large tensors  # type: TensorCopier
    cdef object finish(self, Trace root)

cdef class Trace:
    cdef Record record               # its timestamps are set when it is closed
    cdef readonly Trace root         # the root of a part; None in a root itself  # type: Trace | None
    cdef readonly str error  # type: str | None
    cdef Activities own_points       # that the model has reported, None = none
    cdef readonly TracedTensors tensors  # None = none are traced  # type: TracedTensors | None
    cdef readonly dict parameters    # of a client's request whose tensors are traced  # type: dict[str, Any] | None
    cdef int answers                 # number of answers with outputs
    cdef public tuple headers        # ((name, value), ...): headers of the answer  # type: tuple[tuple[bytes, bytes], ...]
    cdef public object span_id       # of OpenTelemetry, 0 in mode triton
    cdef public object span          # what a model has set on that span, or None
    cdef InferRequest request        # None once closed
    cdef ModelCore model             # whose request it was when the trace began; None once closed
    cdef str model_name              # set when it is closed
    cdef str model_version
    cdef str request_id
    cdef bytes head                  # how its object in a file begins
    cdef bytes rest                  # further members of that object, made when first needed
    cdef bint deferred, flushing, again, ended, abandoned
    cdef int64_t held                # hold() less release()
    cdef int stage                   # of Responder.waits_for_kernel(), behind which it goes on
    cdef Py_ssize_t followed         # how many of the oldest unsent responses that is for
    cdef public int64_t answer_end   # for the transport: where the newest response ends among all bytes that its stream sends
    cdef int64_t sending             # responses sent one by one: when sending began, 0 = it has not
    cdef list waiting                # responses after the first that are not sent: when they were made
    cdef list more                   # responses after the first: (made, send start, send end)
    # only in a root, for itself and its children
    cdef Tracing sampler
    cdef readonly Sampling scope  # type: Scope
    cdef readonly bint timestamps
    cdef readonly bint with_tensors
    cdef readonly bint asked         # the request or its parent asked for this trace: it is kept and not counted
    cdef readonly int64_t open       # parts that have not ended
    cdef list children               # the other parts, None = none
    cdef int64_t last_copy           # the copier's number of the last large tensor, 0 = none
    cdef public object trace_id      # of OpenTelemetry, 0 in mode triton
    cdef public object root_span_id
    cdef public object remote        # the observe.propagation.Asked with the parent's span, or None  # type: Asked | None
    cdef Trace top(self)
    cdef bint copying(self)
    cdef int activity(self, str name, int64_t ns) except -1
    cdef object answering(self, InferResponse response, bint final, int64_t now)
    cdef object answered(self, bint final)
    cdef object settle(self)
    cdef object sent(self, Py_ssize_t most)
    cdef Py_ssize_t unsent(self) except -1
    cpdef hold(self)
    cpdef release(self)
    cdef object close(self)
    cdef object follow(self)
    cdef object mark_sent(self, int64_t made, int64_t start, int64_t end)
    cdef int note(self, int64_t now) except -1
    cdef Py_ssize_t size(self) except -1
    cdef char* pack(self, char* at, char* end) except NULL
    cdef Py_ssize_t pack_into(self, TraceBlock block) except -1

cdef Trace made(Tracing sampler, InferRequest request)     # a new trace, with the next id
