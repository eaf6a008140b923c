# The protobuf wire format: a Cursor reads fields, an Out collects written ones.
#   A Cursor and its Slices borrow the message: whoever made them keeps it alive.
#   Reads are checked against the message's end; reading beyond it raises WireError.
#   An Out is begun with begin_out(), with memory of its owner's stack or none, and ended with end_out(). Whatever writes into
#   it makes room first.
# Functions that run for every field of every message are inline.
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport free
from libc.string cimport memcpy

cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL

cdef int malformed(str why) except -1       # raises WireError

# ---------------------------------------------------------------- reading

cdef struct Cursor:
    const uint8_t* p
    const uint8_t* end

cdef struct Slice:
    const uint8_t* p
    Py_ssize_t n

cdef inline Cursor cursor_of(Slice s) noexcept:
    cdef Cursor c
    c.p = s.p
    c.end = s.p + s.n
    return c

cdef inline int read_bounded_varint(Cursor* c, uint64_t* out, int last_shift) except -1:
    cdef uint64_t value = 0
    cdef int shift = 0
    cdef uint8_t b
    while True:
        if c.p >= c.end or shift > last_shift:
            out[0] = 0
            return malformed("a varint is cut off or too long")
        b = c.p[0]
        c.p += 1
        value |= <uint64_t>(b & 0x7F) << shift
        if b < 0x80:
            out[0] = value
            return 0
        shift += 7

cdef inline int read_varint(Cursor* c, uint64_t* out) except -1:
    return read_bounded_varint(c, out, 63)

# a tag has at most 5 bytes: protobuf refuses more, even if only zeros are at the top
cdef inline int read_tag(Cursor* c, uint64_t* out) except -1:
    read_bounded_varint(c, out, 28)
    if out[0] > 0xFFFFFFFF or out[0] < 8:
        return malformed(f"{out[0]} is no field tag")
    return 0

cdef inline int read_slice(Cursor* c, Slice* out) except -1:
    cdef uint64_t n
    read_varint(c, &n)
    if n > <uint64_t>(c.end - c.p):
        out.p = c.p
        out.n = 0
        return malformed(f"a field announces {n} bytes, {c.end - c.p} are left")
    out.p = c.p
    out.n = <Py_ssize_t>n
    c.p += n
    return 0

cdef inline int expect_bytes(int wire_type) except -1:
    if wire_type != 2:
        return malformed("a length-delimited field has another wire type")
    return 0

cdef inline str text(Slice s):
    try:
        return PyUnicode_DecodeUTF8(<const char*>s.p, s.n, NULL)
    except UnicodeDecodeError:
        pass
    malformed("a string field is not UTF-8")

cdef str name_text(Slice s, str what)   # text() of something that has a name: its length is limited
cdef int skip_field(Cursor* c, int wire_type) except -1

# ---------------------------------------------------------------- writing

cdef struct Out:
    char* data
    Py_ssize_t n
    Py_ssize_t room
    char* lent       # memory that is its owner's; NULL: none

cdef inline void begin_out(Out* o, char* lent, Py_ssize_t room) noexcept nogil:
    """An empty Out, which begins in the `room` bytes at `lent`: most messages are short, and take no memory of their own."""
    o.data = o.lent = lent
    o.n = 0
    o.room = room

cdef inline void end_out(Out* o) noexcept nogil:
    if o.data != o.lent:
        free(o.data)

cdef int grow(Out* o, Py_ssize_t more) except -1

cdef inline int need(Out* o, Py_ssize_t more) except -1:
    if more > o.room - o.n:
        return grow(o, more)
    return 0

cdef inline int varint_size(uint64_t v) noexcept nogil:
    cdef int n = 1
    while v >= 0x80:
        v >>= 7
        n += 1
    return n

cdef inline int put_varint(Out* o, uint64_t v) except -1:
    need(o, 10)
    while v >= 0x80:
        o.data[o.n] = <char>(v | 0x80)
        o.n += 1
        v >>= 7
    o.data[o.n] = <char>v
    o.n += 1
    return 0

cdef inline int put_raw(Out* o, const char* p, Py_ssize_t n) except -1:
    need(o, n)
    memcpy(o.data + o.n, p, n)
    o.n += n
    return 0

cdef inline int put_bytes(Out* o, int field, const char* p, Py_ssize_t n) except -1:
    need(o, n + 20)
    put_varint(o, field << 3 | 2)
    put_varint(o, n)
    return put_raw(o, p, n)

cdef inline int put_text(Out* o, int field, str value) except -1:
    cdef Py_ssize_t n
    cdef const char* p = PyUnicode_AsUTF8AndSize(value, &n)
    return put_bytes(o, field, p, n)
