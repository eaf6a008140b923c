# One end of the way between the engine and a front end: two rings, and an area of memory on each side.
#   The Segment belongs to whoever holds a reference: the Channel, and every Lease and BodyMemory in it.
#   `lent` (until RETURN) and `small` own the memory of messages that the other side still looks at; `lent` holds the
#   tensors, too, that such a message names where they were received, and so the BodyMemory below them.
#   `owner` (a private copy of a small message, or a Lease) keeps the tensors of the message that is read.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.request.infer_request cimport Tensor
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.message cimport MessageReader
from neptrio.rings.packet cimport Packer
from neptrio.rings.ring cimport Entry, RingEnd, Segment

cdef struct Small:
    uint64_t behind      # our index of the ring behind its descriptor
    uint64_t offset
    uint64_t size

cdef class Channel(MessageReader):
    cdef Segment segment
    cdef RingEnd out
    cdef RingEnd into
    cdef BodyArea area
    cdef uint64_t other              # the other side's area
    cdef uint64_t other_end
    cdef uint64_t received_first     # where the other side may have received tensors; none at the front end
    cdef uint64_t received_end
    cdef Packer packer
    cdef list bodies                 # [Tensor] that the packed message names where they were received; None: none
    cdef dict lent                   # offset -> BodyMemory, or (BodyMemory, [Tensor]), until RETURN
    cdef Small* small                # a circle of SMALL: messages whose memory is free once the other side is past them
    cdef uint64_t small_first        # where in it the oldest is, and how many there are
    cdef uint64_t small_count
    cdef object outbox               # deque of (kind, size, id, offset, length, Packer or None, bodies), in order
    cdef object returns              # deque of offsets whose RETURN found the ring full
    cdef object bell                 # called where the other side sleeps
    cdef object late                 # called when something waits in the outbox: look() is to be called before long
    cdef readonly bint closed
    cdef readonly bint given_up      # the other side has written what cannot be (rule 9)
    cdef readonly uint64_t wakes     # how often the other side had to be woken
    cdef readonly uint64_t sleeps    # how often this side has said that it sleeps
    cdef readonly uint64_t received
    cdef readonly uint64_t sent
    # the message that is read
    cdef bint private                # nobody else can change its tensors
    cdef int give_up(self, str why) except -1
    cdef int send(self, uint32_t kind, uint64_t id, list tensors) except -1
    cdef int post(self, uint32_t kind, uint64_t id, uint64_t offset, uint64_t length) except -1
    cdef bint place(self, Entry* entry, Packer packer, list bodies) except -1
    cdef bint push(self, const Entry* entry) except -1
    cdef int wait(self, const Entry* entry, Packer packer, list bodies) except -1
    cdef int reap(self) except -1
    cdef int opened(self, const Entry* entry) except -1
    cdef int pack_tensor(self, Tensor tensor) except -1
    cdef int pack_received(self, Tensor tensor) except -1
    cdef int pack_place(self, Tensor tensor, uint32_t place) except -1
    cdef Tensor tensor(self)
    cdef Tensor tensor_in(self, str name, int dtype, tuple shape)
    cdef object owner_of_passed(self, const char* data, uint64_t nbytes)
    cdef int take(self, Entry* entry) except -1
    cdef int failed(self, const Entry* entry, error) except -1
    cdef bint taken(self, int at_once) except -1
