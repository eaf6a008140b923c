# A ring of descriptors in memory that two processes share, one end of it in each.
#   The memory belongs to the Segment that maps it; a RingEnd borrows it, so whoever holds a RingEnd
#   holds the Segment.
#   All functions are plain C over that memory: they hold no Python object and never block, but for
#   ring_wait(), which is called without the GIL.
from cpython.buffer cimport Py_buffer
from libc.stdint cimport int64_t, uint32_t, uint64_t

cdef enum:
    LINE = 64            # bytes of a cache line: what two sides write lies on lines of their own
    RING_HEAD = 256      # tail, head, asleep: a line each
    ENTRY = 32           # sizeof(Entry)

cdef struct Entry:
    uint32_t kind        # what it means is the business of the two sides (cext/rings/kinds)
    uint32_t size        # bytes of the message's own part in the slab
    uint64_t id
    uint64_t offset      # of the message in the slab
    uint64_t length      # bytes of the message with its tensors, or a number that the kind explains

cdef struct RingEnd:
    char* base           # of the ring in the shared memory
    uint64_t entries     # a power of two
    uint64_t own         # this end's index; never read back from the shared memory (rule 2)

cdef uint64_t ring_bytes(uint64_t entries) noexcept nogil
cdef int ring_push(RingEnd* ring, const Entry* entry) noexcept nogil     # 1, or 0 when it is full, -1 when broken
cdef int ring_peek(RingEnd* ring, Entry* entry) noexcept nogil           # 1, or 0 when it is empty, -1 when broken
cdef void ring_advance(RingEnd* ring) noexcept nogil                     # the entry that was peeked at is done with
cdef uint64_t ring_head(RingEnd* ring) noexcept nogil                    # the other end's progress, unchecked
cdef bint ring_must_wake(RingEnd* ring) noexcept nogil                   # after a push: the consumer sleeps
cdef void ring_wake(RingEnd* ring) noexcept nogil                        # a consumer in ring_wait()
cdef bint ring_sleep(RingEnd* ring) noexcept nogil                       # False: something came meanwhile
cdef void ring_stay(RingEnd* ring) noexcept nogil                        # undoes ring_sleep
cdef bint ring_spin(RingEnd* ring, int64_t spin_ns) noexcept nogil  # whether something came meanwhile
cdef int ring_wait(RingEnd* ring, int64_t spin_ns, int64_t timeout_ns) noexcept nogil  # 1 something, 0 time, -1 signal

cdef class Segment:
    cdef object map                  # the mmap, which holds a descriptor of its own
    cdef Py_buffer view
    cdef bint held
    cdef char* base
    cdef readonly size_t size
    cdef readonly int fd
