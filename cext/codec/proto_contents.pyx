"""Reads tensor data that came in the typed fields of InferTensorContents.

The problem: clients that do not use raw contents send each element as a number or string of its own, a million of
them in one message. As Python objects they would cost a hundred times as much as their bytes. The choice: two walks
over the bytes in C. The first finds out how many bytes the elements take, the second writes them.

Rules:
 1. Large contents are walked without the GIL, and the walk looks every STRETCH elements whether it should stop.
 2. Nothing is allocated for more than the contents hold.
 3. A walk that finds something wrong leaves the cursor before it; it is then read once more with the GIL, by
    functions that say what is wrong.
Source: proto/grpc_service.proto; protobuf.dev, "Encoding".
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy

from neptrio.request.sched cimport sched_yield
from neptrio.codec.protobuf cimport (
    Cursor,
    Slice,
    cursor_of,
    expect_bytes,
    malformed,
    read_slice,
    read_tag,
    read_varint,
    skip_field,
)
from neptrio.request.infer_request cimport (
    DT_BOOL,
    DT_BYTES,
    DT_FP32,
    DT_FP64,
    DT_INT8,
    DT_INT16,
    DT_INT32,
    DT_INT64,
    DT_UINT8,
    DT_UINT32,
    DT_UINT64,
    element_size,
)

from neptrio.datatypes import NAME
from neptrio.errors import Cancelled, InvalidArgument

cdef dict _NAME = NAME

cdef enum:
    STRETCH = 8 << 10       # elements between two looks whether to stop
    LONG_BYTES = 64 << 10   # of contents; walking over less takes no longer than waiting for the GIL

cdef enum Outcome:
    DONE
    STOPPED
    BAD_FIELD               # the cursor is before the field
    BAD_VALUE               # the cursor is before the value, and ends with the packed field that it is in

cdef dict _CONTENTS_NAME = {1: "BOOL", 2: "INT32", 3: "INT64", 4: "UINT32", 5: "UINT64", 6: "FP32",
                            7: "FP64", 8: "BYTES"}


cdef inline int field_of(int dtype) noexcept nogil:
    """The field of InferTensorContents that carries a datatype; 0 where there is none."""
    if dtype == DT_BOOL:
        return 1
    if DT_INT8 <= dtype <= DT_INT32:
        return 2
    if dtype == DT_INT64:
        return 3
    if DT_UINT8 <= dtype <= DT_UINT32:
        return 4
    if dtype == DT_UINT64:
        return 5
    if dtype == DT_FP32:
        return 6
    if dtype == DT_FP64:
        return 7
    return 8 if dtype == DT_BYTES else 0


cdef inline bint varint(Cursor* c, uint64_t* out) noexcept nogil:
    """Reads a varint; False where there is none."""
    cdef uint64_t value
    cdef int shift = 7
    cdef uint8_t b
    if c.p >= c.end:
        return False
    b = c.p[0]
    c.p += 1
    value = b & 0x7F
    while b >= 0x80:
        if c.p >= c.end or shift > 63:
            return False
        b = c.p[0]
        c.p += 1
        value |= <uint64_t>(b & 0x7F) << shift
        shift += 7
    out[0] = value
    return True


cdef inline bint tag_of(Cursor* c, uint64_t* out) noexcept nogil:
    """Reads a field's tag, which has at most 5 bytes as for `read_tag`; False where there is none."""
    cdef const uint8_t* begin = c.p
    return varint(c, out) and c.p - begin <= 5 and 8 <= out[0] <= <uint64_t>0xFFFFFFFF


cdef inline bint slice_of(Cursor* c, Slice* out) noexcept nogil:
    """Reads a length and as many bytes; False where there are fewer."""
    cdef uint64_t n
    if not varint(c, &n) or n > <uint64_t>(c.end - c.p):
        return False
    out.p = c.p
    out.n = <Py_ssize_t>n
    c.p += n
    return True


