"""The free and the taken parts of an area of shared memory.

Messages and tensors come and go in any order, a few at a time, small ones mostly. The choice: a
sorted list of gaps, the first that fits. Low addresses are used again and again, so an area of
many megabytes costs the pages that were needed at once; the list is short because what is adjacent
is joined.

Rules:
 1. The list lies in this process's own memory. The area itself holds no accounts, so nothing that
    the other process writes there can change what is handed out.
 2. A Block is the right to its extent: it is given back when the last reference to the Block goes.
    Whoever reads or writes there, or lets the other process do so, holds the Block.
"""
cimport cython
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memmove


cdef class Slab:
    """The accounts of `size` bytes at `first`."""

    def __cinit__(self, uint64_t first, uint64_t size):
        self.room = 64
        self.gaps = <Extent*>malloc(self.room * sizeof(Extent))
        if self.gaps == NULL:
            raise MemoryError
        self.first = first
        self.size = size // GRAIN * GRAIN
        self.count = 1 if self.size else 0
        self.gaps[0].offset = first
        self.gaps[0].size = self.size

    def __dealloc__(self):
        free(self.gaps)

    cdef int64_t take(self, uint64_t size) except -2:
        cdef Py_ssize_t i
        cdef uint64_t offset
        cdef uint64_t wanted = (max(size, <uint64_t>1) + GRAIN - 1) // GRAIN * GRAIN
        if size > self.size:
            return -1
        for i in range(self.count):
            if self.gaps[i].size >= wanted:
                offset = self.gaps[i].offset
                self.gaps[i].offset += wanted
                self.gaps[i].size -= wanted
                if self.gaps[i].size == 0:
                    self.count -= 1
                    memmove(self.gaps + i, self.gaps + i + 1, (self.count - i) * sizeof(Extent))
                self.used += wanted
                if self.used > self.peak:
                    self.peak = self.used
                return <int64_t>offset
        return -1

    cdef int give(self, uint64_t offset, uint64_t size) except -1:
        """Takes an extent back as take() gave it."""
        cdef Py_ssize_t low = 0, high = self.count, middle
        cdef Extent* grown
        size = (max(size, <uint64_t>1) + GRAIN - 1) // GRAIN * GRAIN
        while low < high:
            middle = (low + high) // 2
            if self.gaps[middle].offset < offset:
                low = middle + 1
            else:
                high = middle
        self.used -= size
        if low > 0 and self.gaps[low - 1].offset + self.gaps[low - 1].size == offset:
            self.gaps[low - 1].size += size
            if low < self.count and self.gaps[low].offset == offset + size:
                self.gaps[low - 1].size += self.gaps[low].size
                self.count -= 1
                memmove(self.gaps + low, self.gaps + low + 1, (self.count - low) * sizeof(Extent))
            return 0
        if low < self.count and self.gaps[low].offset == offset + size:
            self.gaps[low].offset = offset
            self.gaps[low].size += size
            return 0
        if self.count == self.room:
            grown = <Extent*>realloc(self.gaps, 2 * self.room * sizeof(Extent))
            if grown == NULL:
                raise MemoryError
            self.gaps = grown
            self.room *= 2
        memmove(self.gaps + low + 1, self.gaps + low, (self.count - low) * sizeof(Extent))
        self.gaps[low].offset = offset
        self.gaps[low].size = size
        self.count += 1
        return 0

    def block(self, uint64_t size):
        # type: (...) -> Block | None
        """A Block of at least `size` bytes, or None when there is no room for it."""
        return block_of(self, size)

    @property
    def largest(self) -> int:
        """Bytes of the largest block that could be had now."""
        return max((self.gaps[i].size for i in range(self.count)), default=0)

    @property
    def fragments(self) -> int:
        """In how many pieces the free memory lies."""
        return self.count


@cython.no_gc
@cython.freelist(64)
cdef class Block:
    """An extent of a Slab, for as long as somebody holds this object."""

    def __dealloc__(self):
        if self.slab is not None:
            self.slab.give(self.offset, self.size)


cdef Block block_of(Slab slab, uint64_t size):
    cdef int64_t offset = slab.take(size)
    cdef Block block
    if offset < 0:
        return None
    block = Block.__new__(Block)
    block.slab = slab
    block.offset = <uint64_t>offset
    block.size = size
    return block
