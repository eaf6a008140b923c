"""A message of another process, read without believing it.

Two places read such messages, from a model's process (backends/python/ring_reader) and between the engine and a
front end (frontend/channel). They differ in what a message means and where its tensors may lie; what both need is here.

Rules:
 1. A message's own part is copied before it is read: the other side may change it at any moment.
 2. What no correct process writes is a Violation. The other process is given up, not the message alone.
 3. An object reads one message after the other; whoever wants to keep something of one takes it out.
 4. What a client writes is none: a shape of any numbers crosses where `clients_shapes` is set, and whoever judges requests judges
    it. What a ring has no room for is refused by pack_head() and fits(), before it is sent, with the same limits.
 5. Requests to one model name the same tensors with the same shapes over and over. What was made of such bytes is kept for
    the next message that has the same, compared byte by byte: at most SLOTS of each kind, of a few hundred bytes.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_AsUTF8AndSize, PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

from neptrio.request.hashed cimport hash_of
from neptrio.request.infer_request cimport Tensor
from neptrio.rings.packet cimport MessageWriter, Reader, read_raw, read_text, read_u32, read_u64

import json

from neptrio import limits
from neptrio.errors import Internal, InvalidArgument

cdef enum:
    LAST_DATATYPE = 14
    SLOTS = 64                   # names and heads that are kept, of each
    MOST_NAME = 64               # bytes of one that is
    FEW_DIMENSIONS = 8

cdef object _loads = json.loads
cdef uint32_t MOST_DIMENSIONS = limits.MOST_DIMENSIONS


class Violation(Exception):
    """The other process has written what no correct one writes."""


cdef class Head:
    """A tensor's name, datatype and shape as a message had them, and what was made of it."""

    cdef bytes raw
    cdef str name
    cdef int dtype
    cdef tuple shape


cdef class MessageReader:
    """See the module's text."""

    def __cinit__(self):
        self.scratch_room = 4096
        self.scratch = <char*>malloc(self.scratch_room)
        if self.scratch == NULL:
            raise MemoryError
        self.names = [None] * SLOTS
        self.heads = [None] * SLOTS

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
        cdef Head known
        cdef Reader* reader = &self.reader
        cdef const char* begin = reader.at
        cdef uint32_t i, dtype, dimensions
        cdef uint64_t n, size, place = 0
        cdef list shape
        size = head_size(begin, <uint64_t>(reader.end - begin))
        if size and not reader.bad:
            place = slot_of(begin, size)
            known = self.heads[place]
            if known is not None and <uint64_t>PyBytes_GET_SIZE(known.raw) == size and (
                    memcmp(PyBytes_AS_STRING(known.raw), begin, size) == 0):
                reader.at += size
                made.name = known.name
                made.dtype = known.dtype
                made.shape = known.shape
                return made
        made.name = read_text(reader)
        dtype = read_u32(&self.reader)
        dimensions = read_u32(&self.reader)
        if dtype > LAST_DATATYPE or dimensions > MOST_DIMENSIONS:
            raise Violation(f"a tensor of datatype {dtype} with {dimensions} dimensions")
        shape = []
        for i in range(dimensions):
            n = read_u64(&self.reader)
            if self.clients_shapes:
                shape.append(<int64_t>n)
                continue
            if n > <uint64_t>1 << 62:
                raise Violation("a tensor with more elements than there can be")
            shape.append(n)
        made.dtype = dtype
        made.shape = tuple(shape)
        if size and not reader.bad:
            known = Head.__new__(Head)
            known.raw = PyBytes_FromStringAndSize(begin, size)
            known.name, known.dtype, known.shape = made.name, dtype, made.shape
            self.heads[place] = known
        return made

    cdef str name(self):
        """A text that is likely to come again, as a model's name: most of the time the same object as before."""
        cdef Reader* reader = &self.reader
        cdef const char* data
        cdef const char* kept
        cdef str known
        cdef Py_ssize_t known_size = 0
        cdef uint32_t size = read_u32(reader)
        cdef uint64_t place
        data = read_raw(reader, size)
        if data == NULL or size == 0:
            return ""
        if size > MOST_NAME:
            return PyUnicode_DecodeUTF8(data, size, b"surrogatepass")
        place = slot_of(data, size)
        known = self.names[place]
        if known is not None:
            kept = PyUnicode_AsUTF8AndSize(known, &known_size)
            if known_size == <Py_ssize_t>size and memcmp(kept, data, size) == 0:
                return known
        known = PyUnicode_DecodeUTF8(data, size, b"surrogatepass")
        if len(known) == <Py_ssize_t>size:  # ASCII alone, whose bytes are the object's own
            self.names[place] = known
        return known


cdef int pack_head(MessageWriter writer, Tensor tensor) except -1:
    """Writes a tensor's name, datatype and shape. Raises InvalidArgument for more dimensions than head() reads."""
    cdef int64_t dimension
    cdef tuple shape = tensor.shape
    if len(shape) > MOST_DIMENSIONS:
        raise InvalidArgument(
            f"tensor '{tensor.name}' has {len(shape)} dimensions, expected at most {<int>MOST_DIMENSIONS}")
    if tensor.memory_kind == 2:
        raise Internal(f"tensor '{tensor.name}' lies in GPU memory")
    writer.text(tensor.name)
    writer.u32(<uint32_t>tensor.dtype)
    writer.u32(<uint32_t>len(shape))
    for dimension in shape:
        writer.u64(<uint64_t>dimension)
    return 0


cdef uint64_t head_size(const char* data, uint64_t size) noexcept nogil:
    """Bytes of a tensor's head at `data`; 0 for one that is not kept: too long, cut off, or what cannot be."""
    cdef uint32_t name, dtype, dimensions
    cdef uint64_t found
    if size < 12:
        return 0
    memcpy(&name, data, 4)
    if name > MOST_NAME or size < 12 + <uint64_t>name:
        return 0
    memcpy(&dtype, data + 4 + name, 4)
    memcpy(&dimensions, data + 8 + name, 4)
    found = 12 + <uint64_t>name + 8 * <uint64_t>dimensions
    return found if dimensions <= FEW_DIMENSIONS and dtype <= LAST_DATATYPE and found <= size else 0


cdef uint64_t slot_of(const char* data, uint64_t size) noexcept nogil:
    """Where among SLOTS something with these bytes is kept."""
    return (hash_of(<const unsigned char*>data, <Py_ssize_t>size) >> 40) % SLOTS
