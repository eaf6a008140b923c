# Which parts of an area of shared memory are in use. The accounts are this process's own.
from libc.stdint cimport int64_t, uint64_t

cdef enum:
    GRAIN = 256          # sizes are rounded up to it, and offsets are multiples of it

cdef struct Extent:
    uint64_t offset
    uint64_t size

cdef class Slab:
    cdef Extent* gaps                # free extents in the order of their offsets, never adjacent
    cdef Py_ssize_t count
    cdef Py_ssize_t room
    cdef readonly uint64_t first     # offset of the area
    cdef readonly uint64_t size
    cdef readonly uint64_t used      # bytes that are taken
    cdef readonly uint64_t peak      # the most that `used` has been
    cdef int64_t take(self, uint64_t size) except -2      # an offset, -1 when there is no room
    cdef int give(self, uint64_t offset, uint64_t size) except -1

cdef class Block:
    cdef Slab slab
    cdef readonly uint64_t offset
    cdef readonly uint64_t size

cdef Block block_of(Slab slab, uint64_t size)             # None when there is no room
