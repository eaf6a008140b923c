# Decides which requests are traced. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport InferRequest
from neptrio.observe.trace cimport Trace, Tracing
from neptrio.observe.trace_recent cimport Recent
from neptrio.observe.trace_scope cimport Sampling

cdef class Sampler(Tracing):
    cdef public object writer
    cdef public Recent recent
    cdef public dict models          # scopes of models with settings of their own  # type: Mapping[str, Sampling]
    cdef public Sampling default     # the scope of all other models
    cdef public int64_t open         # traces that are not finished
    cdef public bint disabled        # True while files cannot be written
    cdef public bint tracing         # False: no request can be traced, so nothing else needs to be checked
    cdef public bint unread          # requests that are refused before they are read are traced, too
    cdef public bint trace_headers   # headers of a request may ask for a trace
    cdef public bint may_force       # requests may ask to be traced
    cdef public bint spans           # mode opentelemetry
    cdef object begin(self, InferRequest request)
    cdef Trace begin_root(self, InferRequest request, Sampling scope, bint asked)
    cdef object finish(self, Trace root)
