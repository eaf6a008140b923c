# The CUDA driver's errors: their names, and which of them end a context.
cdef bint sticky(int code) noexcept nogil
cdef object check(int code, str doing)
