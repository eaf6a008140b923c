"""Rings of descriptors in shared memory, and the memory itself.

The problem: a request to a model in a process of its own must cross two process borders for a few
microseconds, no system call where the other side is awake, and nothing of it may depend on what
the other process does to the memory. The choice: rings with one producer and one consumer.
Messages and tensors lie beside them in the same memory (cext/rings/slab); a ring carries fixed-size
descriptors of them.

    line 0    tail      entries that were pushed, ever; written by the producer
    line 1    head      entries that were taken, ever; written by the consumer
    line 2    asleep    1: the consumer sleeps, or is about to; the producer clears it and wakes
    then      a line that nothing uses, and entries of 32 bytes

Waking: the consumer sets `asleep`, looks once more, sleeps on the word (a futex) or on a descriptor
of its own (an eventfd in the server's epoll). The producer pushes, then looks at `asleep`. A full
barrier between the two steps on both sides makes sure that one of them sees the other.

Rules:
 1. Exactly one process pushes and one takes. Inside a process the GIL is the lock: push, peek and
    advance are called with it held.
 2. Each end keeps its own index to itself and only publishes it. What the other side published is
    compared with it: a distance that cannot be is answered with -1, and nothing is read.
 3. An entry is copied out before it is looked at, so it cannot change between check and use.
 4. The memory is sealed against shrinking and growing before it is shared: a page that was there
    when it was mapped is there when it is read.
 5. Only a process that sleeps is woken, and only the server's end may be told through a descriptor.
    It never reads or writes that descriptor: the other process shares its flags and could make it
    block. It waits for edges on it (docs/isolation.md).
"""
import fcntl
import mmap
import os

from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy


cdef extern from "words.h":
    uint64_t SHARED_LOAD64(void*) nogil
    void SHARED_STORE64(void*, uint64_t) nogil
    uint32_t SHARED_LOAD32(void*) nogil
    void SHARED_STORE32(void*, uint32_t) nogil
    uint32_t SHARED_SWAP32(void*, uint32_t) nogil
    void SHARED_FENCE() nogil
    void RELAX() nogil
    int64_t shared_now() nogil
    void shared_wake(void*) nogil
    int shared_sleep(void*, uint32_t, int64_t) nogil


cdef uint64_t ring_bytes(uint64_t entries) noexcept nogil:
    return RING_HEAD + entries * ENTRY


cdef int ring_push(RingEnd* ring, const Entry* entry) noexcept nogil:
    cdef uint64_t used = ring.own - SHARED_LOAD64(ring.base + LINE)
    if used >= ring.entries:
        return 0 if used == ring.entries else -1
    memcpy(ring.base + RING_HEAD + (ring.own & (ring.entries - 1)) * ENTRY, entry, ENTRY)
    ring.own += 1
    SHARED_STORE64(ring.base, ring.own)
    return 1


cdef int ring_peek(RingEnd* ring, Entry* entry) noexcept nogil:
    cdef uint64_t waiting = SHARED_LOAD64(ring.base) - ring.own
    if waiting == 0:
        return 0
    if waiting > ring.entries:
        return -1
    memcpy(entry, ring.base + RING_HEAD + (ring.own & (ring.entries - 1)) * ENTRY, ENTRY)
    return 1


cdef void ring_advance(RingEnd* ring) noexcept nogil:
    ring.own += 1
    SHARED_STORE64(ring.base + LINE, ring.own)


cdef uint64_t ring_head(RingEnd* ring) noexcept nogil:
    return SHARED_LOAD64(ring.base + LINE)


cdef bint ring_must_wake(RingEnd* ring) noexcept nogil:
    SHARED_FENCE()
    return SHARED_LOAD32(ring.base + 2 * LINE) != 0 and SHARED_SWAP32(ring.base + 2 * LINE, 0) != 0


cdef void ring_wake(RingEnd* ring) noexcept nogil:
    shared_wake(ring.base + 2 * LINE)


cdef bint ring_sleep(RingEnd* ring) noexcept nogil:
    SHARED_STORE32(ring.base + 2 * LINE, 1)
    SHARED_FENCE()
    if SHARED_LOAD64(ring.base) != ring.own:
        SHARED_STORE32(ring.base + 2 * LINE, 0)
        return False
    return True


cdef void ring_stay(RingEnd* ring) noexcept nogil:
    SHARED_STORE32(ring.base + 2 * LINE, 0)


cdef bint ring_spin(RingEnd* ring, int64_t spin_ns) noexcept nogil:
    cdef int64_t end = shared_now() + spin_ns
    cdef int i
    while True:
        for i in range(64):
            if SHARED_LOAD64(ring.base) != ring.own:
                return True
            RELAX()
        if shared_now() >= end:
            return False


