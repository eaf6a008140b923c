"""Strings of a JSON text: their escapes, and texts made of them.

Rules:
 1. What is given has been accepted by json_reader: escapes are whole, and surrogates come in pairs.
 2. Bytes that are not UTF-8 survive a round trip (surrogateescape).
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint32_t

from neptrio.codec.bounded cimport add_char, add_text
from neptrio.codec.number_text cimport no_room


cdef int hex4(const unsigned char* p) noexcept nogil:
    """The value of four hex digits, -1 when they are none."""
    cdef int value = 0, i
    cdef unsigned char c
    for i in range(4):
        c = p[i]
        if 48 <= c <= 57:
            value = value * 16 + c - 48
        elif 65 <= c <= 70:
            value = value * 16 + c - 55
        elif 97 <= c <= 102:
            value = value * 16 + c - 87
        else:
            return -1
    return value


cdef str decoded(const unsigned char* p, Py_ssize_t n, bint escaped):
    cdef bytes plain
    if not escaped:
        return PyUnicode_DecodeUTF8(<const char*>p, n, b"surrogateescape")
    plain = PyBytes_FromStringAndSize(NULL, n)
    n = unescape(p, n, PyBytes_AS_STRING(plain), PyBytes_AS_STRING(plain) + n)
    return PyUnicode_DecodeUTF8(PyBytes_AS_STRING(plain), n, b"surrogateescape")


cdef Py_ssize_t unescape(const unsigned char* p, Py_ssize_t n, char* out, char* limit) except -1 nogil:
    """Resolves the escapes of a string that skip_string() has accepted; the result is shorter than a text that has any."""
    cdef const unsigned char* end = p + n
    cdef char* start = out
    cdef char[4] utf8
    cdef unsigned char c
    cdef uint32_t code
    while p < end:
        c = p[0]
        if c != b"\\":
            out = add_char(out, limit, <char>c)
            p += 1
            continue
        c = p[1]
        p += 2
        if c == b"u":
            code = <uint32_t>hex4(p)
            p += 4
            if 0xD800 <= code <= 0xDBFF:
                code = 0x10000 + ((code - 0xD800) << 10) + <uint32_t>hex4(p + 2) - 0xDC00
                p += 6
            if code < 0x80:
                out = add_char(out, limit, <char>code)
            elif code < 0x800:
                utf8[0] = <char>(0xC0 | (code >> 6))
                utf8[1] = <char>(0x80 | (code & 0x3F))
                out = add_text(out, limit, utf8, 2)
            elif code < 0x10000:
                utf8[0] = <char>(0xE0 | (code >> 12))
                utf8[1] = <char>(0x80 | ((code >> 6) & 0x3F))
                utf8[2] = <char>(0x80 | (code & 0x3F))
                out = add_text(out, limit, utf8, 3)
            else:
                utf8[0] = <char>(0xF0 | (code >> 18))
                utf8[1] = <char>(0x80 | ((code >> 12) & 0x3F))
                utf8[2] = <char>(0x80 | ((code >> 6) & 0x3F))
                utf8[3] = <char>(0x80 | (code & 0x3F))
                out = add_text(out, limit, utf8, 4)
            continue
        if c == b"b":
            c = 8
        elif c == b"f":
            c = 12
        elif c == b"n":
            c = 10
        elif c == b"r":
            c = 13
        elif c == b"t":
            c = 9
        out = add_char(out, limit, <char>c)
    if out >= limit:
        no_room()
    return out - start