cdef inline bint skip(Cursor* c, int wire_type) noexcept nogil:
    """Moves past a field's value; False where it is cut off or has an unknown type."""
    cdef uint64_t n
    cdef Slice s
    if wire_type == 0:
        return varint(c, &n)
    if wire_type == 2:
        return slice_of(c, &s)
    n = 8 if wire_type == 1 else 4
    if (wire_type != 1 and wire_type != 5) or <uint64_t>(c.end - c.p) < n:
        return False
    c.p += n
    return True


cdef inline bint put_integer(char* out, char* end, uint64_t v, int dtype, int width) noexcept nogil:
    """Stores one integer as an element; False where it is out of its range, or there is no room for it. Types of 8 and 16
    bits come as int32 or uint32."""
    cdef int64_t signed = <int64_t>v
    cdef int64_t top
    if width > end - out:
        return False
    if dtype == DT_BOOL:
        out[0] = v != 0
        return True
    if width < 4:
        if dtype == DT_INT8 or dtype == DT_INT16:
            top = <int64_t>1 << (8 * width - 1)
            if signed < -top or signed >= top:
                return False
        elif v >= <uint64_t>1 << (8 * width):
            return False
    memcpy(out, &v, width)  # little-endian: the low bytes come first; of 32-bit types protobuf keeps only these
    return True


cdef Outcome integers(Cursor* where, Slice s, int dtype, int width, char* out, char* end, Py_ssize_t* at,
                      const int* stop) noexcept nogil:
    """Writes the packed integers of `s` from `out + at` on and moves `at` behind them."""
    cdef Cursor c, before
    cdef uint64_t v
    cdef Py_ssize_t steps = 0
    c.p = s.p
    c.end = s.p + s.n
    while c.p < c.end:
        before = c
        if not varint(&c, &v) or not put_integer(out + at[0], end, v, dtype, width):
            where[0] = before
            return BAD_VALUE
        at[0] += width
        steps += 1
        if steps == STRETCH:
            steps = 0
            if stop != NULL:
                if stop[0]:
                    return STOPPED
                sched_yield()
    return DONE


cdef Outcome walk(Cursor* c, int dtype, int width, char* out, char* end, Py_ssize_t* nbytes,
                  const int* stop) noexcept nogil:
    """Walks over the contents. With `out` NULL it counts the bytes that the elements take, else it writes them up to `end`."""
    cdef int wanted = field_of(dtype)
    cdef Cursor before, value
    cdef uint64_t tag, v
    cdef int field, wire_type
    cdef Slice s
    cdef uint32_t length
    cdef Py_ssize_t i, n = 0, count, steps = 0
    cdef Outcome outcome
    while c.p < c.end:
        steps += 1
        if steps == STRETCH:
            steps = 0
            if stop != NULL:
                if stop[0]:
                    return STOPPED
                sched_yield()
        before = c[0]
        if not tag_of(c, &tag):
            c[0] = before
            return BAD_FIELD
        field = <int>(tag >> 3)
        wire_type = tag & 7
        if field < 1 or field > 8:
            if not skip(c, wire_type):
                c[0] = before
                return BAD_FIELD
            continue
        value = c[0]
        if field != wanted:
            c[0] = before
            return BAD_FIELD
        if wire_type == 2:
            if not slice_of(c, &s):
                c[0] = before
                return BAD_FIELD
            if field == 8:
                if out != NULL:
                    if s.n > end - out - n - 4:
                        return BAD_FIELD
                    length = <uint32_t>s.n
                    memcpy(out + n, &length, 4)
                    memcpy(out + n + 4, s.p, s.n)
                n += 4 + s.n
            elif field >= 6:
                if s.n % width:
                    c[0] = before
                    return BAD_FIELD
                if out != NULL:
                    if s.n > end - out - n:
                        return BAD_FIELD
                    memcpy(out + n, s.p, s.n)
                n += s.n
            else:
                if s.n and s.p[s.n - 1] >= 0x80:    # the last one has no end
                    c[0] = before
                    return BAD_FIELD
                if out == NULL:
                    count = 0
                    for i in range(s.n):
                        count += s.p[i] < 0x80
                    n += count * width
                else:
                    outcome = integers(c, s, dtype, width, out, end, &n, stop)
                    if outcome != DONE:
                        return outcome
        elif field == 6 or field == 7:
            if c.end - c.p < width or wire_type != (5 if width == 4 else 1):
                c[0] = before
                return BAD_FIELD
            if out != NULL:
                if width > end - out - n:
                    return BAD_FIELD
                memcpy(out + n, c.p, width)
            c.p += width
            n += width
        elif field != 8 and wire_type == 0:
            if not varint(c, &v):
                c[0] = before
                return BAD_FIELD
            if out != NULL and not put_integer(out + n, end, v, dtype, width):
                c[0] = value
                return BAD_VALUE
            n += width
        else:
            c[0] = before
            return BAD_FIELD
    nbytes[0] = n
    return DONE


