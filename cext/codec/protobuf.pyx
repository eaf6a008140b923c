"""The protobuf wire format, without messages: fields are read where they lie and written one by one.

A message class per request costs more than all the rest of the server; what reads and writes the two
messages of the hot path (cext/codec/proto_request, cext/codec/proto_response) stands on these functions instead.
The ones that run per field are inline, in protobuf.pxd; here is what is seldom or large.
Source: protobuf.dev, "Encoding".
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport realloc

from neptrio.errors import InvalidArgument


class WireError(InvalidArgument):
    """The bytes are not the message they should be."""


cdef int malformed(str why) except -1:
    raise WireError(f"malformed message: {why}")


cdef int skip_field(Cursor* c, int wire_type) except -1:
    cdef uint64_t n
    cdef Slice s
    if wire_type == 0:
        read_varint(c, &n)
    elif wire_type == 1:
        if c.end - c.p < 8:
            return malformed("a fixed64 field is cut off")
        c.p += 8
    elif wire_type == 2:
        read_slice(c, &s)
    elif wire_type == 5:
        if c.end - c.p < 4:
            return malformed("a fixed32 field is cut off")
        c.p += 4
    else:
        return malformed(f"wire type {wire_type} is not known")
    return 0


cdef int grow(Out* o, Py_ssize_t more) except -1:
    """Makes room for `more` bytes, and as many again."""
    cdef Py_ssize_t room = (o.n + more) * 2
    cdef char* grown = <char*>realloc(o.data, room)
    if grown == NULL:
        raise MemoryError
    o.data = grown
    o.room = room
    return 0


def well_formed(message):
    """Raises WireError unless `message` is a sequence of whole protobuf fields.

    For the control RPCs, whose parser takes a field that is cut off for a shorter one. Nested
    messages are not looked into.
    """
    cdef Py_buffer view
    cdef Cursor c
    cdef uint64_t tag
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        c.p = <const uint8_t*>view.buf
        c.end = c.p + view.len
        while c.p < c.end:
            read_tag(&c, &tag)
            skip_field(&c, tag & 7)
    finally:
        PyBuffer_Release(&view)
