"""A message of another process, read without believing it.

Two places read such messages, from a model's process (backends/python/ring_reader) and between the engine and a
front end (frontend/channel). They differ in what a message means and where its tensors may lie; what both need is here.

Rules:
 1. A message's own part is copied before it is read: the other side may change it at any moment.
 2. What no correct process writes is a Violation. The other process is given up, not the message alone.
 3. An object reads one message after the other; whoever wants to keep something of one takes it out.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from neptrio.request.infer_request cimport Tensor
from neptrio.rings.packet cimport Packer, Reader, read_text, read_u32, read_u64

import json

from neptrio.errors import Internal

cdef enum:
    MOST_DIMENSIONS = 64
    MOST_OWN_PART = 268435456    # bytes of a message beside its tensors: texts and shapes
    LAST_DATATYPE = 14

cdef object _loads = json.loads


class Violation(Exception):
    """The other process has written what no correct one writes."""


cdef class MessageReader:
    """See the module's text."""

    def __cinit__(self):
        self.scratch_room = 4096
        self.scratch = <char*>malloc(self.scratch_room)
        if self.scratch == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.scratch)

    cdef int copied_own(self, const char* base, uint64_t own) except -1:
        """Begins to read a message whose own part is a private copy of the `own` bytes at `base`."""
        cdef char* grown
        if own > MOST_OWN_PART:
            raise Violation(f"a message with {own} bytes beside its tensors")
        if own > self.scratch_room:
            grown = <char*>realloc(self.scratch, own)
            if grown == NULL:
                raise Violation(f"a message of {own} bytes, for which there is no memory")
            self.scratch = grown
            self.scratch_room = own
        memcpy(self.scratch, base, own)
        self.reader.at = self.scratch
        self.reader.end = self.scratch + own
        self.reader.bad = False
        return 0

    cdef int finish(self) except -1:
        """All has been read."""
        if self.reader.bad:
            raise Violation("a message that ends too early")
        return 0

    cdef dict parameters(self):
        """An object of plain values as JSON, None for an empty text."""
        text = read_text(&self.reader)
        if not text:
            return None
        found = _loads(text)
        if type(found) is not dict:
            raise Violation("parameters that are no object")
        for value in found.values():
            if not isinstance(value, (bool, int, float, str)):
                raise Violation(f"a parameter of type {type(value).__name__}")
        return found

    cdef Tensor head(self):
        """A tensor with its name, datatype and shape, as pack_head() wrote them. Where its bytes are comes next. Datatype
        0, which a client made up, and how many elements there are, are for the caller to judge."""
        cdef Tensor made = Tensor.__new__(Tensor)
        cdef uint32_t i, dtype, dimensions
        cdef uint64_t n
        cdef list shape = []
        made.name = read_text(&self.reader)
        dtype = read_u32(&self.reader)
        dimensions = read_u32(&self.reader)
        if dtype > LAST_DATATYPE or dimensions > MOST_DIMENSIONS:
            raise Violation(f"a tensor of datatype {dtype} with {dimensions} dimensions")
        for i in range(dimensions):
            n = read_u64(&self.reader)
            if n > <uint64_t>1 << 62:
                raise Violation("a tensor with more elements than there can be")
            shape.append(n)
        made.dtype = dtype
        made.shape = tuple(shape)
        return made


cdef int pack_head(Packer packer, Tensor tensor) except -1:
    """Writes a tensor's name, datatype and shape."""
    cdef int64_t dimension
    if tensor.memory_kind == 2:
        raise Internal(f"tensor '{tensor.name}' lies in GPU memory")
    packer.text(tensor.name)
    packer.u32(<uint32_t>tensor.dtype)
    packer.u32(<uint32_t>len(tensor.shape))
    for dimension in tensor.shape:
        packer.u64(<uint64_t>dimension)
    return 0
