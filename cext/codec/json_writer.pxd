# A writer of compact JSON.
cimport cython
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from neptrio.codec.number_text cimport no_room

@cython.final
cdef class Writer:
    cdef PyObject* buffer     # a bytes object of `room` bytes, owned; nobody else refers to it
    cdef char* p
    cdef Py_ssize_t used
    cdef Py_ssize_t room
    # makes room for n more bytes, and one that is not written; returns where to write them. They end at end() at the latest;
    # wrote() is told the end of what was written
    cdef inline char* need(self, Py_ssize_t n) except NULL nogil:
        if self.used + n >= self.room:
            self.grow(n)
        return self.p + self.used
    cdef inline char* end(self) noexcept nogil:
        return self.p + self.room
    cdef inline int wrote(self, char* at) except -1 nogil:
        if at >= self.p + self.room:
            no_room()
        self.used = at - self.p
        return 0
    cdef int grow(self, Py_ssize_t n) except -1 nogil
    # most are constants, whose copy is one or two instructions where their length is known
    cdef inline int raw(self, const char* p, Py_ssize_t n) except -1 nogil:
        memcpy(self.need(n), p, n)
        self.used += n
        return 0
    cdef int quoted(self, const char* p, Py_ssize_t n) except -1 nogil
    cdef int text(self, str s) except -1               # in quotes and escaped
    cdef int integer(self, int64_t value) except -1
    cdef int real(self, double value) except -1
    cdef int value(self, object value) except -1
    cdef int _resize(self, Py_ssize_t room) except -1
    cdef bytes take(self)                              # the text; the writer cannot be used any more
