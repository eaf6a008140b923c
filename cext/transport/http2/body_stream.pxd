# A stream whose DATA are one body, without I/O.
from neptrio.transport.http2.stream cimport Stream

cdef class BodyStream(Stream):
    cdef readonly Py_ssize_t limit     # most bytes that the body may have
    cdef readonly Py_ssize_t expected  # bytes that were announced, -1: none were
    cdef readonly Py_ssize_t have      # bytes of it that have come
    cdef Py_ssize_t ask_at             # the budget is asked when more have come
    cdef char* at                      # of the memory of a body that was announced, else NULL
    cpdef int expect(self, Py_ssize_t announced, Py_ssize_t limit) except -1
    cdef bint room(self, Py_ssize_t size) except -1
    cpdef object body(self)
