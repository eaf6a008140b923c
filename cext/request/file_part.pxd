# How many files have parts so large that they are read by workers. Trio thread only.
cdef class LargeFiles:
    cdef public Py_ssize_t count

# A part of a file, read into memory of its own.
#   A FilePart owns its memory; tensors over that memory hold a reference to the FilePart.
cdef class FilePart:
    cdef char* ptr
    cdef readonly Py_ssize_t nbytes
    cdef size_t mapped       # bytes of the mapping at `ptr`; 0: `ptr` is from malloc()
    cdef int allocate(self, size_t n) except -1
