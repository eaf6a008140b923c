"""Encodes an infer response in its HTTP form: JSON, followed by the tensors that the client wants in binary.

The JSON is printed straight into the bytes that are sent. Binary tensors are not copied; they follow it in the
same send.
Source: docs/protocol/observed.md 3 and 4, docs/protocol/features.md B2.
"""
from neptrio.codec.json_reader cimport Stop
from neptrio.codec.json_tensor cimport print_elements, print_large
from neptrio.codec.json_writer cimport Writer
from neptrio.request.infer_request cimport InferRequest, InferResponse, RequestedOutput, Tensor

from neptrio.datatypes import NAME

cdef dict _NAME = NAME

cdef enum:
    LATER = 32 << 10     # of a tensor: printing more takes longer than a quarter of a millisecond (docs/loop.md)


cdef RequestedOutput _wanted(list outputs, str name):
    cdef RequestedOutput o
    for o in outputs:
        if o.name is name or o.name == name:
            return o
    return None


def encode_response(InferRequest request, InferResponse response, bint binary_default, bint later=False,
                    Stop stop=None):
    """A successful response as (JSON, binary tensors in order, total bytes of these). Raises InvalidArgument.

    The tensors are None when no output is binary. The header Inference-Header-Content-Length must be sent when the
    total is not 0. Returns None with `later` when printing takes too long for the trio thread: call it once more
    then, on a worker thread, with `stop`. Raises Cancelled after stop.ask().
    """
    cdef Writer w = Writer.__new__(Writer, 1024)
    cdef Tensor t
    cdef RequestedOutput want = None
    cdef list blobs = None
    cdef Py_ssize_t binary_bytes = 0
    cdef bint first = True, binary
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
    return w.take(), blobs, binary_bytes
