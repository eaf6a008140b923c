# Marks of objects by their addresses, two bits each. One thread only.
from libc.stdint cimport uint8_t, uintptr_t

# the marks of the addresses in one MiB; `marks` is NULL where there are none
cdef struct Region:
    uintptr_t number
    uint8_t* marks

cdef class AddressMarks:
    cdef Region* regions                # a hash table of `room` places, at most half of them used
    cdef Py_ssize_t room
    cdef Py_ssize_t used
    cdef int of(self, uintptr_t address) noexcept
    cdef int add(self, uintptr_t address, int marks) noexcept
    cdef Region* place_of(self, uintptr_t number) noexcept
    cdef Region* new_region(self, uintptr_t number) noexcept
