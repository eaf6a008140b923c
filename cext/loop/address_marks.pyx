"""Marks of objects by their addresses, which are compared and never read: two bits for each 16 bytes, as no object is smaller.

The marks of a MiB of addresses lie together, 16 KiB that are allocated with the first of them, so what is marked costs a
sixty-fourth of the memory that the objects are in.
"""

from libc.stdlib cimport calloc, free

cdef enum:
    REGION_BITS = 20
    UNIT_BITS = 4
    UNITS = 1 << (REGION_BITS - UNIT_BITS)
    FIRST_ROOM = 1_024


cdef class AddressMarks:
    """Two marks, 1 and 2, for every address; none at first. Raises MemoryError."""

    def __cinit__(self):
        self.room = FIRST_ROOM
        self.regions = <Region*>calloc(self.room, sizeof(Region))
        if self.regions is NULL:
            raise MemoryError("no memory for marks of addresses")

    def __dealloc__(self):
        cdef Py_ssize_t i
        if self.regions is not NULL:
            for i in range(self.room):
                free(self.regions[i].marks)
        free(self.regions)

    def marks_of(self, uintptr_t address):
        """The sum of the marks at an address."""
        return self.of(address)

    def mark(self, uintptr_t address, int marks):
        """Adds marks at an address. Returns the sum of those that were there. Raises MemoryError."""
        cdef int had = self.add(address, marks & 3)
        if had < 0:
            raise MemoryError("no memory for marks of addresses")
        return had

    cdef int of(self, uintptr_t address) noexcept:
        """The sum of the marks at an address."""
        cdef Region* region = self.place_of(address >> REGION_BITS)
        cdef uintptr_t unit = (address >> UNIT_BITS) % UNITS
        return (region.marks[unit >> 2] >> 2 * (unit & 3)) & 3 if region.marks is not NULL else 0

    cdef int add(self, uintptr_t address, int marks) noexcept:
        """Adds marks at an address. Returns the sum of those that were there; -1: there is no memory for new ones."""
        cdef Region* region = self.place_of(address >> REGION_BITS)
        cdef uintptr_t unit = (address >> UNIT_BITS) % UNITS
        cdef int shift = 2 * (unit & 3), had
        if region.marks is NULL:
            region = self.new_region(address >> REGION_BITS)
            if region is NULL:
                return -1
        had = (region.marks[unit >> 2] >> shift) & 3
        region.marks[unit >> 2] |= <uint8_t>(marks << shift)
        return had

    cdef Region* place_of(self, uintptr_t number) noexcept:
        """Where the marks of a region are, or are to be."""
        cdef size_t i = (number * <uintptr_t>0x9E3779B97F4A7C15) >> 32
        while True:
            i %= <size_t>self.room
            if self.regions[i].marks is NULL or self.regions[i].number == number:
                return &self.regions[i]
            i += 1

    cdef Region* new_region(self, uintptr_t number) noexcept:
        cdef Region* before = self.regions
        cdef Py_ssize_t room = self.room, i
        cdef Region* region
        if 2 * self.used >= room:
            self.regions = <Region*>calloc(2 * room, sizeof(Region))
            if self.regions is NULL:
                self.regions = before
                return NULL
            self.room = 2 * room
            for i in range(room):
                if before[i].marks is not NULL:
                    self.place_of(before[i].number)[0] = before[i]
            free(before)
        region = self.place_of(number)
        region.marks = <uint8_t*>calloc(UNITS >> 2, 1)
        if region.marks is NULL:
            return NULL
        region.number = number
        self.used += 1
        return region
