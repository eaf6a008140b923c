"""The part of the shared memory into which the bodies of large requests are received.

The problem: between the socket and a model in a process of its own, the bytes of a large request should
be copied by the kernel only, and so they should between the socket of a front end and the engine. The choice:
a transport that knows the model before it has the body asks for memory here and receives into it; the message
of the batch, or of the request, then says where the tensor lies.

Rules:
 1. What is received here may be changed by the other process at any moment: it maps this memory, and
    may have kept the addresses of an earlier request. So only elements of numbers belong here, of
    requests to this one process; whatever has a structure (JSON, strings) is received elsewhere.
 2. A BodyMemory is the right to its extent. Tensors over it own it, and so does who has told the other process of it, so it
    is given back when the request has been answered and nobody looks at it any more.
 3. Low addresses are used first. Pages above WARM bytes go back to the system with the body that
    needed them; those below stay, because new pages cost more than the copy that this saves.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uint64_t

from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block, Slab, block_of

cdef extern from *:
    """
    #include <stdint.h>
    #include <sys/mman.h>
    static void give_pages_back(char *base, uint64_t from, uint64_t to) {
    #ifdef MADV_REMOVE
        from = (from + 4095) / 4096 * 4096;
        to = to / 4096 * 4096;
        if (from < to) madvise(base + from, to - from, MADV_REMOVE);
    #endif
    }
    """
    void give_pages_back(char* base, uint64_t begin, uint64_t end) nogil

cdef enum:
    WARM = 67108864      # bytes of an area whose pages stay


cdef class BodyArea:
    """`size` bytes at `first` of a segment. take() and the last reference to what it returns need the GIL only."""

    def __init__(self, Segment segment not None, uint64_t first, uint64_t size):
        if first > segment.size or size > segment.size - first:
            raise ValueError(f"{size} bytes at {first} are not in a segment of {segment.size}")
        self.segment = segment
        self.first = first
        self.size = size
        self.slab = Slab(first, size)

    def take(self, uint64_t size):
        # type: (...) -> BodyMemory | None
        """Writable memory of `size` bytes, None when there is no room for it."""
        cdef BodyMemory made
        cdef Block block = block_of(self.slab, size)
        if block is None:
            return None
        made = BodyMemory.__new__(BodyMemory)
        made.area = self
        made.block = block
        return made

    cdef int give(self, uint64_t offset, uint64_t size) except -1:
        """Takes memory back that was taken from `slab` without an object that holds it."""
        self.trim(offset, size)
        return self.slab.give(offset, size)

    cdef void trim(self, uint64_t offset, uint64_t size) noexcept:
        """Gives the pages of memory that nobody uses any more back to the system: rule 3."""
        cdef uint64_t end = offset + size
        if end > self.first + WARM:
            give_pages_back(self.segment.base, max(offset, self.first + <uint64_t>WARM), end)

    cdef bint holds(self, const char* data, uint64_t size) noexcept nogil:
        """Whether these bytes lie in the area."""
        cdef uint64_t at = data - self.segment.base  # what lies before it becomes a very large number
        return self.first <= at <= self.first + self.size and size <= self.first + self.size - at

    @property
    def used(self) -> int:
        """Bytes that are taken."""
        return self.slab.used


@cython.no_gc
cdef class BodyMemory:
    """The memory of one body; rule 2."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.area.segment.base + self.block.offset, self.block.size, False, flags)

    def __dealloc__(self):
        if self.block is not None:
            self.area.trim(self.block.offset, self.block.size)

    def __len__(self):
        return self.block.size
