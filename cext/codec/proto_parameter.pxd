# Reads and writes InferParameter messages.
from libc.stdint cimport int64_t, uint64_t

from neptrio.codec.protobuf cimport Out, Slice
from neptrio.request.infer_request cimport InferRequest

cdef struct Region:
    Slice name       # n == 0: not in shared memory
    uint64_t offset
    uint64_t byte_size

cdef int apply_request_parameter(InferRequest r, Slice entry) except -1
cdef int read_region(Slice entry, Region* region, int64_t* class_count, str where) except -1
cdef int put_parameter(Out* o, int field, str key, object value) except -1
