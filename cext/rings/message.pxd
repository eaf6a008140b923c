# The message of another process while it is read, and what every message says of a tensor.
#   A MessageReader owns `scratch`, the private copy of a message's own part; `data` lies wherever the tensors do,
#   and is alive as long as `owner` is.
from libc.stdint cimport uint32_t, uint64_t

from neptrio.request.infer_request cimport Tensor
from neptrio.rings.packet cimport MessageWriter, Reader

cdef enum:
    MOST_OWN_PART = 268435456    # bytes of a message beside its tensors: texts and shapes

cdef class MessageReader:
    cdef Reader reader
    cdef const char* data            # where its tensors begin
    cdef uint64_t data_size          # how many bytes of them there are
    cdef object owner                # keeps `data`; None: nobody may look there later
    cdef char* scratch
    cdef size_t scratch_room
    cdef list names                  # texts that were read, by what their bytes add up to; None: nothing is kept there
    cdef bint clients_shapes         # shapes are as clients wrote them, negative dimensions included
    cdef list heads                  # the same for heads of tensors
    cdef int copied_own(self, const char* base, uint64_t own) except -1
    cdef int finish(self) except -1
    cdef dict parameters(self)
    cdef Tensor head(self)
    cdef str name(self)

cdef int pack_head(MessageWriter writer, Tensor tensor) except -1
