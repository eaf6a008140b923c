# Tensors, parameters and texts between Python and the structures of interface.h: shapes.pyx.
from libc.stdint cimport int64_t, uint32_t

from neptrio.backends.compiled.interface cimport compiled_parameter, compiled_tensor

cdef enum ParameterType:
    STRING = 0
    INT = 1
    BOOL = 2
    RAW = 3
    DOUBLE = 4

cdef class OwnBytes:
    cdef void* data
    cdef size_t size

cdef class LentBytes:
    cdef const void* data
    cdef size_t size

cdef class Room:
    cdef list kept
    cdef void* take(self, size_t size) except NULL
    cdef const char* text(self, str text) except NULL
    cdef const char** texts(self, names) except NULL
    cdef compiled_parameter* parameters(self, dict values) except NULL
    cdef compiled_tensor* tensors(self, list given) except NULL

cdef object tensor_over(str name, int datatype, const int64_t* dims, uint32_t count, object memory, const void* data,
                        size_t size)
cdef dict values_of(const compiled_parameter* at, uint32_t count)
cdef str said(const char* text)
cdef object error_of(int code, str text)
