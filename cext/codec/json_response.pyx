"""Encodes an infer response in its HTTP form: JSON, followed by the tensors that the client wants in binary.

The JSON is printed straight into the bytes that are sent. Binary tensors are not copied; they follow it in the
same send.

Where all outputs are binary, the JSON follows from names, datatypes, shapes and sizes, which are the same in every response
of a model that is asked the same: it is kept and sent again. All that it was printed from is compared. It is kept
when a response of that size comes for the second time with no other in its place in between.
Source: docs/protocol/observed.md 3 and 4, docs/protocol/features.md B2.
"""
from neptrio.codec.json_reader cimport Stop
from neptrio.codec.json_tensor cimport print_elements, print_large
from neptrio.codec.json_writer cimport Writer
from neptrio.request.infer_request cimport InferRequest, InferResponse, RequestedOutput, Tensor, same_name

from neptrio.codec.unsendable import unsendable
from neptrio.datatypes import NAME

cdef dict _NAME = NAME

cdef enum:
    LATER = 32 << 10     # of a tensor: printing more takes longer than a quarter of a millisecond (docs/loop.md)
    FEW = 8              # outputs of a response whose text is kept
    PLACES = 64          # for texts that are kept; a power of two


cdef class _Printed:
    """The text of a response with binary outputs only, and what it was printed from."""

    cdef str model_name
    cdef str model_version
    cdef list names
    cdef list shapes
    cdef int[FEW] dtypes
    cdef Py_ssize_t[FEW] sizes
    cdef Py_ssize_t nbytes
    cdef bytes text

    cdef bint is_of(self, InferResponse response):
        """Whether that response has the same text."""
        cdef Py_ssize_t i, count = len(self.names)
        cdef Tensor t
        if (len(response.outputs) != count or not same_name(response.model_name, self.model_name)
                or not same_name(response.model_version, self.model_version)):
            return False
        for i in range(count):
            t = <Tensor>response.outputs[i]
            if t.nbytes != self.sizes[i] or t.dtype != self.dtypes[i] or not same_name(t.name, <str>self.names[i]):
                return False
            if t.shape is not self.shapes[i] and t.shape != self.shapes[i]:
                return False
        return True


cdef list _printed = [None] * PLACES
cdef size_t[PLACES] _seen    # which response came last to a place


cdef size_t _key(InferResponse response):
    """Which response it may be like: never 0."""
    cdef Tensor t
    cdef size_t key = <size_t><void*>response.model_name
    for t in response.outputs:
        key = (key ^ <size_t>t.nbytes) * <size_t>0x9E3779B97F4A7C15
        key ^= key >> 32
    return key | 1


cdef bint _all_binary(InferRequest request, InferResponse response, bint binary_default):
    """Whether the text says nothing but what outputs are called and look like, and all of them follow it."""
    cdef Tensor t
    cdef RequestedOutput want
    if response.id or response.parameters or response.outputs is None or not 0 < len(response.outputs) <= FEW:
        return False
    if request.outputs is None:
        return binary_default
    for t in response.outputs:
        want = _wanted(request.outputs, t.name)
        if not binary_default if want is None else want.binary != 1 or want.shm_region is not None:
            return False
    return True


cdef _Printed _keep(InferResponse response, bytes text, Py_ssize_t nbytes):
    cdef _Printed made = _Printed.__new__(_Printed)
    cdef Py_ssize_t i
    cdef Tensor t
    made.model_name = response.model_name
    made.model_version = response.model_version
    made.names = [t.name for t in response.outputs]
    made.shapes = [t.shape for t in response.outputs]
    for i in range(len(response.outputs)):
        t = <Tensor>response.outputs[i]
        made.dtypes[i] = t.dtype
        made.sizes[i] = t.nbytes
    made.text = text
    made.nbytes = nbytes
    return made


cdef RequestedOutput _wanted(list outputs, str name):
    cdef RequestedOutput o
    for o in outputs:
        if o.name is name or o.name == name:
            return o
    return None


cpdef tuple encode_response(InferRequest request, InferResponse response, bint binary_default, bint later=False,
                            Stop stop=None):
    # type: (..., ..., ..., ..., ...) -> tuple[bytes, list[Tensor] | None, int] | None
    """A successful response as (JSON, binary tensors in order, total bytes of these). Raises InvalidArgument, and Internal for
    texts of a model's that are no Unicode.

    The tensors are None when no output is binary. The header Inference-Header-Content-Length must be sent when the
    total is not 0. Returns None with `later` when printing takes too long for the trio thread: call it once more
    then, on a worker thread, with `stop`. Raises Cancelled after stop.ask().
    """
    try:
        return encoded(request, response, binary_default, later, stop)
    except UnicodeEncodeError as error:
        raise unsendable(response, error, "surrogateescape") from None


cdef tuple encoded(InferRequest request, InferResponse response, bint binary_default, bint later, Stop stop):
    cdef Writer w
    cdef Tensor t
    cdef _Printed printed
    cdef size_t key = 0, place = 0
    cdef bytes text
    cdef RequestedOutput want = None
    cdef list blobs = None
    cdef Py_ssize_t binary_bytes = 0
    cdef bint first = True, binary
    if _all_binary(request, response, binary_default):
        key = _key(response)
        place = key >> 32 & (PLACES - 1)
        printed = <_Printed>_printed[<Py_ssize_t>place]
        if printed is not None and printed.is_of(response):
            return printed.text, list(response.outputs), printed.nbytes
    w = Writer.__new__(Writer, 1024)
    w.raw(b"{", 1)
    if response.id:
        w.raw(b'"id":', 5)
        w.text(response.id)
        w.raw(b",", 1)
    w.raw(b'"model_name":', 13)
    w.text(response.model_name)
    w.raw(b',"model_version":', 17)
    w.text(response.model_version)
    if response.parameters:
        w.raw(b',"parameters":', 14)
        w.value(response.parameters)
    w.raw(b',"outputs":[', 12)
    if response.outputs is not None:
        for t in response.outputs:
            w.raw(b'{"name":' if first else b',{"name":', 8 if first else 9)
            first = False
            w.text(t.name)
            w.raw(b',"datatype":', 12)
            w.text(<str>_NAME[t.dtype])
            w.raw(b',"shape":[', 10)
            for i, d in enumerate(t.shape):
                if i:
                    w.raw(b",", 1)
                w.integer(d)
            w.raw(b"]", 1)
            binary = binary_default
            if request.outputs is not None:
                want = _wanted(request.outputs, t.name)
                if want is not None:
                    binary = want.binary == 1
            if want is not None and want.shm_region is not None:
                pass
            elif binary:
                w.raw(b',"parameters":{"binary_data_size":', 34)
                w.integer(t.nbytes)
                w.raw(b"}", 1)
                if blobs is None:
                    blobs = []
                blobs.append(t)
                binary_bytes += t.nbytes
            else:
                w.raw(b',"data":', 8)
                if later and t.nbytes > LATER:
                    return None
                if stop is not None and t.nbytes > LATER:
                    print_large(w, t, stop)
                else:
                    print_elements(w, t)
            w.raw(b"}", 1)
    w.raw(b"]}", 2)
    text = w.take()
    if key:
        if _seen[place] == key:
            _printed[<Py_ssize_t>place] = _keep(response, text, binary_bytes)
        _seen[place] = key
    return text, blobs, binary_bytes
