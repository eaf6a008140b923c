# A connection's output: small pieces are copied one after the other, large ones are sent from where they are.
# put() is inline: it runs once for every frame and every small piece of a reply.
cimport cython
from libc.stdlib cimport realloc
from libc.string cimport memcpy

from neptrio.transport.http2.stream cimport Stream

@cython.final
cdef class Output:
    cdef char* data                # the pieces copied since the last large one
    cdef Py_ssize_t n
    cdef Py_ssize_t room
    cdef list segments             # everything before them

    cdef inline int put(self, const char* piece, Py_ssize_t size) except -1:
        cdef char* grown
        cdef Py_ssize_t room
        if self.n + size > self.room:
            room = 2 * (self.n + size) + 512     # little: idle connections keep it
            grown = <char*>realloc(self.data, room)
            if grown == NULL:
                raise MemoryError
            self.data = grown
            self.room = room
        memcpy(self.data + self.n, piece, size)
        self.n += size
        return 0

    cdef inline bint empty(self) noexcept:
        return self.n == 0 and not self.segments

    cdef int move(self, Stream stream, Py_ssize_t left) except -1   # from the stream's outbox
    cdef list take(self)           # all output, in order; nothing is left
