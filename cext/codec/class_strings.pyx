"""Prints what the classification extension answers: `value:index` or `value:index:label` for each chosen element.

A client may ask for all of a million elements, so they are printed in C and without the GIL.
Source: docs/protocol/features.md A3, docs/protocol/observed.md 4.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport fabs, isfinite, isinf, isnan
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memmove

from neptrio.codec.bounded cimport add_char, add_text
from neptrio.codec.number_text cimport PRINT_ROOM, no_room, put_int, put_uint

cdef enum:
    SPARE = 4 + 20 + 1 + 20 + 1    # an element's length, an integer, the index, and two colons
    FEW_BYTES = 4 << 10            # copied, so that what is left over can be freed
    MOST_REAL = 330                # characters of the longest number with six decimals


cdef struct Label:
    const char* text
    Py_ssize_t n


cdef Py_ssize_t _longest(const double* values, Py_ssize_t n) noexcept nogil:
    """Characters of the longest of the numbers. The longest is the largest one with digits: infinity is short."""
    cdef double top = 0
    cdef char[MOST_REAL] text
    cdef Py_ssize_t i
    for i in range(n):
        if fabs(values[i]) > top and not isinf(values[i]):
            top = fabs(values[i])
    return 1 + max(snprintf(text, MOST_REAL, b"%.6f", top), 3)


cdef char* _real(char* out, char* end, double value) noexcept nogil:
    """Prints a number with six decimals."""
    cdef int n, whole = 0
    if isnan(value):
        return add_text(out, end, b"nan", 3)   # C prints the sign of some
    n = snprintf(out, end - out, b"%.6f", value)
    if n < 0 or n >= end - out:
        return end
    if isfinite(value):    # a model may have set a locale with another point, of several bytes
        while out[whole] == b"-" or 48 <= out[whole] <= 57:
            whole += 1
        memmove(out + whole + 1, out + n - 6, 6)
        out[whole] = b"."
        n = whole + 7
    return out + n


cdef char* _element(char* to, char* end, const void* value, char kind, int64_t index, const Label* labels,
                    Py_ssize_t known) noexcept nogil:
    """Prints one element behind its length; returns where it ends."""
    cdef char* at = add_text(to, end, b"\0\0\0\0", 4)
    cdef uint32_t length
    if kind == b"f":
        at = _real(at, end, (<const double*>value)[0])
    elif kind == b"u":
        at = put_uint(at, end, (<const uint64_t*>value)[0])
    else:
        at = put_int(at, end, (<const int64_t*>value)[0])
    at = put_int(add_char(at, end, b":"), end, index)
    if 0 <= index < known:
        at = add_text(add_char(at, end, b":"), end, labels[index].text, labels[index].n)
    length = <uint32_t>(at - to - 4)
    add_text(to, end, <const char*>&length, 4)
    return at


def class_strings(values, indices, str kind, list labels):
    # type: (Buffer, Buffer, ..., list[bytes]) -> Buffer
    """The elements of a BYTES tensor, each behind its length, as a buffer.

    `values` is a buffer of float64, int64 or uint64 numbers, as `kind` ("f", "i", "u") says, `indices` one of as many int64
    numbers. `labels` are bytes; an index beyond them has none.
    """
    cdef Py_buffer numbers, places
    cdef Py_ssize_t i, n, known = len(labels), room, each = SPARE
    cdef const char* value
    cdef const int64_t* index
    cdef Label* names = NULL
    cdef char* at
    cdef char* end
    cdef char letter = ord(kind)
    cdef bytes label
    cdef bytes text
    cdef Py_ssize_t used
    PyObject_GetBuffer(values, &numbers, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(indices, &places, PyBUF_SIMPLE)
        try:
            n = places.len // 8
            if numbers.len != 8 * n:
                raise ValueError(f"{numbers.len} bytes of values for {n} indices")
            value = <const char*>numbers.buf
            index = <const int64_t*>places.buf
            names = <Label*>malloc(max(known, 1) * sizeof(Label))
            if names == NULL:
                raise MemoryError
            for i in range(known):
                label = labels[i]
                names[i].text = PyBytes_AS_STRING(label)
                names[i].n = PyBytes_GET_SIZE(label)
            with nogil:
                if letter == b"f":
                    each += _longest(<const double*>value, n)
                room = each * n + PRINT_ROOM    # with as much behind the last, numbers are printed fast
                for i in range(n):
                    if 0 <= index[i] < known:
                        room += names[index[i]].n
            text = PyBytes_FromStringAndSize(NULL, room)
            at = PyBytes_AS_STRING(text)
            end = at + room
            with nogil:
                for i in range(n):
                    at = _element(at, end, value + 8 * i, letter, index[i], names, known)
            if at >= end:
                no_room()
            used = at - PyBytes_AS_STRING(text)
            return text[:used] if used < FEW_BYTES else memoryview(text)[:used]
        finally:
            free(names)
            PyBuffer_Release(&places)
    finally:
        PyBuffer_Release(&numbers)
