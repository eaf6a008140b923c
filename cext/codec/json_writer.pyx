"""Writes JSON text as a Triton server does: compact, with rapidjson's escapes.

A Writer prints into a bytes object to which nobody else refers yet, which grows as needed and becomes the response
itself, so a large response is not copied at the end.

Rules:
 1. Strings that are not UTF-8 survive a round trip byte for byte (surrogateescape).
 2. NaN, Infinity and -Infinity are numbers.
Source: docs/protocol/observed.md 3.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t
from libc.string cimport memcpy

from neptrio.codec.bounded cimport add_char, add_text
from neptrio.codec.number_text cimport PRINT_ROOM, print_double, print_int

cdef extern from "Python.h":
    int _PyBytes_Resize(PyObject** bytes, Py_ssize_t newsize) except -1
    PyObject* _new_bytes "PyBytes_FromStringAndSize"(const char* v, Py_ssize_t n) except NULL
    void Py_XDECREF(PyObject* o)
    const char* PyUnicode_AsUTF8AndSize(object unicode, Py_ssize_t* size)
    void PyErr_Clear()

cdef const char* HEX = b"0123456789ABCDEF"
cdef char[256] _ESCAPE           # 0: written as it is, 1: as \u00XX, else the letter after the backslash
for _i in range(256):
    _ESCAPE[_i] = 1 if _i < 32 else 0
_ESCAPE[8] = b"b"
_ESCAPE[9] = b"t"
_ESCAPE[10] = b"n"
_ESCAPE[12] = b"f"
_ESCAPE[13] = b"r"
_ESCAPE[34] = b'"'
_ESCAPE[92] = b"\\"


cdef class Writer:
    """See json_writer.pxd."""

    def __cinit__(self, Py_ssize_t room=512):
        self.buffer = _new_bytes(NULL, room)
        self.p = PyBytes_AS_STRING(<object>self.buffer)
        self.room = room

    def __dealloc__(self):
        Py_XDECREF(self.buffer)

    cdef int grow(self, Py_ssize_t n) except -1 nogil:
        with gil:
            self._resize(max(self.used + n + 1, self.room * 2))
        return 0

    cdef int _resize(self, Py_ssize_t room) except -1:
        # resizing may move the object, which is safe because nobody else refers to it
        _PyBytes_Resize(&self.buffer, room)
        self.p = PyBytes_AS_STRING(<object>self.buffer)
        self.room = room
        return 0

    cdef int quoted(self, const char* p, Py_ssize_t n) except -1 nogil:
        cdef char* out = self.need(2 + n * 6)
        cdef char* end = self.end()
        cdef char[6] code
        cdef Py_ssize_t i = 0, plain
        cdef unsigned char c
        cdef char escape
        memcpy(code, b"\\u00", 4)
        out = add_char(out, end, b'"')
        while i < n:
            plain = i
            while i < n and _ESCAPE[<unsigned char>p[i]] == 0:
                i += 1
            out = add_text(out, end, p + plain, i - plain)
            if i == n:
                break
            c = <unsigned char>p[i]
            i += 1
            escape = _ESCAPE[c]
            if escape == 1:
                code[4] = HEX[c >> 4]
                code[5] = HEX[c & 15]
                out = add_text(out, end, code, 6)
            else:
                out = add_char(add_char(out, end, b"\\"), end, escape)
        return self.wrote(add_char(out, end, b'"'))

    cdef int text(self, str s) except -1:
        cdef Py_ssize_t n
        cdef const char* p = PyUnicode_AsUTF8AndSize(s, &n)
        cdef bytes raw
        if p == NULL:
            PyErr_Clear()
            raw = s.encode("utf-8", "surrogateescape")
            return self.quoted(PyBytes_AS_STRING(raw), len(raw))
        return self.quoted(p, n)

    cdef int integer(self, int64_t value) except -1:
        cdef char* start = self.need(PRINT_ROOM)
        return self.wrote(print_int(start, self.end(), value))

    cdef int real(self, double value) except -1:
        cdef char* start = self.need(PRINT_ROOM)
        return self.wrote(print_double(start, self.end(), value))

    cdef int value(self, object value) except -1:
        cdef bint first = True
        if value is None:
            return self.raw(b"null", 4)
        if value is True:
            return self.raw(b"true", 4)
        if value is False:
            return self.raw(b"false", 5)
        if isinstance(value, str):
            return self.text(str(value))
        if isinstance(value, bytes):
            return self.quoted(value, len(value))
        if isinstance(value, int):
            digits = str(int(value)).encode()
            return self.raw(digits, len(digits))
        if isinstance(value, float):
            return self.real(value)
        if isinstance(value, dict):
            self.raw(b"{", 1)
            for key, item in value.items():
                if not first:
                    self.raw(b",", 1)
                first = False
                self.text(str(key))
                self.raw(b":", 1)
                self.value(item)
            return self.raw(b"}", 1)
        if isinstance(value, (list, tuple)):
            self.raw(b"[", 1)
            for item in value:
                if not first:
                    self.raw(b",", 1)
                first = False
                self.value(item)
            return self.raw(b"]", 1)
        raise TypeError(f"{type(value).__name__} has no JSON form")

    cdef bytes take(self):
        cdef bytes whole
        if self.used <= 16384:
            whole = self.p[:self.used]
            return whole
        self._resize(self.used)
        whole = <bytes>self.buffer
        Py_XDECREF(self.buffer)
        self.buffer = NULL
        self.room = self.used = 0
        return whole


def dump(value) -> bytes:
    """Compact JSON of None, bool, int, float, str, bytes (as text), dict, list and tuple."""
    cdef Writer w = Writer()
    w.value(value)
    return w.take()
