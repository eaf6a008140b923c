"""Steps of a plain infer request, whichever connection carries it: from its body to admission, and from a response to its text.

The fast paths of HTTP/1.1 (cext/transport/http1/fast_path) and HTTP/2 (cext/transport/rest/http2_stream) recognise such
requests, each in its own way, and send the answers; what lies between is here.
"""
from libc.stdint cimport int64_t

from neptrio.codec.json_request cimport decode_request
from neptrio.codec.json_response cimport encode_response
from neptrio.execution.admission cimport Admission
from neptrio.observe.trace cimport Trace
from neptrio.request.infer_request cimport GPU_MEMORY, InferRequest, InferResponse, ModelCore, Tensor

import logging

from neptrio.codec.outputs import select, selects_slowly
from neptrio.errors import Internal, InvalidArgument, TritonError
from neptrio.execution.admission import HTTP_ONE_RESPONSE
from neptrio.observe.timing import timing_headers

log = logging.getLogger("neptrio.rest")

cdef enum:
    LARGE_BODY = 4 << 10   # bytes; before decoding a larger body it is asked whether the scheduler has room


cdef bint read_plain(InferRequest request, tuple route, bytes body, Py_ssize_t header_length, int64_t start,
                     Admission admission, object shared_memory) except -1:
    """Fills in a request: its model, when its first byte came, its tensors. Returns whether outputs are binary by default.
    `header_length`: bytes of JSON, -1 if all is. Raises TritonError."""
    cdef ModelCore model
    cdef Py_ssize_t size = len(body)
    request.model_name = <str>route[0]
    request.model_version = <str>route[1]
    model = admission.find(request, HTTP_ONE_RESPONSE)
    admission.received(request, start)
    if header_length > size:
        raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {header_length}")
    if size > LARGE_BODY and not admission.tracer.unread:
        model.scheduler.expect_room()
    return decode_request(request, body, None if header_length < 0 else header_length, shared_memory)


cdef tuple print_now(plain, connection, InferRequest request, InferResponse response, bint binary_default):
    """The text of a response, its binary tensors and their bytes, for the request `plain` of a connection. None if it is
    refused now, or printed by a worker, which also does what the client asked to be done with the outputs."""
    cdef bint selecting = False
    cdef tuple encoded = None
    error = response.error
    if error is None:
        try:
            if request.outputs is not None:
                selecting = selects_slowly(request, response)
                if not selecting:
                    select(request, response, connection.services)
            if not selecting:
                encoded = encode_response(request, response, binary_default, True)
        except TritonError as problem:
            error = problem
        except Exception as problem:
            log.exception("encoding a response of model '%s' failed", request.model_name)
            error = Internal(f"internal error: {type(problem).__name__}: {problem}")
    if error is not None:
        plain.refuse(error, request)
    elif encoded is None:
        connection.encode_later(plain, request, response, binary_default, selecting)
    return encoded


cdef int check_host_memory(list blobs) except -1:
    """Raises BufferError for tensors whose bytes cannot be sent from where they are."""
    cdef Tensor tensor
    for tensor in blobs:
        if tensor.memory_kind == GPU_MEMORY:
            raise BufferError(f"tensor '{tensor.name}' lies in GPU memory")
    return 0


cdef bint has_extra_headers(InferRequest request) noexcept:
    """Whether extra_headers() may have some."""
    cdef Trace trace = request.trace
    return request.timing is not None or (trace is not None and trace.headers is not None and len(trace.headers) > 0)


cdef list extra_headers(InferRequest request):
    """Headers of the answer beside the usual ones: its trace, and its times where the client wishes."""
    return [*(request.trace.headers if request.trace is not None else ()), *timing_headers(request)]
