# What one process says on one ring, and the memory of its messages until the other process is done with them.
#   The Segment belongs to whoever holds a reference: the area of a Line, and every Lease.
#   `small` and `lent` own the memory of messages that the other side still looks at; `lent` also holds what such a
#   message names instead of carrying it.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.kinds cimport KEEP_ABOVE, OWN
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport Entry, RingEnd, Segment

cdef struct Small:
    uint64_t behind      # our index of the ring behind its descriptor
    uint64_t offset
    uint64_t size

cdef class Queued:
    """A descriptor that waits in line: for room in its ring, for those before it, or for its bytes."""

    cdef Entry entry
    cdef MessageWriter writer               # what is still to be copied to where the descriptor says; None: nothing
    cdef list named                  # what the message names where it lies; None: nothing

cdef class Line:
    cdef RingEnd ring
    cdef BodyArea area
    cdef dict lent                   # offset -> what keeps a message until RETURN; one for all lines of a side
    cdef Small* small                # a circle: messages whose memory is free once the other side is past them
    cdef uint64_t small_room
    cdef uint64_t small_first        # where in it the oldest is, and how many there are
    cdef uint64_t small_count
    cdef object waiting              # deque of Queued, in order
    cdef object returns              # deque of offsets whose RETURN found the ring full
    cdef object late                 # called when a descriptor begins to wait: look() is to be called before long
    cdef object late_return          # the same for a RETURN, from any thread; None: look() is called from time to time
    cdef bint closed
    cdef uint64_t sent
    cdef object reserve(self, Entry* entry, list named)
    cdef int push(self, const Entry* entry) except -2
    cdef int give_back(self, uint64_t offset) except -1
    cdef int push_returns(self) except -2
    cdef int wait(self, const Entry* entry, MessageWriter writer, list named) except -1
    cdef bint reap(self) except -1
    cdef int close(self) except -1

cdef class Lease:
    cdef Line line                   # None: nobody waits for its RETURN
    cdef Segment segment             # alive as long as somebody looks
    cdef uint64_t offset


cdef inline bint is_lent(const Entry* entry) noexcept nogil:
    """Whether a message is looked at where it lies, until RETURN (rule 1 of cext/rings/line)."""
    return entry.length > KEEP_ABOVE or entry.offset & OWN != 0
