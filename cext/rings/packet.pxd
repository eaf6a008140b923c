# The bytes of a message between the server and a model's process (what they mean: triton_python_backend_utils/_process/kinds.py).
#   A MessageWriter collects a message in memory of its own and remembers where its tensors' bytes lie; it
#   borrows those until copy() has run, so `held` keeps their owners.
#   A Reader borrows what it reads, which is always a private copy: see rule 3 of cext/rings/ring.
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcpy

cdef enum:
    ALIGN = 64           # where a tensor's bytes begin
    PART = 262144        # bytes: 30 to 300 microseconds, the latter into pages that are new

cdef struct Piece:
    const char* data
    uint64_t size

cdef class MessageWriter:
    cdef char* buffer
    cdef size_t room
    cdef readonly size_t used        # bytes of the message's own part
    cdef Piece* pieces
    cdef Py_ssize_t count
    cdef Py_ssize_t pieces_room
    cdef readonly uint64_t data      # bytes of the tensors, gaps included
    cdef list held
    cdef int reset(self) except -1
    cdef int grow(self, size_t more) except -1
    # of a call from another module: written here so that it is none
    cdef inline int u32(self, uint32_t value) except -1:
        if self.room - self.used < 4:
            self.grow(4)
        memcpy(self.buffer + self.used, &value, 4)
        self.used += 4
        return 0

    cdef inline int u64(self, uint64_t value) except -1:
        if self.room - self.used < 8:
            self.grow(8)
        memcpy(self.buffer + self.used, &value, 8)
        self.used += 8
        return 0

    cdef int raw(self, const char* data, size_t size) except -1
    cdef int text(self, str value) except -1
    cdef int any_text(self, str value) except -1
    cdef int counted(self, const char* data, Py_ssize_t size) except -1
    cdef int patch_u32(self, size_t at, uint32_t value) except -1
    cdef uint64_t piece(self, const char* data, uint64_t size) except? 0xFFFFFFFFFFFFFFFF
    cdef void truncate(self, size_t used, Py_ssize_t count, uint64_t data)
    cdef uint64_t data_at(self) noexcept nogil            # where the first piece goes, from the message's start
    cdef uint64_t total(self) noexcept nogil
    cdef void copy(self, char* target) noexcept nogil
    cdef void copy_offering(self, char* target) noexcept nogil

cdef struct Reader:
    const char* at
    const char* end
    bint bad             # something was read past the end; what was returned is 0


cdef inline uint32_t read_u32(Reader* reader) noexcept nogil:
    cdef uint32_t value = 0
    if reader.bad or reader.end - reader.at < 4:
        reader.bad = True
        return 0
    memcpy(&value, reader.at, 4)
    reader.at += 4
    return value


cdef inline uint64_t read_u64(Reader* reader) noexcept nogil:
    cdef uint64_t value = 0
    if reader.bad or reader.end - reader.at < 8:
        reader.bad = True
        return 0
    memcpy(&value, reader.at, 8)
    reader.at += 8
    return value


cdef inline const char* read_raw(Reader* reader, size_t size) noexcept nogil:
    cdef const char* found = reader.at
    if reader.bad or <size_t>(reader.end - reader.at) < size:
        reader.bad = True
        return NULL
    reader.at += size
    return found

cdef str read_text(Reader* reader)   # "" once it is bad; raises UnicodeDecodeError
