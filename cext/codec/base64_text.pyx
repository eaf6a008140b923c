"""Decodes base64 without the GIL: the files of a load call are text of many megabytes.

Source: RFC 4648, section 4. The text must be exactly what encoding some bytes gives, so there are no line breaks, no
missing padding and no bits that are left over.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t
from libc.string cimport memset

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL

cdef enum:
    FOREIGN = 255   # no character of the alphabet
    PAD = 61        # "="

cdef uint8_t[256] VALUES
cdef object ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


cdef int fill() except -1:
    cdef int value, character
    memset(VALUES, FOREIGN, sizeof(VALUES))
    for value, character in enumerate(ALPHABET):
        VALUES[character] = value
    return 0


fill()


cdef Py_ssize_t decoded(const uint8_t* text, Py_ssize_t quads, uint8_t* target) noexcept nogil:
    """Decodes whole groups of four characters. Returns how many it decoded: fewer where the next has a foreign one."""
    cdef Py_ssize_t i
    cdef uint32_t a, b, c, d, bits
    for i in range(quads):
        a, b, c, d = VALUES[text[0]], VALUES[text[1]], VALUES[text[2]], VALUES[text[3]]
        if (a | b | c | d) & 0xC0:
            return i
        bits = a << 18 | b << 12 | c << 6 | d
        target[0], target[1], target[2] = bits >> 16, bits >> 8 & 255, bits & 255
        text += 4
        target += 3
    return quads


def decode_base64(str text not None) -> bytes:
    """The bytes that `text` stands for.

    Raises ValueError, which says where the text is wrong, and UnicodeEncodeError (a ValueError) for lone surrogates.
    """
    cdef Py_ssize_t size, quads, done, i, padding = 0
    cdef const uint8_t* given = <const uint8_t*>PyUnicode_AsUTF8AndSize(text, &size)   # owned by `text`
    cdef uint8_t* target
    cdef uint8_t[4] last
    cdef uint8_t[3] rest
    if size % 4:
        raise ValueError(f"{size} characters are no multiple of 4")
    if size and given[size - 1] == PAD:
        padding = 2 if given[size - 2] == PAD else 1
    quads = (size - (4 if padding else 0)) // 4
    made = PyBytes_FromStringAndSize(NULL, quads * 3 + (3 - padding if padding else 0))
    target = <uint8_t*>PyBytes_AS_STRING(made)   # owned by `made`, which nobody else has yet
    with nogil:
        done = decoded(given, quads, target)
    if done == quads and padding:
        for i in range(4):
            last[i] = given[4 * quads + i] if i < 4 - padding else c"A"
        if decoded(last, 1, rest) == 1:
            for i in range(3 - padding):
                target[3 * quads + i] = rest[i]
            for i in range(3 - padding, 3):
                if rest[i]:
                    raise ValueError("the last character has bits that no byte needs")
            return made
    elif done == quads:
        return made
    for i in range(4 * done, size):
        if VALUES[given[i]] == FOREIGN:
            raise ValueError(f"character {i} is not of the alphabet")
    raise AssertionError("unreachable")
