# Where large bodies of requests are received, in memory that the process which uses them maps.
from libc.stdint cimport uint64_t

from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block, Slab

cdef class BodyArea:
    cdef Segment segment
    cdef Slab slab
    cdef uint64_t first
    cdef uint64_t size
    cdef int give(self, uint64_t offset, uint64_t size) except -1
    cdef void trim(self, uint64_t offset, uint64_t size) noexcept
    cdef bint holds(self, const char* data, uint64_t size) noexcept nogil

cdef class BodyMemory:
    cdef BodyArea area
    cdef Block block
