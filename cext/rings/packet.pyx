"""Messages as bytes: numbers as they are in memory, texts behind their length, tensors by reference.

Both processes run on one machine, so numbers need no byte order; they are not aligned either, so
they are copied. Nothing is read before it was compared with the end.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from neptrio.request.sched cimport sched_yield


cdef extern from "Python.h":
    bint is_ascii "PyUnicode_IS_COMPACT_ASCII"(object)
    void* ascii_data "PyUnicode_DATA"(object)
    Py_ssize_t ascii_length "PyUnicode_GET_LENGTH"(object)


cdef class MessageWriter:
    """Collects one message after the other."""

    def __cinit__(self):
        self.room = 4096
        self.pieces_room = 64
        self.buffer = <char*>malloc(self.room)
        self.pieces = <Piece*>malloc(self.pieces_room * sizeof(Piece))
        if self.buffer == NULL or self.pieces == NULL:
            raise MemoryError
        self.held = []

    def __dealloc__(self):
        free(self.buffer)
        free(self.pieces)

    cdef int reset(self) except -1:
        self.used = 0
        self.count = 0
        self.data = 0
        if self.held:
            self.held = []
        return 0

    cdef int grow(self, size_t more) except -1:
        cdef size_t room = self.room
        cdef char* grown
        while room < self.used + more:
            room *= 2
        grown = <char*>realloc(self.buffer, room)
        if grown == NULL:
            raise MemoryError
        self.buffer = grown
        self.room = room
        return 0

    cdef int raw(self, const char* data, size_t size) except -1:
        if self.room - self.used < size:
            self.grow(size)
        memcpy(self.buffer + self.used, data, size)
        self.used += size
        return 0

    cdef int text(self, str value) except -1:
        if value is not None and is_ascii(value):  # most are, and a `try` costs more than all the rest
            return self.counted(<const char*>ascii_data(value), ascii_length(value))
        return self.any_text(value)

    cdef int any_text(self, str value) except -1:
        cdef Py_ssize_t size
        cdef const char* data
        cdef bytes lone
        try:
            data = PyUnicode_AsUTF8AndSize(value, &size)
        except UnicodeEncodeError:  # half of a surrogate pair: who sends it on says what is wrong with it
            lone = value.encode("utf-8", "surrogatepass")
            data, size = PyBytes_AS_STRING(lone), PyBytes_GET_SIZE(lone)
        return self.counted(data, size)

    cdef int counted(self, const char* data, Py_ssize_t size) except -1:
        """Writes how many bytes there are, and these."""
        cdef uint32_t n = <uint32_t>size
        if self.room - self.used < <size_t>size + 4:
            self.grow(<size_t>size + 4)
        memcpy(self.buffer + self.used, &n, 4)
        memcpy(self.buffer + self.used + 4, data, size)
        self.used += 4 + <size_t>size
        return 0

    cdef int patch_u32(self, size_t at, uint32_t value) except -1:
        memcpy(self.buffer + at, &value, 4)
        return 0

    cdef uint64_t piece(self, const char* data, uint64_t size) except? 0xFFFFFFFFFFFFFFFF:
        """Bytes to be copied behind the message; returns where, counted from data_at()."""
        cdef uint64_t at = self.data
        cdef Piece* grown
        if self.count == self.pieces_room:
            grown = <Piece*>realloc(self.pieces, 2 * self.pieces_room * sizeof(Piece))
            if grown == NULL:
                raise MemoryError
            self.pieces = grown
            self.pieces_room *= 2
        self.pieces[self.count].data = data
        self.pieces[self.count].size = size
        self.count += 1
        self.data += (size + ALIGN - 1) // ALIGN * ALIGN
        return at

    cdef void truncate(self, size_t used, Py_ssize_t count, uint64_t data):
        """Back to an earlier state: what came since is not sent."""
        self.used = used
        self.count = count
        self.data = data

    cdef uint64_t data_at(self) noexcept nogil:
        return (self.used + ALIGN - 1) // ALIGN * ALIGN

    cdef uint64_t total(self) noexcept nogil:
        return self.data_at() + self.data

    cdef void copy_offering(self, char* target) noexcept nogil:
        """copy() of much, on a thread that has no hurry: the core is offered to others behind each PART."""
        cdef Py_ssize_t i
        cdef uint64_t done, n
        memcpy(target, self.buffer, self.used)
        target += self.data_at()
        for i in range(self.count):
            done = 0
            while done < self.pieces[i].size:
                n = min(<uint64_t>PART, self.pieces[i].size - done)
                memcpy(target + done, self.pieces[i].data + done, n)
                done += n
                sched_yield()
            target += (self.pieces[i].size + ALIGN - 1) // ALIGN * ALIGN

    cdef void copy(self, char* target) noexcept nogil:
        cdef Py_ssize_t i
        memcpy(target, self.buffer, self.used)
        target += self.data_at()
        for i in range(self.count):
            memcpy(target, self.pieces[i].data, self.pieces[i].size)
            target += (self.pieces[i].size + ALIGN - 1) // ALIGN * ALIGN


cdef str read_text(Reader* reader):
    cdef uint32_t size = read_u32(reader)
    cdef const char* data = read_raw(reader, size)
    if data == NULL:
        return ""
    return PyUnicode_DecodeUTF8(data, size, b"surrogatepass")
