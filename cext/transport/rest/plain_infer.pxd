# Steps of plain infer requests that HTTP/1.1 and HTTP/2 share. Trio thread only.
from libc.stdint cimport int64_t

from neptrio.execution.admission cimport Admission
from neptrio.request.infer_request cimport InferRequest, InferResponse

cdef bint read_plain(InferRequest request, tuple route, bytes body, Py_ssize_t header_length, int64_t start,
                     Admission admission, object shared_memory) except -1
cdef tuple print_now(object plain, object connection, InferRequest request, InferResponse response, bint binary_default)
cdef int check_host_memory(list blobs) except -1
cdef bint has_extra_headers(InferRequest request) noexcept
cdef list extra_headers(InferRequest request)
