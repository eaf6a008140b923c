# What was read from the texts of earlier requests. A Known owns its copy of the text and what was read from it.
from libc.stdint cimport int64_t, uint64_t

from neptrio.codec.protobuf cimport Slice
from neptrio.request.infer_request cimport InferRequest, Tensor

cdef Py_ssize_t LONGEST  # bytes of a text that is kept

cdef enum:
    PLACES = 256         # a power of two

cdef class Known:
    cdef bytes text
    cdef str id
    cdef str model_name              # of a message, which names its model
    cdef str model_version
    cdef list inputs                 # Tensors without memory: name, datatype, shape, size
    cdef list outputs                # RequestedOutputs, or None
    cdef Py_ssize_t nbytes           # of all inputs
    cdef bint strings                # some of them are BYTES
    cdef readonly bint binary_default
    cdef int fill(self, InferRequest request, Tensor body, Py_ssize_t at) except -1
    cdef int fill_from(self, InferRequest request, object message, const Slice* contents) except -1
    cdef int give(self, InferRequest request, list inputs) except -1

cdef class KnownTexts:
    cdef list known                  # a Known or None in each place
    cdef uint64_t[PLACES] seen       # the hash of the text that came last and was not kept yet
    cdef readonly uint64_t found
    cdef Known find(self, const unsigned char* text, Py_ssize_t size)
    cdef int offer(self, const unsigned char* text, Py_ssize_t size, InferRequest request, object owner,
                   bint binary_default) except -1

