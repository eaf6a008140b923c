# The reader of what a model's process says.
#   The Segment belongs to whoever holds a reference: the reader, and every GivenBlock of a tensor.
from libc.stdint cimport uint32_t, uint64_t

from neptrio.request.infer_request cimport InferResponse, Tensor
from neptrio.rings.message cimport MessageReader
from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block

cdef class AnswerReader(MessageReader):
    cdef Segment segment
    cdef uint64_t outputs            # the process's part of the segment
    cdef uint64_t outputs_end
    cdef uint64_t copied             # bytes of tensors that were copied on their way here
    cdef uint64_t in_place           # and that were not
    cdef Block block                 # of the batch that is answered, for a result
    cdef list bodies                 # tensors of that batch that lie in the bodies' area, or None
    cdef InferResponse response(self, uint32_t how)
    cdef list tensors(self)
    cdef Tensor tensor(self)
    cdef object given(self, uint64_t offset, uint64_t nbytes)
    cdef int forget(self) except -1
