"""What the server says to a model's process: its messages, and requests and responses made of them.

Rules:
 1. A message that is lent belongs to the server. A GivenMessage is the right to look at it; when the last array over it is gone
    the server is told, and only then is its memory used again. A short one is copied: its arrays are this process's own.
 2. To make a GivenMessage of a descriptor runs no Python code, so whoever takes descriptors can do both in one step.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.rings.kinds cimport *
from neptrio.rings.line cimport is_lent
from neptrio.rings.packet cimport Reader, read_text, read_u32, read_u64
from neptrio.rings.ring cimport Entry, Segment

import json

import numpy as np

from triton_python_backend_utils._errors import ErrorCode, TritonError
from triton_python_backend_utils._request import InferenceRequest, InferenceResponse, InferenceTrace
from triton_python_backend_utils._tensor import Tensor
from triton_python_backend_utils._types import _NUMPY, numpy_dtype, split_strings

cdef enum:
    STRINGS = 13

cdef object _frombuffer = np.frombuffer
cdef object _loads = json.loads
cdef dict _DTYPES = _NUMPY
cdef tuple _HOST = (1, 0)


@cython.no_gc  # or the collector might run where one is made: rule 2. So it is no Lease, whose subclasses have it all
cdef class GivenMessage:
    """A message of the server; rule 1."""

    def __dealloc__(self):
        if self.line is not None:
            self.line.give_back(self.offset)


@cython.no_gc
@cython.freelist(64)
cdef class InputBytes:
    """The writable memory of an input."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.data, self.size, self.readonly, flags)


@cython.no_gc
@cython.freelist(64)
cdef class InputArray:
    """The memory of one of the arrays that were made of a large input: whoever counts them knows who else may write there."""

    def __dealloc__(self):
        if self.source is not None:
            self.source.arrays -= 1

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.source.data, self.source.size, self.source.readonly, flags)


def _array(InputBytes source not None):
    """The array of an input (Tensor._over's convert)."""
    cdef InputArray made
    if source.dtype == STRINGS:
        elements = split_strings(source)
        array = np.empty(len(elements), dtype=object)
        array[:] = elements
        return array.reshape(source.shape)
    dtype = _DTYPES.get(source.dtype)
    if dtype is None:
        dtype = numpy_dtype(source.dtype)
    if source.size == 0:
        return np.empty(source.shape, dtype)
    if source.size > KEEP_ABOVE:  # a smaller one is copied whatever becomes of it
        made = InputArray.__new__(InputArray)
        made.source = source
        source.arrays += 1
        array = _frombuffer(made, dtype)
    else:
        array = _frombuffer(source, dtype)
    if len(source.shape) != 1:
        array = array.reshape(source.shape)
    return array


cdef Reader reader_of(GivenMessage message) noexcept:
    """Reads its own part, which the server does not change."""
    return Reader(message.base, message.base + message.size, False)


