"""Decodes the bytes of a ModelInferRequest into an InferRequest.

No protobuf message object is made. Input tensors are views into the message's bytes, which they keep alive.

Decoding takes two passes. The first walks over the top-level fields and notes where inputs, outputs, parameters and raw
contents are, the second reads them. So the id and the model's name are known in whatever order the fields come, and
every error can contain them.
Source: proto/grpc_service.proto; docs/protocol/observed.md.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

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
    text,
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
    DT_UINT16,
    DT_UINT32,
    DT_UINT64,
    InferRequest,
    RequestedOutput,
    Tensor,
    element_size,
)
from neptrio.codec.proto_parameter cimport Region, apply_request_parameter, read_region

from neptrio.datatypes import NAME, NUMBER
from neptrio.errors import InvalidArgument

cdef dict _NUMBER = NUMBER
cdef dict _NAME = NAME


cdef tuple read_shape(list dims, Slice s):
    cdef Cursor c = cursor_of(s)
    cdef uint64_t v
    while c.p < c.end:
        read_varint(&c, &v)
        dims.append(<int64_t>v)


cdef int put_integer(char* out, uint64_t v, int dtype, int width, str name) except -1:
    """Stores one integer of InferTensorContents as an element; narrower types come as int32 and uint32 too."""
    cdef int64_t signed = <int64_t>v
    cdef int64_t top
    if dtype == DT_BOOL:
        out[0] = v != 0
        return 0
    if width < 8:
        if dtype == DT_INT8 or dtype == DT_INT16 or dtype == DT_INT32:
            top = <int64_t>1 << (8 * width - 1)
            if width == 4:
                signed = <int32_t>v  # int32 on the wire: protobuf keeps the low 32 bits
            elif signed < -top or signed >= top:
                raise InvalidArgument(f"value {signed} of input tensor '{name}' is out of range for "
                                      f"'{_NAME[dtype]}'")
        elif width < 4 and v >= <uint64_t>1 << (8 * width):
            raise InvalidArgument(f"value {v} of input tensor '{name}' is out of range for '{_NAME[dtype]}'")
    memcpy(out, &v, width)  # little-endian: the low bytes come first
    return 0


cdef inline bytes varints_to(Slice s, int dtype, int width, str name):
    """Converts packed varints into little-endian elements of `width` bytes."""
    cdef Cursor c = cursor_of(s)
    cdef Py_ssize_t n = 0
    cdef const uint8_t* p = c.p
    cdef uint64_t v
    cdef char* out
    while p < c.end:
        if p[0] < 0x80:
            n += 1
        p += 1
    cdef bytes made = PyBytes_FromStringAndSize(NULL, n * width)
    out = PyBytes_AS_STRING(made)
    cdef char* limit = out + n * width
    while c.p < c.end:
        read_varint(&c, &v)
        if out >= limit:
            break
        put_integer(out, v, dtype, width, name)
        out += width
    return made


# field of InferTensorContents -> the datatypes that it can carry
cdef dict _CONTENTS = {
    1: (<int>DT_BOOL,),
    2: (<int>DT_INT8, <int>DT_INT16, <int>DT_INT32),
    3: (<int>DT_INT64,),
    4: (<int>DT_UINT8, <int>DT_UINT16, <int>DT_UINT32),
    5: (<int>DT_UINT64,),
    6: (<int>DT_FP32,),
    7: (<int>DT_FP64,),
    8: (<int>DT_BYTES,),
}
cdef dict _CONTENTS_NAME = {1: "BOOL", 2: "INT32", 3: "INT64", 4: "UINT32", 5: "UINT64", 6: "FP32",
                            7: "FP64", 8: "BYTES"}


cdef bytes read_contents(Slice contents, int dtype, str name, str model):
    """InferTensorContents as a tensor's raw bytes, or None when it is empty."""
    cdef Cursor c = cursor_of(contents)
    cdef uint64_t tag, v
    cdef int field, wire_type, width
    cdef Slice s
    cdef list parts = []
    cdef bint any_data = False
    cdef uint32_t n32
    cdef char[8] small
    while c.p < c.end:
        read_tag(&c, &tag)
        field = <int>(tag >> 3)
        wire_type = tag & 7
        if field < 1 or field > 8:
            skip_field(&c, wire_type)
            continue
        if dtype not in _CONTENTS[field]:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{name}' for model '{model}' of type "
                f"'{_CONTENTS_NAME[field]}', expected datatype '{_NAME.get(dtype, '<invalid>')}'")
        any_data = True
        width = element_size(dtype)
        if field == 8:
            expect_bytes(wire_type)
            read_slice(&c, &s)
            n32 = <uint32_t>s.n
            parts.append((<char*>&n32)[:4])
            parts.append((<const char*>s.p)[: s.n])
        elif field == 6 or field == 7:
            if wire_type == 2:
                read_slice(&c, &s)
                if s.n % width:
                    malformed("packed floats are cut off")
                parts.append((<const char*>s.p)[: s.n])
            else:
                if c.end - c.p < width or wire_type != (5 if width == 4 else 1):
                    malformed("a float is cut off")
                parts.append((<const char*>c.p)[:width])
                c.p += width
        elif wire_type == 2:
            read_slice(&c, &s)
            parts.append(varints_to(s, dtype, width, name))
        elif wire_type == 0:
            read_varint(&c, &v)
            put_integer(small, v, dtype, width, name)
            parts.append(small[:width])
        else:
            malformed("tensor contents have an unknown wire type")
    if not any_data:
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


