# What every request passes through on its way in. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.observe.trace_sampler cimport Sampler
from neptrio.request.infer_request cimport InferRequest, ModelCore

cdef class RequestQueue:
    cdef int queue(self, InferRequest request) except -1

cdef class Absent(ModelCore):
    cdef readonly str one_response # the error's text if the model is decoupled, None: it may be  # type: str | None

cdef class Admission:
    cdef object directory          # finds the models that serve
    cdef dict latest               # name -> the version that serves requests without one
    cdef object demand             # loads models that are asked for, None: nobody does
    cdef readonly Sampler tracer   # which requests are traced
    cdef readonly bint forwards    # this process only reads requests: reads() says of which models
    cpdef ModelCore lookup(self, str name, str version)
    cpdef ModelCore sought(self, str name, str version, str one_response=*)
    cdef ModelCore arrived(self, InferRequest request)
    cdef ModelCore step(self, InferRequest request)
    cdef int park(self, InferRequest request, ModelCore model) except -1
    cpdef ModelCore find(self, InferRequest request, str one_response)
    cpdef int received(self, InferRequest request, int64_t began) except -1
    cpdef submit(self, InferRequest request)
