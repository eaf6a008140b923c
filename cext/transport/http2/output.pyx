"""Collects the bytes that an HTTP/2 connection sends at once.

The problem: frames are small and many, tensors are large and few. A buffer object per frame costs more than the frame,
a copy of a tensor more than the tensor. The choice: small pieces are copied into one buffer; a large piece ends that
buffer and is sent from where it is.

Rules:
 1. take() returns buffers in the order of the pieces, and keeps none of them.
 2. A stream whose outbox is moved here is told how many bytes have left it; large pieces keep their owners alive.
 3. Memory beyond 1 MiB is freed after the loop pass that needed it.
"""
cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdlib cimport free

from neptrio.transport.http2.stream cimport Stream

cdef enum:
    LARGE_PIECE = 16384
    KEPT_ROOM = 1048576


@cython.final
cdef class Output:
    """See output.pxd."""

    def __cinit__(self):
        self.data = NULL
        self.segments = []

    def __dealloc__(self):
        free(self.data)

    cdef int move(self, Stream stream, Py_ssize_t left) except -1:
        cdef Py_ssize_t n, size
        cdef Py_buffer view
        while left > 0:
            if stream.out_first >= len(stream.outbox):
                raise AssertionError("a stream's outbox holds less than its out_bytes")
            segment = stream.outbox[stream.out_first]
            PyObject_GetBuffer(segment, &view, PyBUF_SIMPLE)
            try:
                size = view.len
                n = min(size - stream.out_at, left)
                if n < LARGE_PIECE:
                    if n:
                        self.put(<const char*>view.buf + stream.out_at, n)
                else:
                    if self.n:
                        self.segments.append(PyBytes_FromStringAndSize(self.data, self.n))
                        self.n = 0
                    self.segments.append(memoryview(segment)[stream.out_at : stream.out_at + n])
            finally:
                PyBuffer_Release(&view)
            left -= n
            stream.sent(n)
            stream.out_at += n
            if stream.out_at == size:
                stream.next_segment()
        return 0

    cdef list take(self):
        cdef list segments = self.segments
        if self.n:
            segments.append(self.data[: self.n])
            self.n = 0
            if self.room > KEPT_ROOM:
                free(self.data)
                self.data = NULL
                self.room = 0
        self.segments = []
        return segments
