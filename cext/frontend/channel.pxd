# One end of the way between the engine and a front end.
from libc.stdint cimport uint32_t, uint64_t

from neptrio.request.infer_request cimport Tensor
from neptrio.rings.channel cimport Channel
from neptrio.rings.packet cimport MessageWriter

cdef class FrontChannel(Channel):
    cdef uint64_t received_first     # where the other side may have received tensors; none at the front end
    cdef uint64_t received_end
    cdef MessageWriter writer
    cdef list bodies                 # [Tensor] that the packed message names where they were received; None: none
    cdef object bell                 # called where the other side sleeps
    cdef int send(self, uint32_t kind, uint64_t id, list tensors) except -1
    cdef int pack_tensor(self, Tensor tensor) except -1
    cdef int pack_received(self, Tensor tensor) except -1
    cdef int pack_place(self, Tensor tensor, uint32_t place) except -1
    cdef Tensor tensor(self)
    cdef Tensor tensor_in(self, str name, int dtype, tuple shape)
    cdef object owner_of_passed(self, const char* data, uint64_t nbytes)
