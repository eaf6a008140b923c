# A part of a file in memory of its own.
#   A FilePart owns its memory; tensors over it own the FilePart. Nothing else sees the memory.
cdef class FilePart:
    cdef char* ptr
    cdef readonly Py_ssize_t nbytes
    cdef size_t mapped       # bytes of the mapping that `ptr` is; 0: `ptr` is malloc's
    cdef int allocate(self, size_t n) except -1
