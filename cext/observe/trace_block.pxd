# Blocks of records: finished traces on their way to the trace file, a few hundred bytes each. Filled on the trio
# thread, read by whoever took the block from its scope.
from libc.stdint cimport int32_t, int64_t

from neptrio.observe.file_sink cimport Sink
from neptrio.request.infer_request cimport TIMESTAMP_COUNT

cdef struct Point:
    int64_t ns
    int name            # index into TEXTS; behind these, of a point that the model has reported

cdef struct Record:     # in a block, the data whose sizes are its last five members follows it: points, then texts
    int64_t id
    int64_t parent      # 0 = it is a root
    int64_t timestamps[TIMESTAMP_COUNT]
    int64_t made        # the first response: when it was made, and when it was sent
    int64_t send_start
    int64_t send_end    # 0 = it was not sent
    char front          # a Protocol: how the request came in, NO_PROTOCOL = a step or a call
    bint composing
    bint answered_by_front
    bint timed
    int32_t more        # further responses: three int64 each (made, send start, send end)
    int32_t head        # bytes of the object before its id
    int32_t reported    # points that the model has reported: two int64 each (when, where its text begins behind the others)
    int32_t rest        # bytes of the object between its ids and its timestamps
    int32_t names       # bytes of the texts of reported points

cdef enum:
    PLAIN = 16          # most points of a record with one response

cdef Py_ssize_t record_size(const Record* record) noexcept nogil   # with everything that follows it
cdef Py_ssize_t text_room(const Record* record) noexcept nogil     # most bytes that render() needs
# returns the object's end, which is `end` when the room was too small; NULL when there is no memory
cdef char* render(const Record* record, char* at, char* end) noexcept nogil
cdef int collect(const Record* record, const int64_t* more, Point* points) noexcept nogil

cdef struct Records:
    char* data
    Py_ssize_t size
    char* chunk         # where text is made before it is written
    Py_ssize_t room     # the size of `chunk`

# returns 0 or the number of the error, -1 = no memory
cdef int write_text(Records* records, Sink* sink) noexcept nogil

cdef class TraceBlock:
    cdef Records records
    cdef Py_ssize_t room
    cdef readonly int64_t traces
    cdef public int64_t most         # how many traces it may hold
    cdef char* reserve(self, Py_ssize_t n) except NULL
