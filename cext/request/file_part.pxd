# A server's files that parts are read from: which requests may name so much of them that workers read it, and what all parts take.
cdef class LargeFiles:
    cdef public Py_ssize_t least    # bytes of a request; shorter ones need not be searched. Trio thread only
    cdef readonly Py_ssize_t held   # bytes of all living parts

# A part of a file, read into memory of its own.
#   A FilePart owns its memory; tensors over that memory hold a reference to the FilePart.
cdef class FilePart:
    cdef char* ptr
    cdef readonly Py_ssize_t nbytes
    cdef LargeFiles files    # counts this part; None: nobody does
    cdef size_t mapped       # bytes of the mapping at `ptr`; 0: `ptr` is from malloc()
    cdef int allocate(self, size_t n, LargeFiles files) except -1
