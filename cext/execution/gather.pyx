"""Gathers the inputs of a batch into one buffer per input, and splits its outputs.

The problem: a backend wants one tensor for the whole batch where each request brought its own, and each response needs
its part of one output. The choice: one copy of inputs, none of outputs. gather() copies each request's bytes once, one
after the other, without the GIL when there is enough to copy; for a lone request nothing is copied. split() makes
views: each part keeps the whole output's memory alive until its response has been sent.

Rules:
 1. Parts are in the order of the requests.
 2. Nothing is padded. Ragged inputs are put end to end and lose their shape: the result has one dimension, and the
    `batch_input`s of the configuration tell the model where each part lies.
 3. gather() refuses tensors in GPU memory: the backend must copy them to the host first.
"""
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from neptrio.request.infer_request cimport DT_BYTES, GPU_MEMORY, InferRequest, Tensor, element_size, times

from neptrio.request.infer_request import alias
from neptrio.errors import Internal, InvalidArgument, Reason

cdef enum:
    WITHOUT_GIL = 32768  # bytes; giving up the GIL takes longer than copying fewer

cdef struct Span:
    const char* source
    Py_ssize_t nbytes


cdef Tensor _input(InferRequest request, str name):
    cdef Tensor t
    for t in request.inputs:
        if t.name == name:
            return t
    return None


cdef void _copy(char* target, Span* spans, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t i
    for i in range(n):
        if spans[i].nbytes:      # the pointer of an empty tensor may be NULL
            memcpy(target, spans[i].source, spans[i].nbytes)
            target += spans[i].nbytes


def gather(list requests not None, str name not None, bint ragged=False):
    # type: (list[InferRequest], ..., ...) -> Tensor | None
    """The input `name` of all requests as one Tensor, or None when no request has it.

    The first dimension is the sum of the requests' first dimensions, the others are the same as theirs. With
    `ragged` there is one dimension, the number of all elements. Raises InvalidArgument when shapes differ in other
    dimensions, when only some requests have the input, and for tensors in GPU memory.
    """
    cdef InferRequest request
    cdef Tensor t, first = None
    cdef Py_ssize_t n = len(requests), i = 0, total = 0
    cdef int64_t rows = 0
    cdef Span* spans
    cdef char* target
    if n == 1:
        first = _input(requests[0], name)
        if first is None or not ragged:
            return first
        return alias(first, name, (first.count(),))
    spans = <Span*>malloc(n * sizeof(Span))
    if spans == NULL:
        raise MemoryError()
    try:
        for request in requests:
            t = _input(request, name)
            if t is None:
                if first is not None:
                    raise InvalidArgument(f"input '{name}' is present in some requests of the batch only")
                i += 1
                continue
            if first is None:
                if i:
                    raise InvalidArgument(f"input '{name}' is present in some requests of the batch only")
                first = t
            if t.memory_kind == GPU_MEMORY:
                raise InvalidArgument(f"input '{name}' lies in GPU memory and cannot be gathered on the host")
            if ragged:
                rows += t.count()
            else:
                if len(t.shape) == 0 or t.shape[1:] != first.shape[1:]:
                    raise InvalidArgument(
                        f"input '{name}' has shapes {list(first.shape)} and {list(t.shape)} in one batch; "
                        "only allow_ragged_batch lets them differ beyond the batch dimension")
                rows += <int64_t>t.shape[0]
            spans[i].source = t.ptr
            spans[i].nbytes = t.nbytes
            total += t.nbytes
            i += 1
        if first is None:
            return None
        buffer = PyByteArray_FromStringAndSize(NULL, total)
        target = PyByteArray_AS_STRING(buffer)
        if total >= WITHOUT_GIL:
            with nogil:
                _copy(target, spans, n)
        else:
            _copy(target, spans, n)
    finally:
        free(spans)
    return Tensor(name, first.dtype, (rows,) if ragged else (rows, *first.shape[1:]), buffer, True)


cdef Py_ssize_t _skip(const char* data, Py_ssize_t at, Py_ssize_t end, int64_t elements) noexcept nogil:
    """The position after `elements` length-prefixed elements that begin at `at`; -1 when they go beyond `end`."""
    cdef uint32_t length
    while elements > 0:
        if end - at < 4:
            return -1
        memcpy(&length, data + at, 4)
        at += 4
        if end - at < <Py_ssize_t>length:
            return -1
        at += length
        elements -= 1
    return at


def split(Tensor tensor not None, list shapes not None, str what=""):
    # type: (..., list[tuple[int, ...]], ...) -> list[Tensor]
    """Consecutive parts of `tensor` with the given shapes, as views in that order.

    Raises Internal, naming `what`, unless the shapes have exactly the tensor's elements in all.
    """
    cdef list parts = []
    cdef Tensor part
    cdef Py_ssize_t at = 0, end
    cdef int64_t count, d, width = element_size(tensor.dtype)
    for shape in shapes:
        count = 1
        for d in shape:
            count = times(count, d)
        if count < 0:
            break
        if tensor.dtype == DT_BYTES:
            end = _skip(tensor.ptr, at, tensor.nbytes, count)
        else:
            end = at + count * width
        if end < 0 or end > tensor.nbytes:
            break
        part = alias(tensor, tensor.name, tuple(shape))
        part.ptr = tensor.ptr + at
        part.nbytes = end - at
        parts.append(part)
        at = end
    if len(parts) < len(shapes) or at != tensor.nbytes:
        raise Internal(
            f"{what or 'the model'} returned output '{tensor.name}' with shape {list(tensor.shape)}, which "
            f"does not divide into the shapes {[list(s) for s in shapes]} of its requests", reason=Reason.BACKEND)
    return parts
