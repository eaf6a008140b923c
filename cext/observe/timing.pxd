# Times in answers: see timing.pyx.
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport InferRequest, InferResponse

cdef int take_wish(InferRequest request) except -1
cdef int tell(InferRequest request, InferResponse response, int64_t now) except -1