cdef int refuse(Cursor* c, Outcome outcome, int dtype, str name, str model) except -1:
    """Raises the error for what stands at the cursor."""
    cdef uint64_t tag, v
    cdef int field, wire_type, width = element_size(dtype)
    cdef Slice s
    cdef Cursor part
    cdef object shown
    if outcome == STOPPED:
        raise Cancelled()
    if outcome == BAD_VALUE:
        read_varint(c, &v)
        shown = v
        if DT_INT8 <= dtype <= DT_INT32:
            shown = <int64_t>v
        raise InvalidArgument(f"value {shown} of input tensor '{name}' is out of range for '{_NAME[dtype]}'")
    read_tag(c, &tag)
    field = <int>(tag >> 3)
    wire_type = tag & 7
    if field < 1 or field > 8:
        skip_field(c, wire_type)
    elif field != field_of(dtype):
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
            f"'{_CONTENTS_NAME[field]}', expected datatype '{_NAME.get(dtype, '<invalid>')}'")
    elif wire_type == 2:
        read_slice(c, &s)
        if field >= 6:
            malformed("packed floats are cut off")
        part = cursor_of(s)
        part.p = part.end
        while part.p > s.p and (part.p - 1)[0] >= 0x80:
            part.p -= 1
        read_varint(&part, &v)
    elif field == 8:
        expect_bytes(wire_type)
    elif field >= 6:
        malformed("a float is cut off")
    elif wire_type == 0:
        read_varint(c, &v)
    malformed("tensor contents have an unknown wire type")


cdef bytes read_contents(Slice contents, int dtype, str name, str model, const int* stop, object reserve):
    cdef Cursor c = cursor_of(contents)
    cdef int width = element_size(dtype)
    cdef Py_ssize_t nbytes = 0
    cdef bint far = contents.n > LONG_BYTES
    cdef Outcome outcome
    cdef bytes made
    cdef char* out
    cdef char* end
    if far:
        with nogil:
            outcome = walk(&c, dtype, width, NULL, NULL, &nbytes, stop)
    else:
        outcome = walk(&c, dtype, width, NULL, NULL, &nbytes, NULL)
    if outcome != DONE:
        refuse(&c, outcome, dtype, name, model)
    if reserve is not None and nbytes > LONG_BYTES:
        reserve(nbytes)
    made = PyBytes_FromStringAndSize(NULL, nbytes)
    out = PyBytes_AS_STRING(made)
    end = out + nbytes
    c = cursor_of(contents)
    if far:
        with nogil:
            outcome = walk(&c, dtype, width, out, end, &nbytes, stop)
    else:
        outcome = walk(&c, dtype, width, out, end, &nbytes, NULL)
    if outcome != DONE:
        refuse(&c, outcome, dtype, name, model)
    return made
