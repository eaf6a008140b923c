# What a backend has said of a request's statistics: how it ended and when its parts began and ended, or that it will say so later.
from libc.stdint cimport int64_t
from neptrio.request.infer_request cimport InferRequest, InferResponse

cdef class Stated:
    cdef public int how                  # SUCCEEDED, FAILED, LATER or RELEASED of rings.kinds
    cdef int64_t times[4]
    cdef InferRequest request            # of an answered one whose report is awaited: what is needed to count it
    cdef InferResponse response
    cdef int apply(self, InferRequest request) except -1
    cdef int put_off(self, InferRequest request, InferResponse response, object error) except -1

cdef int add_to_ensemble(InferRequest request, int64_t end) except -1
