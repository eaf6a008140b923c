# What the server says to a model's process, and what it remembers of it.
#   The Segment belongs to whoever holds a reference: the sender, and every Lease and GivenBlock in it.
#   A Block is in `blocks` for as long as the process looks at it, and in Under for as long as the batch is under way.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport WorkItem
from neptrio.request.infer_request cimport InferRequest, Tensor
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.packet cimport Packer
from neptrio.rings.ring cimport Entry, RingEnd, Segment
from neptrio.rings.slab cimport Block, Slab

cdef class Under:
    """A batch that the process has."""

    cdef Batch batch
    cdef Block block                 # None: in a segment of its own
    cdef list bodies                 # tensors that lie in the bodies' area, None when there are none
    cdef int64_t begun
    cdef uint64_t place              # of its descriptor in the ring, from 1; 0 while it waits in line

cdef class Parcel(WorkItem):
    """A descriptor that waits for room in its ring, for those before it, or for its bytes."""

    cdef RingSender end
    cdef Entry entry
    cdef bint ready
    cdef Packer packer
    cdef char* target

cdef class RingSender:
    cdef Segment segment
    cdef RingEnd work
    cdef RingEnd control
    cdef Slab slab
    cdef Packer packer
    cdef BodyArea bodies
    cdef object host
    cdef readonly dict batches       # number -> Under, in the order in which they began  # type: dict[int, Under]
    cdef dict blocks                 # offset -> what the process looks at: Block or Segment, with tensors of bodies
    cdef object work_line            # deque of Parcels for the ring `work`, in order
    cdef object control_line         # and for the ring `control`
    cdef uint64_t number
    cdef readonly bint closed
    cdef readonly uint64_t wakes     # how often the process had to be woken
    cdef uint64_t copied_out         # bytes of tensors that were copied on their way to the process, once each time
    cdef uint64_t in_place_out       # and that crossed without a copy
    cdef int push(self, bint work_ring, const Entry* entry) except -1
    cdef int push_now(self, bint work_ring, const Entry* entry) except -2
    cdef int wake(self, bint work_ring) except -1
    cdef int flush_line(self, bint work_ring) except -1
    cdef int pushed(self, const Entry* entry) except -1
    cdef int post(self, bint work_ring, uint32_t kind, uint64_t id, uint64_t offset, uint64_t length) except -1
    cdef int send(self, bint work_ring, uint32_t kind, uint64_t id, Packer packer, Under under, mailbox) except -1
    cdef int pack_request(self, Packer packer, InferRequest request, Under under) except -1
    cdef bint fit(self, Tensor tensor) noexcept
    cdef int give_back(self, uint64_t offset) except -1
    cdef int broken(self, str text) except -1
