# Messages of the server in the process of an isolated model, and the arrays of their tensors.
#   An InputBytes holds the GivenMessage that it lies in, and that the memory: a copy of its own, or a mapping. An InputArray
#   holds the InputBytes.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.rings.line cimport Line
from neptrio.rings.packet cimport Reader
from neptrio.rings.ring cimport Entry, Segment

cdef class GivenMessage:
    cdef Line line           # None: nobody waits for its RETURN
    cdef Segment segment     # alive as long as somebody looks
    cdef uint64_t offset
    cdef bytes copy          # of the whole message, if it was short
    cdef const char* base
    cdef uint32_t kind
    cdef uint32_t size       # of its own part
    cdef uint64_t id
    cdef uint64_t length
    cdef GivenMessage after  # the one that came behind it, while both wait to be handled

cdef class InputBytes:
    cdef GivenMessage message
    cdef const char* data
    cdef uint64_t size
    cdef int dtype
    cdef tuple shape
    cdef bint readonly
    cdef Py_ssize_t arrays   # how many InputArrays there are

cdef class InputArray:
    cdef InputBytes source

cdef class GivenReader:
    cdef Segment segment
    cdef Line out                # on which messages are returned
    cdef object links
    cdef readonly bint read_only
    cdef str model_name
    cdef int64_t model_version
    cdef list output_names
    cdef object channel          # channel(id, wanted names) makes a request's way back
    cdef GivenMessage given(self, const Entry* entry)
    cdef int reach(self, GivenMessage message) except -1
    cdef list tensors(self, Reader* reader, GivenMessage message, uint32_t count)