cdef class GivenReader:
    """Makes requests and responses of messages. `links` knows the segments that came over the socket."""

    cdef GivenMessage given(self, const Entry* entry):
        """The message of a descriptor; for one in a segment of its own reach() is to be called (rule 2)."""
        cdef GivenMessage message = GivenMessage.__new__(GivenMessage)
        message.kind, message.id, message.length, message.size = entry.kind, entry.id, entry.length, entry.size
        message.offset = entry.offset
        if entry.size and is_lent(entry):
            message.line = self.out
            if not entry.offset & OWN:
                message.segment = self.segment
                message.base = self.segment.base + entry.offset
        elif entry.size:
            message.copy = PyBytes_FromStringAndSize(self.segment.base + entry.offset, entry.length)
            message.base = PyBytes_AS_STRING(message.copy)
        return message

    cdef int reach(self, GivenMessage message) except -1:
        """Maps the segment of a message that lies in one of its own."""
        if message.base == NULL and message.size:
            message.segment = Segment(self.links.segment(message.offset & ~OWN), message.length)
            message.base = message.segment.base
        return 0

    def requests(self, uint64_t number, GivenMessage message not None) -> list:
        """What execute() is called with."""
        cdef Reader reader = reader_of(message)
        cdef uint32_t i, j, n, inputs, extra, flags, count
        cdef list made = [], names, wanted
        n = read_u32(&reader)
        for i in range(n):
            request = InferenceRequest.__new__(InferenceRequest)
            flags = read_u32(&reader)
            inputs = read_u32(&reader)
            request._timeout = read_u64(&reader)
            if flags & TEXT_ID:
                request._correlation_id = read_text(&reader)
            else:
                request._correlation_id = read_u64(&reader)
            request._request_id = read_text(&reader)
            trace = InferenceTrace(number << REQUEST_BITS | i) if flags & TRACED else None
            if trace is not None:
                trace._id, trace._parent = read_u64(&reader), read_u64(&reader)
            if flags & CONTEXT:
                trace._context = read_text(&reader)
            request._parameters = _loads(read_text(&reader)) if flags & PARAMETERS else None
            wanted = None
            if flags & NAMES:
                count = read_u32(&reader)
                extra = read_u32(&reader)
                wanted = [read_text(&reader) for j in range(count)]
                names = wanted[:count - extra] if extra else wanted[:]
            else:
                names = self.output_names[:]
            request._requested_output_names = names
            id = number << REQUEST_BITS | i
            request._trace = trace
            request._flags = flags & (START | END)
            request._model_name = self.model_name
            request._model_version = self.model_version
            request._preferred_memory = None
            request._release_flags = 1
            request._channel = self.channel(id, wanted)
            request._inputs = self.tensors(&reader, message, inputs)
            made.append(request)
        return made

    cdef list tensors(self, Reader* reader, GivenMessage message, uint32_t count):
        cdef list made = []
        cdef InputBytes source
        cdef uint32_t i, j, dimensions, place
        cdef const char* data = message.base + (message.size + 63) // 64 * 64
        for i in range(count):
            source = InputBytes.__new__(InputBytes)
            tensor = Tensor.__new__(Tensor)
            tensor._name = read_text(reader)
            source.dtype = read_u32(reader)
            dimensions = read_u32(reader)
            if dimensions == 1:
                source.shape = (read_u64(reader),)
            elif dimensions == 2:
                source.shape = (read_u64(reader), read_u64(reader))
            else:
                source.shape = tuple([read_u64(reader) for j in range(dimensions)])
            place = read_u32(reader)
            source.data = (data if place == HERE else self.segment.base) + read_u64(reader)
            source.size = read_u64(reader)
            source.message = message
            source.readonly = self.read_only
            tensor._array = None
            tensor._dtype = source.dtype
            tensor._shape = source.shape
            tensor._source = source
            tensor._convert = _array
            tensor._keep = False
            tensor._device = _HOST
            made.append(tensor)
        return made

    def response(self, GivenMessage message not None):
        """(InferenceResponse or None, final, times) of a response of another model; times: the request's seven and the version that has
        executed it, -1 for none; None unless they come with it."""
        cdef Reader reader = reader_of(message)
        cdef uint32_t flags
        flags = read_u32(&reader)
        times = None
        if flags & TIMES_TOO:
            times = (*[read_u64(&reader) for _ in range(7)], <int64_t>read_u64(&reader) - 1)
        if flags & NULL_RESPONSE:
            return None, bool(flags & FINAL), times
        how = read_u32(&reader)
        text = read_text(&reader)
        made = InferenceResponse.__new__(InferenceResponse)
        made._parameters = _loads(text) if text else None
        made._error = None
        made._tensors = []
        if how == ERROR:
            text = read_text(&reader)
            made._error = TritonError(text, ErrorCode(read_u32(&reader)))
        else:
            made._tensors = self.tensors(&reader, message, read_u32(&reader))
        return made, bool(flags & FINAL), times

    def sequence_end(self, GivenMessage message not None):
        """(correlation id, reason)."""
        cdef Reader reader = reader_of(message)
        id = read_text(&reader) if read_u32(&reader) else read_u64(&reader)
        return id, read_text(&reader)
