# Requests that a backend makes: inferred.pyx.
from neptrio.backends.compiled.interface cimport compiled_host, compiled_library

cdef int infers(compiled_host* functions, const compiled_library* opened, asked) except -1
