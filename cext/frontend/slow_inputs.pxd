# Inputs of one front end's requests that a worker takes up, and the requests that wait for those.
from libc.stdint cimport uint64_t

from neptrio.request.infer_request cimport InferRequest, Tensor

cdef class SlowInputs:
    cdef dict left                   # of the message that is read: Tensor that stands for an input -> function that returns this;
                                     # None: nothing is left so far
    cdef uint64_t here               # bytes of it that the loop has taken up
    cdef dict lines                  # (owner, model, sequence) -> deque of requests behind one whose inputs are taken up
    cdef int begin(self) except -1
    cdef bint too_slow(self, uint64_t size) noexcept
    cdef int leave(self, Tensor tensor, object read) except -1
    cdef bint waits(self, InferRequest request) except -1
    cdef int started(self, InferRequest request) except -1
    cdef InferRequest next(self, InferRequest request)

# Strings of a message that is lent: called, it copies them.
cdef class LentStrings:
    cdef Tensor tensor
    cdef object owner
    cdef const char* data
    cdef uint64_t nbytes

# Takes the inputs of a request up that were left. Any thread may call it.
cdef int take_up(InferRequest request, dict left) except -1
