# What a session says of its inputs and outputs.

cdef object describe(str name, const void* info)   # a ValueInfo
cdef int element(str type) except -1               # the element type of "tensor(float)", 0 for no tensor
