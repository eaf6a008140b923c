"""Inputs of a front end's requests that take long to take up: parts of regions of shared memory, and strings.

The problem: a front end decodes, but regions of shared memory are known to the engine alone, and strings, which a front end
could change while they are looked at, are copied there and their lengths walked over. A short request may name a region
again and again: on the loop, that would keep everybody waiting for seconds. The choice: what is read of a request beyond HERE_BYTES
is left to a worker, as it is without front ends, and the requests of the same sequence that come meanwhile wait. No other has
to: answers to one connection are put in order by its front end.

Rules:
 1. Whether there is such a region, and such a part of it, is found out when the message is read: what is unregistered while the
    request waits is read nevertheless.
 2. Requests of one sequence are admitted in the order in which they came. Those of others, of other clients' sequences with the
    same id too, do not wait.
 3. While a request is taken up its inputs belong to the thread that does it. When its client leaves, the next input is not begun.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint64_t
from libc.string cimport memcpy

from neptrio.request.infer_request cimport InferRequest, Tensor
from neptrio.request.validate cimport walk_strings

from collections import deque

from neptrio.codec.shared_memory import LARGE_BYTES
from neptrio.errors import Cancelled

cdef uint64_t HERE_BYTES = LARGE_BYTES


cdef class SlowInputs:
    """See the module's text."""

    def __cinit__(self):
        self.lines = {}

    cdef int begin(self) except -1:
        """The next message is read."""
        self.left = None
        self.here = 0
        return 0

    cdef bint too_slow(self, uint64_t size) noexcept:
        """Whether a worker is to take the next input up, which is so long. Behind one that is too long all others are."""
        if size <= HERE_BYTES - self.here:
            self.here += size
            return False
        self.here = HERE_BYTES
        return True

    cdef int leave(self, Tensor tensor, object read) except -1:
        """`tensor` stands for an input until read() has returned this."""
        if self.left is None:
            self.left = {}
        self.left[tensor] = read
        return 0

    cdef bint waits(self, InferRequest request) except -1:
        """Puts a request in line if one of its sequence is taken up."""
        line = self.lines.get(sequence_of(request)) if request.sequence_id else None
        if line is None:
            return False
        line.append(request)
        return True

    cdef int started(self, InferRequest request) except -1:
        """The inputs of a request are taken up, that does not wait. next() is owed."""
        if request.sequence_id:
            self.lines[sequence_of(request)] = deque()
        return 0

    cdef InferRequest next(self, InferRequest request):
        """The request whose turn it is behind this one, which has been taken up and admitted, or refused. None: no one has waited."""
        key = sequence_of(request)
        line = self.lines.get(key) if request.sequence_id else None
        if line:
            return line.popleft()
        if line is not None:
            del self.lines[key]
        return None


cdef tuple sequence_of(InferRequest request):
    return request.owner, request.model_name, request.sequence_id


cdef class LentStrings:
    """See slow_inputs.pxd."""

    def __call__(self):
        cdef bytes copy = PyBytes_FromStringAndSize(NULL, self.nbytes)
        cdef char* to = PyBytes_AS_STRING(copy)
        with nogil:  # for tens of milliseconds; nobody else knows of `copy`
            memcpy(to, self.data, self.nbytes)
        self.tensor.owner = copy
        self.tensor.ptr = to
        self.tensor.nbytes = self.nbytes
        self.owner = None
        return self.tensor


cdef int take_up(InferRequest request, dict left) except -1:
    cdef Tensor tensor
    cdef list inputs = []
    for tensor in request.inputs:
        read = left.get(tensor)
        if read is not None:
            if request.cancelled:
                raise Cancelled
            tensor = read()
        inputs.append(tensor)
    walk_strings(inputs, NULL)
    request.inputs = inputs
    return 0
