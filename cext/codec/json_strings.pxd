# Strings of a JSON text, which json_reader has accepted.

cdef int hex4(const unsigned char* p) noexcept nogil
cdef str decoded(const unsigned char* p, Py_ssize_t n, bint escaped)
cdef Py_ssize_t unescape(const unsigned char* p, Py_ssize_t n, char* out, char* limit) except -1 nogil
