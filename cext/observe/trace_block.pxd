# What a trace file says of finished requests, on its way to the file: records, a few hundred bytes each.
# Filled on the trio thread; read by whoever took the block from its scope.
from libc.stdint cimport int32_t, int64_t

from neptrio.request.infer_request cimport TIMESTAMP_COUNT

cdef struct Point:
    int64_t ns
    int name            # index into TEXTS

cdef struct Record:     # in a block it is followed by what the three numbers at its end tell
    int64_t id
    int64_t parent      # 0 = a root
    int64_t timestamps[TIMESTAMP_COUNT]
    int64_t made        # the first response: when it was there, and when it was sent
    int64_t send_start
    int64_t send_end    # 0 = it was not sent
    char front          # a Protocol: what the request came through, NO_PROTOCOL = a step or a call
    bint composing
    bint told_by_front
    bint timed
    int32_t more        # further responses: three int64 each (made, send start, send end)
    int32_t head        # bytes of the object up to its id
    int32_t rest        # bytes of what comes between its ids and its timestamps

cdef enum:
    PLAIN = 16          # points of a record with one response, at most

cdef Py_ssize_t record_size(const Record* record) noexcept nogil   # with all that follows it
cdef Py_ssize_t text_room(const Record* record) noexcept nogil     # bytes that render() needs at most
cdef char* render(const Record* record, char* at) noexcept nogil   # the object's end; NULL: no memory
cdef int write_all(int fd, const char* data, Py_ssize_t n) noexcept nogil  # 0, or the number of the error
cdef int collect(const Record* record, const int64_t* more, Point* points) noexcept nogil

cdef struct Records:
    char* data
    Py_ssize_t size
    char* chunk         # where text is made before it is written
    Py_ssize_t room     # of it

cdef int write_text(Records* records, int fd) noexcept nogil       # 0, or the number of the error, -1 = no memory

cdef class TraceBlock:
    cdef Records records
    cdef Py_ssize_t room
    cdef readonly int64_t traces
    cdef public int64_t most         # traces that it may hold
    cdef char* reserve(self, Py_ssize_t n) except NULL
