"""Encodes an InferResponse as the bytes of a ModelInferResponse, with its gRPC frame.

No protobuf message object is made. Large output tensors are not copied into the message; they are sent as buffers of
their own.
Source: proto/grpc_service.proto; gRPC over HTTP/2 (length-prefixed messages).
"""
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport int64_t, uint64_t

from neptrio.codec.protobuf cimport (
    Out,
    PyUnicode_AsUTF8AndSize,
    begin_out,
    end_out,
    need,
    put_bytes,
    put_raw,
    put_text,
    put_varint,
    varint_size,
)
from neptrio.request.infer_request cimport GPU_MEMORY, InferResponse, Tensor
from neptrio.codec.proto_parameter cimport put_parameter

from neptrio.codec.unsendable import unsendable
from neptrio.datatypes import NAME
from neptrio.errors import Code, TritonError

cdef enum:
    INLINE_TENSOR = 32768     # bytes; larger tensors become buffers of their own

cdef Py_ssize_t MOST_BODY = 0xFFFFFFFF    # bytes of a message: its length has four

cdef dict _NAME = NAME


cdef int put_head(Out* head, InferResponse response, str final_flag, object final) except -1:
    """Writes fields 1 to 5 of a ModelInferResponse."""
    cdef Tensor t
    if response.model_name:
        put_text(head, 1, response.model_name)
    if response.model_version and not response.null:
        put_text(head, 2, response.model_version)
    if response.id:
        put_text(head, 3, response.id)
    if response.parameters:
        for key, value in response.parameters.items():
            put_parameter(head, 4, key, value)
    if final_flag is not None:
        put_parameter(head, 4, final_flag, final)
    if response.outputs:
        for t in response.outputs:
            put_output_head(head, t)
    return 0


cdef int put_output_head(Out* head, Tensor t) except -1:
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
    need(head, total + 32)
    put_varint(head, 5 << 3 | 2)
    put_varint(head, total)
    put_bytes(head, 1, name, name_n)
    put_bytes(head, 2, type_name, type_n)
    if shape_n:
        need(head, shape_n + 16)
        put_varint(head, 3 << 3 | 2)
        put_varint(head, shape_n)
        for dim in t.shape:
            d = dim
            put_varint(head, <uint64_t>d)
    return 0


cdef inline Py_ssize_t wire_size(Tensor t) noexcept:
    """The bytes that a tensor takes in raw_output_contents; none when it is in a registered device region."""
    return 0 if t.memory_kind == GPU_MEMORY else t.nbytes


cpdef list encode_response(InferResponse response, bint streamed=False, bint final=True):
    # type: (..., ..., ...) -> list[Any]
    """A response as one gRPC message: a list of buffers that begins with the 5-byte frame header.

    `streamed` wraps it in a ModelStreamInferResponse and adds triton_final_response; an error becomes its
    error_message. Tensors larger than 32 KiB are in the list themselves. Raises TritonError when the names or
    parameters that a model gave do not fit the message, or all of it is larger than a message may be.
    """
    if response is None:
        raise TypeError("expected an InferResponse, got None")
    cdef Tensor t
    cdef Out head, frame
    cdef char[512] head_memory
    cdef char[1024] frame_memory
    cdef Py_ssize_t body, inner, size, wrap = 0
    cdef str message = None
    cdef list segments = []
    cdef bytes encoded_error = b""
    if streamed:
        if response.error is not None:
            message = str(response.error)
            encoded_error = message.encode("utf-8", "replace")
    begin_out(&head, head_memory, sizeof(head_memory))
    begin_out(&frame, frame_memory, sizeof(frame_memory))
    try:
        try:
            if streamed:
                put_head(&head, response, "triton_final_response" if response.model_name else None, final)
            else:
                put_head(&head, response, None, None)
        except (OverflowError, UnicodeError) as error:
            raise unsendable(response, error) from None
        inner = head.n
        if response.outputs and response.error is None:
            for t in response.outputs:
                size = wire_size(t)
                inner += 1 + varint_size(size) + size
        body = inner
        if streamed:
            body = 1 + varint_size(inner) + inner
            if message is not None:
                body += 1 + varint_size(len(encoded_error)) + len(encoded_error)
        if body > MOST_BODY:
            raise TritonError(
                f"the response of model '{response.model_name}' has {body} bytes, a gRPC message may have {MOST_BODY}",
                Code.RESOURCE_EXHAUSTED)
        need(&frame, 64 + head.n + len(encoded_error))
        frame.data[0] = 0
        frame.data[1] = <char>(body >> 24)
        frame.data[2] = <char>(body >> 16)
        frame.data[3] = <char>(body >> 8)
        frame.data[4] = <char>body
        frame.n = 5
        if streamed:
            if message is not None:
                put_bytes(&frame, 1, PyBytes_AS_STRING(encoded_error), len(encoded_error))
            need(&frame, 16 + head.n)
            put_varint(&frame, 2 << 3 | 2)
            put_varint(&frame, inner)
        put_raw(&frame, head.data, head.n)
        if response.outputs and response.error is None:
            for t in response.outputs:
                need(&frame, 16)
                put_varint(&frame, 6 << 3 | 2)
                size = wire_size(t)
                put_varint(&frame, size)
                if size == 0:      # the pointer of an empty tensor may be NULL
                    continue
                if size <= INLINE_TENSOR:
                    put_raw(&frame, t.ptr, size)
                else:
                    segments.append(frame.data[: frame.n])
                    segments.append(t)
                    frame.n = 0
        if frame.n:
            segments.append(frame.data[: frame.n])
    finally:
        end_out(&head)
        end_out(&frame)
    return segments
