# The compiled part of REST over HTTP/2: connections and plain infer requests. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport InferRequest, InferResponse
from neptrio.transport.http2.body_stream cimport BodyStream
from neptrio.transport.http2.connection_core cimport Http2Core

cdef class RestHttp2Core(Http2Core):
    cdef public bint fast_path         # plain infer requests are answered here
    cdef public object budget          # service.held_bytes.HeldBytes
    cdef public int64_t max_body
    cdef bytes known_host              # the last host that was accepted
    cdef bint takes_host(self, bytes host) except -1

cdef class RestStream(BodyStream):
    cdef readonly RestHttp2Core connection
    cdef public object exchange        # of a request that is not plain
    cdef InferRequest request          # the plain request while it executes
    cdef public object encoding        # a CancelScope while a worker prints the answer  # type: trio.CancelScope | None
    cdef tuple route                   # (model, version) of a plain request, else None
    cdef Py_ssize_t header_length
    cdef readonly int64_t began_ns     # when the request's head came
    cdef bint binary_default
    cdef int infer(self) except -1
    cdef int answer(self, InferRequest request, InferResponse response) except -1
    cpdef encoded(self, InferRequest request, tuple encoded)
