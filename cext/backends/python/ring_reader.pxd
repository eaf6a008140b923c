# What a model's process says, as the server reads it.
#   The Segment belongs to whoever holds a reference: the channel, and every GivenBlock of a tensor.
from libc.stdint cimport uint32_t, uint64_t

from neptrio.request.infer_request cimport InferResponse, Tensor
from neptrio.rings.channel cimport Channel
from neptrio.rings.ring cimport Segment
from neptrio.rings.slab cimport Block

cdef class AnswerReader(Channel):
    cdef readonly uint64_t copied    # bytes of tensors that were copied on their way here or there, once each time
    cdef readonly uint64_t in_place  # and that crossed without a copy
    cdef Block block                 # of the batch that is answered, for a result
    cdef list bodies                 # tensors of that batch that lie in the bodies' area, or None
    cdef InferResponse response(self, uint32_t how)
    cdef list tensors(self)
    cdef Tensor tensor(self)
    cdef object given(self, uint64_t offset, uint64_t nbytes)
