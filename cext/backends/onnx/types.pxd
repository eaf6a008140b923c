# The types and shapes of a session's inputs and outputs.

cdef object describe(str name, const void* info)   # a ValueInfo
cdef int element(str type) except -1               # the element type of "tensor(float)"; 0 when it is no tensor
