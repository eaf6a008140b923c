"""Tensors, parameters and texts between Python and the structures of interface.h.

Rules:
 1. What a Room has made is valid as long as the Room: structures that point into it are used before it goes.
 2. Strings are taken as they cross, each behind its length; whoever makes WireStrings of them has checked them (whole() in
    values.cpp).
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free

from neptrio.backends.compiled.interface cimport *
from neptrio.rings.answers cimport WireStrings
from neptrio.rings.given cimport InputBytes

import numpy as np

from triton_python_backend_utils._errors import ErrorCode, TritonError
from triton_python_backend_utils._foreign import valid
from triton_python_backend_utils._tensor import Tensor
from triton_python_backend_utils._types import numpy_dtype, split_strings

cdef enum:
    STRINGS = 13

@cython.no_gc
cdef class OwnBytes:
    """Memory that the library took for an output and has given away."""

    def __dealloc__(self):
        free(self.data)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, False, flags)


cdef class LentBytes:
    """Memory of a backend's, while it waits in a call."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.data, self.size, True, flags)


cdef class Shaped:
    """The memory of a tensor, with what its array is made from."""

    cdef object memory
    cdef object dtype
    cdef tuple shape
    cdef size_t size


def _array(Shaped source not None):
    """The array of a tensor (Tensor._over's convert)."""
    if source.size == 0:
        return np.empty(source.shape, source.dtype)
    count = source.size // <size_t>source.dtype.itemsize
    return np.frombuffer(source.memory, source.dtype, count).reshape(source.shape)


def _strings(WireStrings source not None):
    elements = split_strings(memoryview(source.memory)[:source.size])
    array = np.empty(len(elements), dtype=object)
    array[:] = elements
    return array.reshape(source.shape)


cdef object tensor_over(str name, int datatype, const int64_t* dims, uint32_t count, object memory, const void* data,
                        size_t size):
    cdef uint32_t i
    cdef tuple shape = tuple([dims[i] for i in range(count)])
    cdef WireStrings strings
    cdef Shaped source
    if datatype != STRINGS:
        source = Shaped.__new__(Shaped)
        source.memory, source.size, source.dtype, source.shape = memory, size, numpy_dtype(datatype), shape
        return Tensor._over(name, datatype, shape, source, _array, False)
    strings = WireStrings.__new__(WireStrings)
    strings.memory, strings.data, strings.size, strings.shape = memory, <const char*>data, size, shape
    return Tensor._over(name, datatype, shape, strings, _strings, False)


cdef class Room:
    """Memory and strings for structures, as long as this object."""

    def __cinit__(self):
        self.kept = []

    cdef void* take(self, size_t size) except NULL:
        cdef bytes made = PyBytes_FromStringAndSize(NULL, size + 1)
        self.kept.append(made)
        return PyBytes_AS_STRING(made)

    cdef const char* text(self, str text) except NULL:
        cdef bytes made = text.encode("utf-8", "surrogatepass")
        self.kept.append(made)
        return PyBytes_AS_STRING(made)

    cdef const char** texts(self, names) except NULL:
        cdef const char** made = <const char**>self.take(len(names) * sizeof(char*))
        for i, name in enumerate(names):
            made[i] = self.text(name)
        return made

    cdef compiled_parameter* parameters(self, dict values) except NULL:
        cdef compiled_parameter* made = <compiled_parameter*>self.take(len(values) * sizeof(compiled_parameter))
        cdef compiled_parameter* at = made
        cdef bytes text
        for key, value in values.items():
            at[0] = compiled_parameter(self.text(key), STRING, NULL, 0, 0, 0, 0.0)
            if type(value) is bool:
                at.type, at.boolean = BOOL, value
            elif type(value) is int and -(1 << 63) <= value < 1 << 63:
                at.type, at.integer = INT, value
            elif type(value) is float:
                at.type, at.number = DOUBLE, value
            else:
                text = str(value).encode("utf-8", "surrogatepass")
                self.kept.append(text)
                at.string, at.size = PyBytes_AS_STRING(text), len(text)
            at += 1
        return made

    cdef compiled_tensor* tensors(self, list given) except NULL:
        cdef compiled_tensor* made = <compiled_tensor*>self.take(len(given) * sizeof(compiled_tensor))
        cdef compiled_tensor* at = made
        cdef InputBytes source
        cdef int64_t* shape
        for tensor in given:
            source = tensor._source
            shape = <int64_t*>self.take(len(source.shape) * sizeof(int64_t))
            for i, dimension in enumerate(source.shape):
                shape[i] = dimension
            at[0] = compiled_tensor(self.text(tensor._name), source.dtype, shape, <uint32_t>len(source.shape), source.data,
                                    source.size, NULL)
            at += 1
        return made


cdef dict values_of(const compiled_parameter* at, uint32_t count):
    cdef uint32_t i
    values = {}
    for i in range(count):
        name = said(at[i].name)
        if at[i].type == INT:
            values[name] = at[i].integer
        elif at[i].type == BOOL:
            values[name] = bool(at[i].boolean)
        elif at[i].type == DOUBLE:
            values[name] = at[i].number
        else:
            values[name] = valid((<bytes>at[i].string[:at[i].size]).decode("utf-8", "replace"))
    return values


cdef str said(const char* text):
    return "" if text == NULL else valid((<bytes>text).decode("utf-8", "replace"))


cdef object error_of(int code, str text):
    return TritonError(text, ErrorCode(code) if 0 <= code <= 7 else ErrorCode.INTERNAL)
