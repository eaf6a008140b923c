# The compiled part of ModelInfer calls. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport InferRequest, InferResponse
from neptrio.transport.grpc.message_stream cimport GrpcStream
from neptrio.transport.http2.connection_core cimport Http2Core

cdef class UnaryCore(GrpcStream):
    cdef public Http2Core _connection
    cdef public object _timer  # type: Timer | None
    cdef public object _message        # the complete request message: bytes or a SplitMessage
    cdef public bint _compressed
    cdef public InferRequest _request  # the request while it executes  # type: InferRequest | None
    cdef public object _infer          # the GrpcInfer of a message that is not plain, else None
    cdef public int64_t _began_ns
    cpdef start(self)
    cdef int answer(self, InferRequest request, InferResponse response) except -1
