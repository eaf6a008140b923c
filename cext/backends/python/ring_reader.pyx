"""What a model's process says on its ring, read without believing it: responses and tensors.

Rules:
 1. Lengths, offsets, counts, datatypes and shapes are compared with what they may be (cext/rings/message).
 2. Where a tensor of a message that is lent is looked at, and what is copied: cext/rings/channel, rule 3.
 3. An input that is returned as an output lies in the memory of the batch that is answered, and nowhere else.
"""
cimport cython
from libc.stdint cimport uint32_t, uint64_t
from libc.string cimport memcpy

from neptrio.request.infer_request cimport DT_BYTES, InferResponse, Tensor, element_size
from neptrio.rings.channel cimport Channel
from neptrio.rings.kinds cimport *
from neptrio.rings.packet cimport Reader, read_text, read_u32, read_u64
from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block

from neptrio.errors import Code, Reason, TritonError
from neptrio.foreign import valid
from neptrio.rings.message import Violation


cdef class AnswerReader(Channel):
    """Reads messages of one process, one after the other."""

    cdef InferResponse response(self, uint32_t how):
        cdef InferResponse made = InferResponse.__new__(InferResponse)
        made.parameters = self.parameters()
        if how == RESPONSE:
            made.outputs = self.tensors()
        elif how == ERROR:
            text = read_text(&self.reader)
            made.error = TritonError(valid(text), code_of(read_u32(&self.reader)), Reason.BACKEND)
        else:
            raise Violation(f"an answer of kind {how}")
        return made

    cdef list tensors(self):
        cdef uint32_t i, count = read_u32(&self.reader)
        cdef list made = []
        for i in range(count):
            if self.reader.bad:
                break
            made.append(self.tensor())
        return made

    cdef Tensor tensor(self):
        """A tensor, checked: rules 1 and 2."""
        cdef Reader* reader = &self.reader
        cdef Tensor made = self.head()
        cdef uint32_t place
        cdef uint64_t offset, nbytes, n, elements = 1
        cdef const char* data
        cdef object owner = self.owner
        for n in made.shape:
            elements = times_checked(elements, n)
        place = read_u32(reader)
        offset = read_u64(reader)
        nbytes = read_u64(reader)
        self.finish()
        if made.dtype == 0:
            raise Violation("a tensor of datatype 0")
        if made.dtype != DT_BYTES and nbytes != elements * <uint64_t>element_size(made.dtype):
            raise Violation(f"a tensor of {elements} elements of datatype {made.dtype} in {nbytes} bytes")
        if place == HERE:
            if offset > self.data_size or nbytes > self.data_size - offset:
                raise Violation("a tensor outside of its message")
            data = self.data + offset
        elif place == GIVEN:
            owner = self.given(offset, nbytes)
            data = self.segment.base + offset
        elif place == LENT:
            if offset < self.other or nbytes > self.other_end - self.other or (
                    offset - self.other > self.other_end - self.other - nbytes):
                raise Violation("a tensor outside of the process's memory")
            data = self.segment.base + offset
        else:
            raise Violation(f"a tensor at place {place}")
        if place != HERE and self.private:
            raise Violation("a tensor elsewhere, named by a message that is not lent")
        self.place(made, data, nbytes)
        if place == HERE:
            self.copied += nbytes
        else:
            self.in_place += nbytes
        if made.ptr != data or self.private:
            self.copied += nbytes
        elif place == GIVEN:
            made.owner = owner
        if made.dtype == DT_BYTES:
            check_strings(made.ptr, nbytes, elements)
        return made

    cdef object given(self, uint64_t offset, uint64_t nbytes):
        """What keeps an input's memory that is an output now."""
        cdef GivenBlock made
        cdef Tensor tensor
        cdef uint64_t at
        if (self.block is not None and offset >= self.block.offset and nbytes <= self.block.size
                and offset - self.block.offset <= self.block.size - nbytes):
            made = GivenBlock.__new__(GivenBlock)
            made.segment = self.segment
            made.block = self.block
            return made
        for tensor in self.bodies or ():
            at = tensor.ptr - self.segment.base
            if offset >= at and nbytes <= <uint64_t>tensor.nbytes and offset - at <= <uint64_t>tensor.nbytes - nbytes:
                return tensor
        raise Violation("a tensor outside of the batch that is answered")


@cython.no_gc
cdef class GivenBlock:
    """A batch's memory that a response looks at, and the mapping it lies in."""

    cdef Segment segment
    cdef Block block


cdef uint64_t times_checked(uint64_t elements, uint64_t n) except? 0xFFFFFFFFFFFFFFFF:
    """Their product, as far as a tensor may have so many."""
    if n > <uint64_t>1 << 40 or (elements and n > (<uint64_t>1 << 48) // elements):
        raise Violation("a tensor with more elements than there can be")
    return elements * n


cdef int check_strings(const char* data, uint64_t nbytes, uint64_t elements) except -1:
    """Strings behind their lengths: as many as the shape says, and nothing left over."""
    cdef uint64_t at = 0, found = 0
    cdef uint32_t n
    while at < nbytes:
        if nbytes - at < 4:
            raise Violation("strings that end too early")
        memcpy(&n, data + at, 4)
        at += 4
        if nbytes - at < n:
            raise Violation("strings that end too early")
        at += n
        found += 1
    if found != elements:
        raise Violation(f"{found} strings in a tensor of {elements}")
    return 0


cdef list _CODES = [
    Code.UNKNOWN, Code.INTERNAL, Code.NOT_FOUND, Code.INVALID_ARG, Code.UNAVAILABLE, Code.UNSUPPORTED,
    Code.ALREADY_EXISTS, Code.CANCELLED, Code.TIMED_OUT,
]


cdef object code_of(uint32_t number):
    if number >= <uint32_t>len(_CODES):
        raise Violation(f"an error of code {number}")
    return _CODES[number]