cdef int ring_wait(RingEnd* ring, int64_t spin_ns, int64_t timeout_ns) noexcept nogil:
    cdef int how
    if SHARED_LOAD64(ring.base) != ring.own:
        return 1
    if spin_ns > 0 and ring_spin(ring, spin_ns):
        return 1
    if not ring_sleep(ring):
        return 1
    how = shared_sleep(ring.base + 2 * LINE, 1, timeout_ns)
    SHARED_STORE32(ring.base + 2 * LINE, 0)
    if SHARED_LOAD64(ring.base) != ring.own:
        return 1
    return -1 if how < 0 else 0


def is_sealed(int fd, size_t size) -> bool:
    """True when a descriptor that another process made has at least `size` bytes and keeps them."""
    try:
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK) and os.fstat(fd).st_size >= size
    except OSError:
        return False


SUPPORTED = hasattr(os, "memfd_create") and hasattr(fcntl, "F_ADD_SEALS") and hasattr(os, "eventfd")  # type: bool


cdef class Segment:
    """A mapping of shared memory, and the descriptor it was made from, which it owns."""

    def __cinit__(self):
        self.fd = -1

    def __init__(self, int fd, size_t size):
        self.fd = fd
        self.map = mmap.mmap(fd, size)
        self.size = size
        PyObject_GetBuffer(self.map, &self.view, PyBUF_WRITABLE)
        self.held = True
        self.base = <char*>self.view.buf

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)
        if self.fd >= 0:
            os.close(self.fd)

    @property
    def address(self) -> int:
        """Where it is mapped."""
        return <size_t>self.base

    def read(self, size_t offset, size_t size) -> bytes:
        """A copy of some bytes, for tests and for looking at it."""
        if offset > self.size or size > self.size - offset:
            raise IndexError(f"{size} bytes at {offset} are not in a segment of {self.size}")
        return self.base[offset: offset + size]

    def write(self, size_t offset, bytes data not None):
        """Writes some bytes, for tests."""
        cdef size_t size = len(data)
        if offset > self.size or size > self.size - offset:
            raise IndexError(f"{size} bytes at {offset} are not in a segment of {self.size}")
        memcpy(self.base + offset, <const char*>data, size)


class Broken(Exception):
    """The other side has published what cannot be."""


cdef class Ring:
    """One end of a ring from Python, for tests and for looking at it."""

    cdef Segment segment
    cdef RingEnd end

    def __init__(self, Segment segment not None, size_t offset, uint64_t entries):
        if entries == 0 or entries & (entries - 1):
            raise ValueError(f"a ring has a power of two of entries, got {entries}")
        if offset % LINE or offset > segment.size or ring_bytes(entries) > segment.size - offset:
            raise ValueError(f"a ring of {entries} entries at {offset} is not in a segment of {segment.size}")
        self.segment = segment
        self.end.base = segment.base + offset
        self.end.entries = entries
        self.end.own = 0

    @staticmethod
    def bytes_of(uint64_t entries) -> int:
        """The memory that a ring of so many entries takes."""
        return ring_bytes(entries)

    def push(self, uint32_t kind, uint32_t size, uint64_t id, uint64_t offset, uint64_t length) -> bool:
        """False when it is full. Wakes a consumer that waits. Raises Broken."""
        cdef Entry entry
        entry.kind, entry.size, entry.id, entry.offset, entry.length = kind, size, id, offset, length
        done = ring_push(&self.end, &entry)
        if done < 0:
            raise Broken("the consumer's index cannot be")
        if done and ring_must_wake(&self.end):
            ring_wake(&self.end)
        return done > 0

    def pop(self):
        # type: () -> tuple[int, int, int, int, int] | None
        """(kind, size, id, offset, length), or None when it is empty. Raises Broken."""
        cdef Entry entry
        done = ring_peek(&self.end, &entry)
        if done < 0:
            raise Broken("the producer's index cannot be")
        if not done:
            return None
        ring_advance(&self.end)
        return entry.kind, entry.size, entry.id, entry.offset, entry.length

    def wait(self, int64_t timeout_ns=-1, int64_t spin_ns=0) -> bool:
        """Sleeps until there is something; False after `timeout_ns` or a signal."""
        cdef int done
        with nogil:
            done = ring_wait(&self.end, spin_ns, timeout_ns)
        return done > 0

    @property
    def asleep(self) -> bool:
        """The consumer sleeps, or is about to."""
        return SHARED_LOAD32(self.end.base + 2 * LINE) != 0
