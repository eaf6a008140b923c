# When the answers to traced requests are sent: what a front end notes, and what the engine waits for.
from libc.stdint cimport int64_t, uint64_t

from neptrio.frontend.channel cimport Channel
from neptrio.observe.trace cimport Trace, Tracing
from neptrio.request.infer_request cimport InferRequest, InferResponse

cdef class Awaited:                  # in the engine
    cdef readonly dict traces        # id of the request -> its Trace, of which SENT is owed
    cdef bint wants(self, Trace trace) except -1
    cdef int expect(self, object key, Trace trace) except -1
    cdef int told(self, uint64_t id, uint64_t start, uint64_t end) except -1
    cdef int gone(self) except -1

cdef class Sends(Tracing):           # in a front end
    cdef readonly set open           # numbers of the requests whose traces are open here
    cdef Sending begin(self, Channel channel, InferRequest request, uint64_t id)

cdef class Sending(Trace):           # in a front end: request.trace
    cdef Channel channel             # None once closed
    cdef int64_t owed                # responses of which the engine wants to know when they were sent
    cdef object comes(self, InferResponse response, bint final)
    cdef int tell(self, int64_t start, int64_t end) except -1
