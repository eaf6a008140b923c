# The errors of the CUDA driver: which end a context, and how one is raised.
cdef bint sticky(int code) noexcept nogil
cdef bint doubtful(int code) noexcept nogil
cdef object check(int code, str doing)
