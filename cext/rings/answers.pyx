"""What a model's process answers, as messages: responses and their tensors.

The problem: a large output should cross without a copy, but only if nobody can change it afterwards. The choice: where it lies in
shared memory already, and nobody but the answer refers to it, the message says where.

Rules:
 1. Packing runs Python code (a lazy array, a string's encoding), so other threads may run in between.
 2. Of who refers to what, more is taken for shared than is (measure()): then a tensor is copied, which is always right.
"""
cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromObject, PyMemoryView_GET_BUFFER
from libc.stdint cimport uint32_t, uint64_t

from neptrio.rings.given cimport GivenMessage, InputArray, InputBytes
from neptrio.rings.kinds cimport *
from neptrio.rings.packet cimport MessageWriter
from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block

import json

import numpy as np

from triton_python_backend_utils._execute import OPEN_ANSWER, RESCHEDULED_ANSWER
from triton_python_backend_utils._foreign import text_of
from triton_python_backend_utils._request import InferenceResponse
from triton_python_backend_utils._tensor import Tensor
from triton_python_backend_utils._types import _NUMPY, join_strings, numpy_dtype

cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)

cdef enum:
    STRINGS = 13

cdef object _ndarray = np.ndarray
cdef object _dumps = json.dumps
cdef dict _DTYPES = _NUMPY


@cython.no_gc
cdef class OutputBytes:
    """Memory of this process's half that a response can carry as it is."""

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.segment.base + self.block.offset, self.block.size, False, flags)


@cython.no_gc
cdef class WireStrings:
    """The strings of an output as they cross, each behind its length, checked by whoever made this."""


