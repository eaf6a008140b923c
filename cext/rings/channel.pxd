# The server's end, or a front end's, of the way to one other process: what came is taken from one ring, what is said goes
# out on one or more (cext/rings/line).
#   `owner` (a private copy of a small message, or a Lease) keeps the tensors of the message that is read.
from libc.stdint cimport int64_t, uint32_t, uint64_t

from neptrio.request.infer_request cimport Tensor
from neptrio.rings.body_area cimport BodyArea
from neptrio.rings.line cimport Line, Queued
from neptrio.rings.message cimport MessageReader
from neptrio.rings.ring cimport Entry, RingEnd, Segment

cdef enum:
    ALIGNED = 16         # a tensor that does not lie at a multiple of this is copied, and not looked at where it lies

cdef class Channel(MessageReader):
    cdef Segment segment
    cdef RingEnd into
    cdef BodyArea area               # of this side's messages
    cdef uint64_t other              # the other side's area
    cdef uint64_t other_end
    cdef dict lent                   # of all lines
    cdef list lines
    cdef Line out                    # the line that returns go on
    cdef int64_t turn_ns             # how long drain() may take before other events have their turn; 0: any time
    cdef readonly bint closed
    cdef readonly bint given_up      # the other side has written what cannot be (rule 6)
    cdef readonly uint64_t wakes     # how often the other side had to be woken
    cdef readonly uint64_t sleeps    # how often this side has said that it sleeps
    cdef readonly uint64_t received
    cdef bint private                # of the message that is read: nobody else can change its tensors
    cdef Line line(self, uint64_t at, uint64_t entries, late, late_return)
    cdef int give_up(self, str why) except -1
    cdef int push(self, Line line, const Entry* entry) except -1
    cdef bint try_push(self, Line line, const Entry* entry) except -1
    cdef int post(self, Line line, uint32_t kind, uint64_t id, uint64_t length) except -1
    cdef bint flush(self, Line line) except -1
    cdef int pushed(self, Line line, const Entry* entry) except -1
    cdef bint placed(self, Line line, Queued queued) except -1
    cdef int wake(self, Line line) except -1
    cdef bint taken(self, int at_once) except -1
    cdef int take(self, Entry* entry) except -1
    cdef int failed(self, const Entry* entry, error) except -1
    cdef bint opened(self, const Entry* entry) except -1
    cdef Segment own_segment(self, const Entry* entry)
    cdef int place(self, Tensor tensor, const char* data, uint64_t nbytes) except -1
