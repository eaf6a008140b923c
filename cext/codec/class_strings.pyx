"""Prints what the classification extension answers: `value:index` or `value:index:label` for each chosen element.

A client may ask for all of a million elements, so they are printed in C and without the GIL.
Source: docs/protocol/features.md A3, docs/protocol/observed.md 4.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.math cimport fabs, isinf, isnan
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from neptrio.codec.number_text cimport print_int, put_uint

cdef enum:
    SPARE = 4 + 20 + 1 + 20 + 1    # an element's length, an integer, the index, and two colons
    BEHIND = 48                    # bytes that printing an integer may overwrite
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


cdef char* _element(char* to, const void* value, char kind, int64_t index, const Label* labels,
                    Py_ssize_t known) noexcept nogil:
    """Prints one element behind its length; returns where it ends."""
    cdef char* at = to + 4
    cdef double real
    cdef uint32_t length
    if kind == b"f":
        real = (<const double*>value)[0]
        if isnan(real):
            memcpy(at, b"nan", 3)   # C prints the sign of some
            at += 3
        else:
            at += snprintf(at, MOST_REAL, b"%.6f", real)
            if not isinf(real):
                (at - 7)[0] = b"."    # a model may have set a locale with another one
    elif kind == b"u":
        at = put_uint(at, (<const uint64_t*>value)[0])
    else:
        at = print_int(at, (<const int64_t*>value)[0])
    at[0] = b":"
    at = print_int(at + 1, index)
    if index < known:
        at[0] = b":"
        memcpy(at + 1, labels[index].text, labels[index].n)
        at += 1 + labels[index].n
    length = <uint32_t>(at - to - 4)
    memcpy(to, &length, 4)
    return at


def class_strings(values, indices, str kind, list labels):
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
                room = each * n + BEHIND
                for i in range(n):
                    if index[i] < known:
                        room += names[index[i]].n
            text = PyBytes_FromStringAndSize(NULL, room)
            at = PyBytes_AS_STRING(text)
            with nogil:
                for i in range(n):
                    at = _element(at, value + 8 * i, letter, index[i], names, known)
            used = at - PyBytes_AS_STRING(text)
            return text[:used] if used < FEW_BYTES else memoryview(text)[:used]
        finally:
            free(names)
            PyBuffer_Release(&places)
    finally:
        PyBuffer_Release(&numbers)