cdef bytes joined_contents(list before, bytes last, int dtype, str name, str model):
    """The elements of several InferTensorContents of one input, in order; `last` are those of the last one."""
    cdef list parts = []
    cdef bytes one
    cdef Slice s
    for one in before:
        s.p = <const uint8_t*>PyBytes_AS_STRING(one)
        s.n = len(one)
        parts.append(read_contents(s, dtype, name, model) or b"")
    parts.append(last or b"")
    return b"".join(parts)


cdef Tensor read_input(InferRequest r, Slice s, object owner, Slice* raw, Py_ssize_t raw_count,
                       Py_ssize_t* raw_at, object shared_memory):
    cdef Cursor c = cursor_of(s)
    cdef uint64_t tag, v
    cdef int field, wire_type
    cdef Slice part, contents
    cdef bint has_contents = False
    cdef str name = ""
    cdef str datatype = ""
    cdef list dims = []
    cdef Region region
    cdef Tensor t
    cdef bytes data
    cdef list parameters = None
    cdef list before = None  # contents of which more came: protobuf puts their elements together
    region.name.n = 0
    region.offset = region.byte_size = 0
    contents.n = 0
    while c.p < c.end:
        read_tag(&c, &tag)
        field = <int>(tag >> 3)
        wire_type = tag & 7
        if field == 3:
            if wire_type == 2:
                read_slice(&c, &part)
                read_shape(dims, part)
            elif wire_type == 0:
                read_varint(&c, &v)
                dims.append(<int64_t>v)
            else:
                skip_field(&c, wire_type)    # as protobuf does with a field of another type
        elif 1 <= field <= 5:
            expect_bytes(wire_type)
            read_slice(&c, &part)
            if field == 1:
                name = text(part)
            elif field == 2:
                datatype = text(part)
            elif field == 4:
                read_region(part, &region, NULL, f"input '{name}'")
            else:
                if has_contents:
                    if before is None:
                        before = []
                    before.append((<const char*>contents.p)[: contents.n])
                contents = part
                has_contents = True
        else:
            skip_field(&c, wire_type)
    t = Tensor.__new__(Tensor)
    t.name = name
    t.dtype = _NUMBER.get(datatype, 0)
    t.shape = tuple(dims)
    if region.name.n:
        return shared_memory.input_tensor(name, t.dtype, t.shape, text(region.name), region.offset,
                                          region.byte_size)
    if raw_count:
        if has_contents:
            raise InvalidArgument(f"contents field must not be specified when using raw_input_contents for "
                                  f"'{name}' for model '{r.model_name}'")
        if raw_at[0] >= raw_count:
            raise InvalidArgument(
                f"unable to find data for input tensor '{name}' for model '{r.model_name}' in request.")
        t.owner = owner
        t.ptr = <const char*>raw[raw_at[0]].p
        t.nbytes = raw[raw_at[0]].n
        raw_at[0] += 1
        return t
    if not has_contents:
        raise InvalidArgument(
            f"unable to find data for input tensor '{name}' for model '{r.model_name}' in request.")
    data = read_contents(contents, t.dtype, name, r.model_name)
    if before is not None:
        data = joined_contents(before, data, t.dtype, name, r.model_name)
    t.hold(data if data is not None else b"", False)
    return t


