# What a backend asks of the server beside requests: asked.pyx.
from neptrio.backends.compiled.interface cimport compiled_host

cdef int put(object text, char* room, size_t size, int code) noexcept
cdef int failure(object error, char* room, size_t size) noexcept
cdef void unheard(str what, object error) noexcept
cdef int asks(compiled_host* functions, host) except -1
