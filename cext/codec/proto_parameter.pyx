"""The parameters of requests, inputs, outputs and responses: map entries of a name and an InferParameter.

Parameters that Triton knows (sequence, priority, timeout, shared memory, classification) become fields of the
request; all others are kept under their names for the model.
Source: docs/protocol/features.md A3 and A6; proto/grpc_service.proto, InferParameter.
"""
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint64_t
from libc.string cimport memcpy

from neptrio.codec.protobuf cimport (
    Cursor,
    Out,
    Slice,
    begin_out,
    cursor_of,
    end_out,
    malformed,
    name_text,
    need,
    put_bytes,
    put_raw,
    put_text,
    put_varint,
    read_slice,
    read_tag,
    read_varint,
    skip_field,
    text,
    varint_size,
)
from neptrio.request.infer_request cimport InferRequest

from neptrio.errors import InvalidArgument, Unsupported


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
    """Reads one map entry: key = 1, value = 2 (an InferParameter)."""
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
                        malformed("a double parameter is cut off")
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


cdef int apply_request_parameter(InferRequest r, Slice entry) except -1:
    """Applies one parameter of a request: one that Triton knows by name, or one for the model."""
    cdef Slice k
    cdef Parameter p
    cdef str key
    read_parameter(entry, &k, &p)
    key = name_text(k, "the name of a parameter")
    if key == "sequence_id":
        if p.kind == INT64 or p.kind == UINT64:   # a negative int64 is the unsigned id of the same bits
            r.sequence_id = p.number
        elif p.kind == STRING:
            r.sequence_id = text(p.text) or 0
            if p.text.n > 128 and len(r.sequence_id) > 128:
                raise Unsupported("string correlation ID cannot be longer than 128 characters")
        else:
            raise InvalidArgument(
                "invalid value type for 'sequence_id' parameter, expected int64_param, uint64_param or string_param.")
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
        pass  # for HTTP only; gRPC outputs are always raw bytes
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


cdef int read_region(Slice entry, Region* region, int64_t* class_count, str where) except -1:
    """Reads the parameters of an input or output about shared memory and classification."""
    cdef Slice k
    cdef Parameter p
    cdef str key
    read_parameter(entry, &k, &p)
    key = name_text(k, "the name of a parameter")
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


cdef bytes encode_parameter(object value):
    cdef Out o
    cdef char[64] memory
    cdef double real
    begin_out(&o, memory, sizeof(memory))
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
            put_raw(&o, <const char*>&real, 8)
        else:
            put_text(&o, 3, str(value))
        return o.data[: o.n]
    finally:
        end_out(&o)


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
