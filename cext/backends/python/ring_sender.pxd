# What the server says to a model's process, and what it remembers of it.
#   A Block of a batch is in BatchUnderWay for as long as the batch is under way.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.backends.python.ring_reader cimport AnswerReader
from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport WorkItem
from neptrio.request.infer_request cimport InferRequest, Tensor
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.line cimport Line, Queued
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block

cdef class BatchUnderWay:
    """A batch that the process has."""

    cdef Batch batch
    cdef Block block                 # None: it is not lent, or in a segment of its own
    cdef list bodies                 # tensors that lie in the bodies' area, None when there are none
    cdef int64_t begun
    cdef list reported               # executions that were reported before its result, None when there are none
    cdef uint64_t answered           # so many of its requests, the first, were answered as executions of their own
    cdef uint64_t place              # of its descriptor in the ring, from 1; 0 while it waits in line

cdef class MessageCopy(WorkItem):
    """The copying of a message that waits in line for it."""

    cdef RingSender end
    cdef Queued queued
    cdef MessageWriter writer
    cdef Segment segment             # where it copies to: the process may end meanwhile, and all else forget it
    cdef char* target

cdef class RingSender(AnswerReader):
    cdef Line work                   # to the process's main thread
    cdef Line control                # to its second thread
    cdef MessageWriter writer
    cdef BodyArea received_into      # where large bodies are received
    cdef object host
    cdef readonly dict batches       # number -> BatchUnderWay, in the order in which they began  # type: dict[int, BatchUnderWay]
    cdef uint64_t number
    cdef int send(self, Line line, uint32_t kind, uint64_t id, MessageWriter writer, BatchUnderWay under_way, mailbox) except -1
    cdef int pack_request(self, MessageWriter writer, InferRequest request, BatchUnderWay under_way) except -1
    cdef bint fit(self, Tensor tensor) noexcept