@cython.final
cdef class AnswerPacker:
    """See the module's text. `outputs_first`: where this process's part of the segment begins; `output_names`: those of the
    model's configuration."""

    def __init__(self, Segment segment not None, uint64_t outputs_first, list output_names):
        self.segment = segment
        self.output_names = output_names
        self.outputs_first = outputs_first
        self.measure()

    cdef int answers(self, MessageWriter writer, list answers, list refers, failed, GivenMessage given) except -1:
        writer.u32(<uint32_t>len(answers))
        for answer in answers:
            if answer is OPEN_ANSWER:
                writer.u32(OPEN)
            elif answer is RESCHEDULED_ANSWER:
                writer.u32(RESCHEDULED)
            elif type(answer) is str:
                pack_error(writer, answer, 1)
            else:
                self.response(writer, answer[0], answer[1], True, refers, failed, given)
        return 0

    cdef int measure(self) except -1:
        """Counts the references to answers that nobody else has: what is above is shared. How many there are is a matter
        of the compiler's and the interpreter's version, so it is not written down."""
        cdef MessageWriter writer = MessageWriter()
        writer.reset()
        self.measuring = True
        self.answers(writer, _specimen(), [], None, None)
        self.measuring = False
        return 0

    cdef int response(self, MessageWriter writer, response, names, bint sole, list refers, failed,
                      GivenMessage given) except -1:
        """With `failed`, what cannot be packed becomes an error response; else it is raised."""
        cdef size_t used = writer.used
        cdef Py_ssize_t count = writer.count
        cdef uint64_t data = writer.data
        cdef uint32_t n = 0
        cdef size_t at
        cdef list tensors
        error = response._error
        parameters = response._parameters
        if error is not None:
            writer.u32(ERROR)
            writer.text(_dumps(parameters) if parameters else "")
            writer.text(error._message)
            writer.u32(error._code)
            return 0
        try:
            tensors = response._tensors
            if self.measuring:
                self.most.response, self.most.tensors = Py_REFCNT(response), Py_REFCNT(tensors)
            sole = sole and Py_REFCNT(response) <= self.most.response and Py_REFCNT(tensors) <= self.most.tensors
            writer.u32(RESPONSE)
            writer.text(_dumps(parameters) if parameters else "")
            at = writer.used
            writer.u32(0)
            for tensor in tensors:
                if self.measuring:
                    self.most.tensor = Py_REFCNT(tensor)
                if names is None or tensor._name in names:
                    self.tensor(writer, tensor, sole and Py_REFCNT(tensor) <= self.most.tensor, refers, given)
                    n += 1
            if names is not None and n < len(names) and n < len(tensors):
                # so that the server can say what the missing ones are called here
                for tensor in tensors:
                    if tensor._name not in names and tensor._name not in self.output_names:
                        self.tensor(writer, tensor, False, refers, given)
                        n += 1
            writer.patch_u32(at, n)
        except Exception as problem:
            if failed is None:
                raise
            writer.truncate(used, count, data)
            pack_error(writer, failed(f"cannot use an output tensor: {text_of(problem)}"), 1)
        return 0

    cdef int tensor(self, MessageWriter writer, tensor, bint sole, list refers, GivenMessage given) except -1:
        cdef int dtype = tensor._dtype
        cdef uint32_t place = HERE
        cdef uint64_t offset
        cdef uint64_t size
        cdef const char* data
        cdef size_t inside = 0
        cdef tuple shape
        cdef Py_ssize_t refs = self.most.array  # the tensor's, the memoryview's and ours
        array = tensor._array
        if array is None and type(tensor._source) is WireStrings:
            return self.strings(writer, tensor, tensor._source)
        if array is None:
            array = tensor.as_numpy()
            sole = True  # it was made for us
            if tensor._array is None:
                refs -= 1
        if type(array) is not _ndarray:
            array = np.asarray(array)
            sole = False
        shape = array.shape
        if dtype == STRINGS:
            view = join_strings(array)
            data = PyBytes_AS_STRING(view)
            size = PyBytes_GET_SIZE(view)
            writer.held.append(view)
        else:
            wanted = _DTYPES.get(dtype)
            if wanted is None:
                wanted = numpy_dtype(dtype)
            if array.dtype != wanted or not array.flags.c_contiguous:
                array = array.astype(wanted, order="C")
            if dtype == 14:
                view = PyMemoryView_FromObject(array.reshape(-1).view(np.uint8))
            else:
                view = PyMemoryView_FromObject(array)
            data = <const char*>PyMemoryView_GET_BUFFER(view).buf
            size = PyMemoryView_GET_BUFFER(view).len
            inside = data - self.segment.base
            if self.measuring:
                self.most.array = Py_REFCNT(array)
                _exclusive(array, self.most.array, given, &self.most, True)
            if size > KEEP_ABOVE and inside < self.segment.size and sole and _exclusive(
                    array, refs, given, &self.most, False):
                place = GIVEN if inside < self.outputs_first else LENT
                refers.append(array)
            else:
                writer.held.append(view)
        writer.text(tensor._name)
        writer.u32(dtype)
        writer.u32(<uint32_t>len(shape))
        for dimension in shape:
            writer.u64(dimension)
        writer.u32(place)
        writer.u64(writer.piece(data, size) if place == HERE else inside)
        writer.u64(size)
        return 0


    cdef int strings(self, MessageWriter writer, tensor, WireStrings source) except -1:
        writer.held.append(source)
        writer.text(tensor._name)
        writer.u32(STRINGS)
        writer.u32(<uint32_t>len(source.shape))
        for dimension in source.shape:
            writer.u64(dimension)
        writer.u32(HERE)
        writer.u64(writer.piece(source.data, source.size))
        writer.u64(source.size)
        return 0


def _specimen() -> list:
    """Answers to which nobody but the list refers, as result() gets them."""
    array = np.zeros(2, np.uint8)[:1]
    return [(InferenceResponse([Tensor("", array)]), None)]


cdef bint _exclusive(object array, Py_ssize_t refs, GivenMessage given, Sole* most, bint measuring):
    """True when nobody shares the array's memory (backends.python.tensors rule 2), and the server can be told where
    it lies: in our own half, or in the batch that is answered."""
    cdef InputBytes source
    if Py_REFCNT(array) > refs:
        return False
    base = array.base
    while base is not None:
        if measuring:
            most.base = Py_REFCNT(base)
        if Py_REFCNT(base) > most.base:  # the array below's `base` and ours
            return False
        if type(base) is OutputBytes:
            return True
        if type(base) is InputArray:
            source = (<InputArray>base).source
            return source.message is given and source.arrays == 1
        if type(base) is not _ndarray:
            return False
        base = base.base
    return False


cdef int pack_error(MessageWriter writer, str text, uint32_t code) except -1:
    writer.u32(ERROR)
    writer.text("")
    writer.text(text)
    writer.u32(code)
    return 0
