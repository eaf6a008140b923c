# Numbers in the text of headers.
from libc.stdint cimport int64_t

cdef inline int64_t digits(const char* p, Py_ssize_t n) noexcept:
    """The value of 1 to 15 digits; -1 for any other text."""
    cdef int64_t value = 0
    cdef Py_ssize_t i
    if not 0 < n <= 15:
        return -1
    for i in range(n):
        if not 48 <= p[i] <= 57:
            return -1
        value = value * 10 + (p[i] - 48)
    return value
