# A ModelInferRequest whose raw contents are received where the model will read them.
from libc.stdint cimport uint64_t

cdef enum:
    SPLIT_BYTES = 32768      # messages that are larger can be received so

cdef class SplitMessage:
    cdef readonly bytes head       # its fields before the raw contents
    cdef readonly list raws        # a buffer for each of the raw contents
    cdef list pieces               # all that has come, in order
    cdef object source
    cdef Py_ssize_t size
    cdef Py_ssize_t have
    cdef char* at                  # where the next byte of the last of `raws` belongs
    cdef Py_ssize_t left           # how many of its bytes are still to come
    cdef unsigned char[12] tag     # of the next field, as far as it has come
    cdef int tag_size
    cdef bytes whole               # the message in one piece, where it could not stay split
    cdef int add(self, const char* data, Py_ssize_t n) except -1
    cdef int next_raw(self, uint64_t n) except -1
    cdef int join(self) except -1
    cdef object finish(self)

# The message that begins with these bytes; None: it cannot be split; `more[0]` is then 1 if more bytes may tell.
cdef SplitMessage split(const char* data, Py_ssize_t n, Py_ssize_t size, object source_of, bint* more)
