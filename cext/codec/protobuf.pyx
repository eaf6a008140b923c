"""The protobuf wire format without message objects: fields are read where they are, and written one by one.

A message object for every request would cost more than all the rest of the server. So the code for the two messages of
inference (cext/codec/proto_request, cext/codec/proto_response) is built on these functions instead. Functions that run
for every field are inline, in protobuf.pxd; here are those that are called seldom or on large data.
Source: protobuf.dev, "Encoding".
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcpy

from neptrio import limits
from neptrio.errors import InvalidArgument
from neptrio.limits import shown

cdef Py_ssize_t LONGEST_NAME = limits.LONGEST_NAME


class WireError(InvalidArgument):
    """The bytes are not a valid message."""


cdef int malformed(str why) except -1:
    raise WireError(f"malformed message: {why}")


cdef str name_text(Slice s, str what):
    if s.n > LONGEST_NAME:
        s.n, n = LONGEST_NAME, s.n
        begin = shown((<const char*>s.p)[: s.n].decode("utf-8", "replace"))
        raise InvalidArgument(f"{what} has {n} bytes, the most is {LONGEST_NAME}: '{begin}'")
    return text(s)


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
    """Makes room for at least `more` bytes; doubles the memory."""
    cdef Py_ssize_t room = (o.n + more) * 2
    cdef char* grown = <char*>realloc(NULL if o.data == o.lent else o.data, room)
    if grown == NULL:
        raise MemoryError
    if o.data == o.lent and o.n:
        memcpy(grown, o.data, o.n)
    o.data = grown
    o.room = room
    return 0


def well_formed(message, Py_ssize_t most=0):
    # type: (Buffer, ...) -> None
    """Raises WireError unless `message` is a sequence of whole protobuf fields.

    For calls other than inference: protobuf's parser would accept a field that is cut off as a shorter one. Nested
    messages are not checked. Raises InvalidArgument where there are more than `most` fields; 0: any number.
    """
    cdef Py_buffer view
    cdef Cursor c
    cdef uint64_t tag
    cdef Py_ssize_t count = 0
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        c.p = <const uint8_t*>view.buf
        c.end = c.p + view.len
        while c.p < c.end:
            read_tag(&c, &tag)
            skip_field(&c, tag & 7)
            count += 1
            if most and count > most:
                raise InvalidArgument(f"the message has more than {most} fields, which is the most that are allowed")
    finally:
        PyBuffer_Release(&view)
