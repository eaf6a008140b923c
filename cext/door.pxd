# What every request passes through on its way in. Trio thread only.
from neptrio._cext.request cimport InferRequest, ModelCore

cdef class Door:
    cdef object repository
    cdef dict latest               # name -> the version that serves requests without one
    cdef public bint tracing       # kept by the tracer: True while a request may have to be traced
    cdef public bint trace_headers # kept by the tracer: True while headers may ask for a trace
    cdef public object tracer
    cpdef ModelCore lookup(self, str name, str version)
    cpdef submit(self, InferRequest request)
