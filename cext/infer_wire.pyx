"""ModelInferRequest bytes -> InferRequest, InferResponse -> ModelInferResponse bytes.

No message object stands in between. Input tensors are views into the message, which they keep
alive; large output tensors leave as separate segments, never copied into the message.

Parsing runs in two passes: the first walks the top-level fields and notes where inputs,
outputs, parameters and raw contents lie, the second interprets them. So the id and the model
name are known whatever order the fields came in, and every error can carry them.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from neptrio._cext.request cimport (
    DT_BF16,
    DT_BOOL,
    DT_BYTES,
    DT_FP16,
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
    InferResponse,
    RequestedOutput,
    Tensor,
    element_size,
)

from neptrio.datatypes import NAME, NUMBER
from neptrio.errors import InvalidArgument, Unsupported

cdef extern from *:
    """
    #define NEPTRIO_INLINE_TENSOR 32768
    """
    const Py_ssize_t INLINE_TENSOR "NEPTRIO_INLINE_TENSOR"  # larger tensors become segments of their own

cdef dict _NUMBER = NUMBER
cdef dict _NAME = NAME


class WireError(InvalidArgument):
    """The bytes are not a ModelInferRequest."""


# ---------------------------------------------------------------- reading

cdef struct Cursor:
    const uint8_t* p
    const uint8_t* end

cdef struct Slice:
    const uint8_t* p
    Py_ssize_t n


cdef inline int read_varint(Cursor* c, uint64_t* out) except -1:
    cdef uint64_t value = 0
    cdef int shift = 0
    cdef uint8_t b
    while True:
        if c.p >= c.end or shift > 63:
            raise WireError("malformed message: a varint is cut off or too long")
        b = c.p[0]
        c.p += 1
        value |= <uint64_t>(b & 0x7F) << shift
        if b < 0x80:
            out[0] = value
            return 0
        shift += 7


cdef inline int read_slice(Cursor* c, Slice* out) except -1:
    cdef uint64_t n
    read_varint(c, &n)
    if n > <uint64_t>(c.end - c.p):
        raise WireError(
            f"malformed message: a field announces {n} bytes, {c.end - c.p} are left")
    out.p = c.p
    out.n = <Py_ssize_t>n
    c.p += n
    return 0


cdef inline int read_tag(Cursor* c, uint64_t* out) except -1:
    read_varint(c, out)
    if out[0] > 0xFFFFFFFF or out[0] < 8:
        raise WireError(f"malformed message: {out[0]} is no field tag")
    return 0


cdef int skip_field(Cursor* c, int wire_type) except -1:
    cdef uint64_t n
    cdef Slice s
    if wire_type == 0:
        read_varint(c, &n)
    elif wire_type == 1:
        if c.end - c.p < 8:
            raise WireError("malformed message: a fixed64 field is cut off")
        c.p += 8
    elif wire_type == 2:
        read_slice(c, &s)
    elif wire_type == 5:
        if c.end - c.p < 4:
            raise WireError("malformed message: a fixed32 field is cut off")
        c.p += 4
    else:
        raise WireError(f"malformed message: wire type {wire_type} is not known")
    return 0


cdef inline str text(Slice s):
    try:
        return PyUnicode_DecodeUTF8(<const char*>s.p, s.n, NULL)
    except UnicodeDecodeError:
        raise WireError("malformed message: a string field is not UTF-8") from None


cdef inline Cursor cursor_of(Slice s) noexcept:
    cdef Cursor c
    c.p = s.p
    c.end = s.p + s.n
    return c


cdef int expect_bytes(int wire_type) except -1:
    if wire_type != 2:
        raise WireError("malformed message: a length-delimited field has another wire type")
    return 0


cdef enum ParameterKind:
    NONE = 0
    BOOL = 1
    INT64 = 2
    STRING = 3
    DOUBLE = 4
    UINT64 = 5

cdef struct Parameter:
    int kind
    uint64_t number
    double real
    Slice text


cdef int read_parameter(Slice s, Slice* key, Parameter* out) except -1:
    """One map entry: key = 1, value = 2 (an InferParameter)."""
    cdef Cursor c = cursor_of(s)
    cdef Cursor v
    cdef uint64_t tag, number
    cdef Slice value
    cdef int field
    key.p = s.p
    key.n = 0
    out.kind = NONE
    out.number = 0
    while c.p < c.end:
        read_tag(&c, &tag)
        field = <int>(tag >> 3)
        if field == 1 and (tag & 7) == 2:
            read_slice(&c, key)
        elif field == 2 and (tag & 7) == 2:
            read_slice(&c, &value)
            v = cursor_of(value)
            while v.p < v.end:
                read_tag(&v, &tag)
                field = <int>(tag >> 3)
                if field == 3 and (tag & 7) == 2:
                    read_slice(&v, &out.text)
                    out.kind = STRING
                elif field == 4 and (tag & 7) == 1:
                    if v.end - v.p < 8:
                        raise WireError("malformed message: a double parameter is cut off")
                    memcpy(&out.real, v.p, 8)
                    v.p += 8
                    out.kind = DOUBLE
                elif field in (1, 2, 5) and (tag & 7) == 0:
                    read_varint(&v, &number)
                    out.number = number
                    out.kind = field
                else:
                    skip_field(&v, tag & 7)
        else:
            skip_field(&c, tag & 7)
    return 0


cdef int apply_request_parameter(InferRequest r, Slice entry, bint allow_final) except -1:
    cdef Slice k
    cdef Parameter p
    cdef str key
    read_parameter(entry, &k, &p)
    key = text(k)
    if key == "sequence_id":
        if p.kind == INT64:
            r.sequence_id = p.number
        elif p.kind == STRING:
            r.sequence_id = text(p.text) or 0
            if p.text.n > 128:
                raise Unsupported("string correlation ID cannot be longer than 128 characters")
        else:
            raise InvalidArgument(
                "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.")
    elif key == "sequence_start" or key == "sequence_end":
        if p.kind != BOOL:
            raise InvalidArgument(f"invalid value type for '{key}' parameter, expected bool_param.")
        if key == "sequence_start":
            r.sequence_start = p.number != 0
        else:
            r.sequence_end = p.number != 0
    elif key == "priority":
        if p.kind != INT64 and p.kind != UINT64:
            raise InvalidArgument(
                "invalid value type for 'priority' parameter, expected int64_param or uint64_param.")
        if p.kind == INT64 and <int64_t>p.number < 0:
            raise InvalidArgument("invalid value for 'priority', expected value >= 0.")
        r.priority = p.number
    elif key == "timeout":
        if p.kind != INT64:
            raise InvalidArgument("invalid value type for 'timeout' parameter, expected int64_param.")
        if <int64_t>p.number < 0:
            raise InvalidArgument("invalid value for 'timeout', expected value >= 0.")
        r.timeout_us = p.number
    elif key == "triton_enable_empty_final_response":
        if p.kind != BOOL:
            raise InvalidArgument("invalid value type for 'triton_enable_empty_final_response' parameter, "
                                  "expected bool_param.")
        r.want_empty_final = p.number != 0
    elif key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
            "starting with 'triton_' are allowed: triton_enable_empty_final_response")
    elif key == "binary_data_output":
        pass  # an HTTP setting; gRPC outputs are always raw
    else:
        if r.parameters is None:
            r.parameters = {}
        if p.kind == BOOL:
            r.parameters[key] = p.number != 0
        elif p.kind == INT64:
            r.parameters[key] = <int64_t>p.number
        elif p.kind == STRING:
            r.parameters[key] = text(p.text)
        elif p.kind == DOUBLE:
            r.parameters[key] = p.real
        else:
            raise InvalidArgument(f"invalid value type for '{key}' parameter, expected int64_param, bool_param, "
                                  "or string_param.")
    return 0


cdef struct Region:
    Slice name       # n == 0: not in shared memory
    uint64_t offset
    uint64_t byte_size


cdef int read_region(Slice entry, Region* region, int64_t* class_count, str where) except -1:
    """Shared-memory and classification parameters of an input or output."""
    cdef Slice k
    cdef Parameter p
    cdef str key
    read_parameter(entry, &k, &p)
    key = text(k)
    if key == "shared_memory_region":
        if p.kind != STRING:
            raise InvalidArgument(
                f"invalid value type for 'shared_memory_region' parameter for {where}, expected string_param.")
        region.name = p.text
    elif key == "shared_memory_offset" or key == "shared_memory_byte_size":
        if p.kind != INT64 or <int64_t>p.number < 0:
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter for {where}, expected int64_param.")
        if key == "shared_memory_offset":
            region.offset = p.number
        else:
            region.byte_size = p.number
    elif key == "classification" and class_count != NULL:
        if p.kind != INT64 or <int64_t>p.number < 0:
            raise InvalidArgument(
                f"invalid value type for 'classification' parameter for {where}, expected int64_param.")
        class_count[0] = <int64_t>p.number
    return 0


cdef tuple read_shape(list dims, Slice s):
    cdef Cursor c = cursor_of(s)
    cdef uint64_t v
    while c.p < c.end:
        read_varint(&c, &v)
        dims.append(<int64_t>v)


cdef int put_integer(char* out, uint64_t v, int dtype, int width, str name) except -1:
    """One integer of InferTensorContents as an element; int32 and uint32 carry narrower types too."""
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
    """Packed varints as little-endian elements of `width` bytes."""
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


# contents field -> datatypes it can carry
cdef dict _CONTENTS = {
    1: (DT_BOOL,),
    2: (DT_INT8, DT_INT16, DT_INT32),
    3: (DT_INT64,),
    4: (DT_UINT8, DT_UINT16, DT_UINT32),
    5: (DT_UINT64,),
    6: (DT_FP32,),
    7: (DT_FP64,),
    8: (DT_BYTES,),
}
cdef dict _CONTENTS_NAME = {1: "BOOL", 2: "INT32", 3: "INT64", 4: "UINT32", 5: "UINT64", 6: "FP32",
                            7: "FP64", 8: "BYTES"}


cdef bytes read_contents(Slice contents, int dtype, str name, str model):
    """InferTensorContents as the tensor's raw bytes, or None when it is empty."""
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
                    raise WireError("malformed message: packed floats are cut off")
                parts.append((<const char*>s.p)[: s.n])
            else:
                if c.end - c.p < width or wire_type != (5 if width == 4 else 1):
                    raise WireError("malformed message: a float is cut off")
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
            raise WireError("malformed message: tensor contents have an unknown wire type")
    if not any_data:
        return None
    return parts[0] if len(parts) == 1 else b"".join(parts)


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
            else:
                read_varint(&c, &v)
                dims.append(<int64_t>v)
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
    Slice[8] few     # enough for almost every request, so nothing is allocated


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

    `message` is any buffer; the input tensors view it and keep it alive. `shared_memory`
    resolves inputs that lie in a registered region (service.shared_memory).
    Raises WireError for bytes that are no such message and TritonError for one whose
    parameters or tensors are not allowed; `r.id` and `r.model_name` are set in the second case.
    """
    cdef const uint8_t[::1] view = message
    cdef Cursor c
    cdef uint64_t tag
    cdef int field
    cdef Slice s
    cdef Slices inputs, outputs, parameters, raw
    cdef Py_ssize_t i, raw_at = 0
    cdef list made
    r.inputs = made = []
    r.model_name = ""
    if view.shape[0] == 0:
        return r
    c.p = &view[0]
    c.end = c.p + view.shape[0]
    slices_init(&inputs)
    slices_init(&outputs)
    slices_init(&parameters)
    slices_init(&raw)
    try:
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
            apply_request_parameter(r, parameters.items[i], True)
        for i in range(inputs.n):
            made.append(read_input(r, inputs.items[i], message, raw.items, raw.n, &raw_at, shared_memory))
        if outputs.n:
            r.outputs = [read_output(outputs.items[i]) for i in range(outputs.n)]
    finally:
        slices_free(&inputs)
        slices_free(&outputs)
        slices_free(&parameters)
        slices_free(&raw)
    return r


def well_formed(message):
    """Raises WireError unless `message` is a sequence of whole protobuf fields.

    For the control RPCs, whose parser takes a field that is cut off for a shorter one. Nested
    messages are not looked into.
    """
    cdef const uint8_t[::1] view = message
    cdef Cursor c
    cdef uint64_t tag
    if view.shape[0] == 0:
        return
    c.p = &view[0]
    c.end = c.p + view.shape[0]
    while c.p < c.end:
        read_tag(&c, &tag)
        skip_field(&c, tag & 7)


# ---------------------------------------------------------------- writing

cdef struct Out:
    char* data
    Py_ssize_t n
    Py_ssize_t room


cdef int need(Out* o, Py_ssize_t more) except -1:
    cdef Py_ssize_t room
    cdef char* grown
    if o.n + more > o.room:
        room = (o.n + more) * 2
        grown = <char*>realloc(o.data, room)
        if grown == NULL:
            raise MemoryError
        o.data = grown
        o.room = room
    return 0


cdef inline int varint_size(uint64_t v) noexcept nogil:
    cdef int n = 1
    while v >= 0x80:
        v >>= 7
        n += 1
    return n


cdef inline void put_varint(Out* o, uint64_t v) noexcept:
    while v >= 0x80:
        o.data[o.n] = <char>(v | 0x80)
        o.n += 1
        v >>= 7
    o.data[o.n] = <char>v
    o.n += 1


cdef int put_bytes(Out* o, int field, const char* p, Py_ssize_t n) except -1:
    need(o, n + 12)
    put_varint(o, field << 3 | 2)
    put_varint(o, n)
    memcpy(o.data + o.n, p, n)
    o.n += n
    return 0


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object, Py_ssize_t*) except NULL


cdef int put_text(Out* o, int field, str value) except -1:
    cdef Py_ssize_t n
    cdef const char* p = PyUnicode_AsUTF8AndSize(value, &n)
    return put_bytes(o, field, p, n)


cdef bytes encode_parameter(object value):
    cdef Out o
    cdef double real
    o.data = NULL
    o.n = o.room = 0
    try:
        need(&o, 16)
        if isinstance(value, bool):
            put_varint(&o, 1 << 3)
            put_varint(&o, 1 if value else 0)
        elif isinstance(value, int):
            if value > 0x7FFFFFFFFFFFFFFF:
                put_varint(&o, 5 << 3)
                put_varint(&o, <uint64_t>value)
            else:
                put_varint(&o, 2 << 3)
                put_varint(&o, <uint64_t><int64_t>value)
        elif isinstance(value, float):
            real = value
            put_varint(&o, 4 << 3 | 1)
            memcpy(o.data + o.n, &real, 8)
            o.n += 8
        else:
            put_text(&o, 3, str(value))
        return o.data[: o.n]
    finally:
        free(o.data)


cdef int put_parameter(Out* o, int field, str key, object value) except -1:
    cdef bytes k = key.encode()
    cdef bytes v = encode_parameter(value)
    cdef Py_ssize_t n = 2 + varint_size(len(k)) + len(k) + varint_size(len(v)) + len(v)
    need(o, n + 16)
    put_varint(o, field << 3 | 2)
    put_varint(o, n)
    put_bytes(o, 1, PyBytes_AS_STRING(k), len(k))
    put_bytes(o, 2, PyBytes_AS_STRING(v), len(v))
    return 0


cdef Out scratch  # reused for the head of every response; only touched with the GIL held


cdef int put_head(InferResponse response, str final_flag, object final) except -1:
    """Fields 1 to 5 of ModelInferResponse into `scratch`."""
    cdef Tensor t
    cdef Py_ssize_t at, n
    cdef char[16] shape_varint
    scratch.n = 0
    if response.model_name:
        put_text(&scratch, 1, response.model_name)
    if response.model_version and not response.null:
        put_text(&scratch, 2, response.model_version)
    if response.id:
        put_text(&scratch, 3, response.id)
    if response.parameters:
        for key, value in response.parameters.items():
            put_parameter(&scratch, 4, key, value)
    if final_flag is not None:
        put_parameter(&scratch, 4, final_flag, final)
    if response.outputs:
        for t in response.outputs:
            put_output_head(t)
    return 0


cdef int put_output_head(Tensor t) except -1:
    cdef Py_ssize_t name_n, type_n, shape_n = 0, total
    cdef const char* name = PyUnicode_AsUTF8AndSize(t.name, &name_n)
    cdef str datatype = _NAME[t.dtype]
    cdef const char* type_name = PyUnicode_AsUTF8AndSize(datatype, &type_n)
    cdef int64_t d
    for dim in t.shape:
        d = dim
        shape_n += varint_size(<uint64_t>d)
    total = 2 + varint_size(name_n) + name_n + varint_size(type_n) + type_n
    if shape_n:
        total += 1 + varint_size(shape_n) + shape_n
    need(&scratch, total + 32)
    put_varint(&scratch, 5 << 3 | 2)
    put_varint(&scratch, total)
    put_bytes(&scratch, 1, name, name_n)
    put_bytes(&scratch, 2, type_name, type_n)
    if shape_n:
        need(&scratch, shape_n + 16)
        put_varint(&scratch, 3 << 3 | 2)
        put_varint(&scratch, shape_n)
        for dim in t.shape:
            d = dim
            put_varint(&scratch, <uint64_t>d)
    return 0


cdef inline Py_ssize_t wire_size(Tensor t) noexcept:
    """Bytes a tensor takes in raw_output_contents: none when it is in a registered device region."""
    return 0 if t.memory_kind == 2 else t.nbytes


def encode_response(InferResponse response not None, bint streamed=False, bint final=True):
    """A response as one gRPC message: a list of buffers with the 5-byte prefix in front.

    `streamed` wraps it in a ModelStreamInferResponse and adds triton_final_response; an error
    becomes its error_message. Tensors larger than 32 KiB are in the list as they are.
    """
    cdef Tensor t
    cdef Out frame
    cdef Py_ssize_t body, inner, size, wrap = 0
    cdef str message = None
    cdef list segments = []
    cdef bytes encoded_error = b""
    if streamed:
        if response.error is not None:
            message = str(response.error)
            encoded_error = message.encode("utf-8", "replace")
        put_head(response, "triton_final_response" if response.model_name else None, final)
    else:
        put_head(response, None, None)
    inner = scratch.n
    if response.outputs and response.error is None:
        for t in response.outputs:
            size = wire_size(t)
            inner += 1 + varint_size(size) + size
    body = inner
    if streamed:
        body = 1 + varint_size(inner) + inner
        if message is not None:
            body += 1 + varint_size(len(encoded_error)) + len(encoded_error)
    frame.data = NULL
    frame.n = frame.room = 0
    try:
        need(&frame, 64 + scratch.n + len(encoded_error))
        frame.data[0] = 0
        frame.data[1] = <char>(body >> 24)
        frame.data[2] = <char>(body >> 16)
        frame.data[3] = <char>(body >> 8)
        frame.data[4] = <char>body
        frame.n = 5
        if streamed:
            if message is not None:
                put_bytes(&frame, 1, PyBytes_AS_STRING(encoded_error), len(encoded_error))
            need(&frame, 16 + scratch.n)
            put_varint(&frame, 2 << 3 | 2)
            put_varint(&frame, inner)
        memcpy(frame.data + frame.n, scratch.data, scratch.n)
        frame.n += scratch.n
        if response.outputs and response.error is None:
            for t in response.outputs:
                need(&frame, 16)
                put_varint(&frame, 6 << 3 | 2)
                size = wire_size(t)
                put_varint(&frame, size)
                if size <= INLINE_TENSOR:
                    need(&frame, size)
                    memcpy(frame.data + frame.n, t.ptr, size)
                    frame.n += size
                else:
                    segments.append(frame.data[: frame.n])
                    segments.append(t)
                    frame.n = 0
        if frame.n:
            segments.append(frame.data[: frame.n])
    finally:
        free(frame.data)
    return segments