cdef RequestedOutput read_output(Slice s):
    cdef Cursor c = cursor_of(s)
    cdef uint64_t tag
    cdef Slice part
    cdef RequestedOutput out = RequestedOutput.__new__(RequestedOutput)
    cdef Region region
    cdef int64_t class_count = 0
    region.name.n = 0
    region.offset = region.byte_size = 0
    out.name = ""
    while c.p < c.end:
        read_tag(&c, &tag)
        if (tag >> 3) == 1 and (tag & 7) == 2:
            read_slice(&c, &part)
            out.name = text(part)
        elif (tag >> 3) == 2 and (tag & 7) == 2:
            read_slice(&c, &part)
            read_region(part, &region, &class_count, f"output '{out.name}'")
        else:
            skip_field(&c, tag & 7)
    out.class_count = class_count
    if region.name.n:
        out.shm_region = text(region.name)
        out.shm_offset = <int64_t>region.offset
        out.shm_byte_size = <int64_t>region.byte_size
    return out


cdef struct Slices:
    Slice* items
    Py_ssize_t n
    Py_ssize_t room
    Slice[8] few     # enough for nearly every request, so that nothing must be allocated


cdef inline void slices_init(Slices* s) noexcept:
    s.items = s.few
    s.n = 0
    s.room = 8


cdef inline void slices_free(Slices* s) noexcept:
    if s.items != s.few:
        free(s.items)


cdef int slices_add(Slices* s, Slice item) except -1:
    cdef Slice* grown
    if s.n == s.room:
        grown = <Slice*>malloc(2 * s.room * sizeof(Slice))
        if grown == NULL:
            raise MemoryError
        memcpy(grown, s.items, s.n * sizeof(Slice))
        slices_free(s)
        s.items = grown
        s.room *= 2
    s.items[s.n] = item
    s.n += 1
    return 0


def decode_request(InferRequest r not None, message, shared_memory=None):
    """Fills `r` from the bytes of a ModelInferRequest.

    `message` is any buffer; input tensors are views of it and keep it alive. `shared_memory` (service.shared_memory)
    gives inputs that are in a registered region. Raises WireError for bytes that are no such message, and
    TritonError for a message with invalid parameters or tensors; in that case `r.id` and `r.model_name` are set.
    """
    cdef Py_buffer view
    cdef Cursor c
    cdef uint64_t tag
    cdef int field
    cdef Slice s
    cdef Slices inputs, outputs, parameters, raw
    cdef Py_ssize_t i, raw_at = 0
    cdef list made
    r.inputs = made = []
    r.model_name = ""
    slices_init(&inputs)
    slices_init(&outputs)
    slices_init(&parameters)
    slices_init(&raw)
    PyObject_GetBuffer(message, &view, PyBUF_SIMPLE)
    try:
        c.p = <const uint8_t*>view.buf
        c.end = c.p + view.len
        while c.p < c.end:
            read_tag(&c, &tag)
            field = <int>(tag >> 3)
            if field < 1 or field > 7 or (tag & 7) != 2:
                if 1 <= field <= 7:
                    expect_bytes(tag & 7)
                skip_field(&c, tag & 7)
                continue
            read_slice(&c, &s)
            if field == 7:
                slices_add(&raw, s)
            elif field == 5:
                slices_add(&inputs, s)
            elif field == 6:
                slices_add(&outputs, s)
            elif field == 4:
                slices_add(&parameters, s)
            elif field == 1:
                r.model_name = text(s)
            elif field == 2:
                r.model_version = text(s)
            else:
                r.id = text(s)
        for i in range(parameters.n):
            apply_request_parameter(r, parameters.items[i])
        for i in range(inputs.n):
            made.append(read_input(r, inputs.items[i], message, raw.items, raw.n, &raw_at, shared_memory))
        if outputs.n:
            r.outputs = [read_output(outputs.items[i]) for i in range(outputs.n)]
    finally:
        slices_free(&inputs)
        slices_free(&outputs)
        slices_free(&parameters)
        slices_free(&raw)
        PyBuffer_Release(&view)
    return r
