"""Parts of files that other processes may change at any moment: read into memory of our own, written from it.

The problem: a mapped file can be cut shorter by whoever may write to it, and who touches a mapped page that is
gone is ended by SIGBUS; so is who writes to a hole when the file system is full. No check beforehand helps,
because the file may change after it. The choice: such files are not mapped. The kernel copies, and says what it
could not copy. That is one copy more on the way in and none on the way out, and what was read cannot change while
it is used: a length that was checked is the length that is read.

Rules:
 1. A FilePart is whole: read() gives all bytes it was asked for, or None.
 2. held_bytes() counts the memory of all parts that are alive, so that its users can bound it.
 3. The GIL is kept over small copies, which are over sooner than a change of threads.
 4. The memory of large parts is used again, because taking new pages from the system costs several times the
    copy. At most SPARE bytes wait for that; trim() gives them back. Nobody sees what a part held before: rule 1.
"""
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer, PyBUF_SIMPLE
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memmove

import os

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

cdef extern from *:
    """
    #include <sys/mman.h>
    """
    void* mmap(void* at, size_t n, int protection, int flags, int fd, int64_t offset) nogil
    int munmap(void* at, size_t n) nogil
    int PROT_READ, PROT_WRITE, MAP_PRIVATE, MAP_ANONYMOUS
    void* MAP_FAILED

cdef extern from "<unistd.h>" nogil:
    ssize_t pread(int fd, void* data, size_t n, int64_t offset)
    ssize_t pwrite(int fd, const void* data, size_t n, int64_t offset)

cdef enum:
    KEEP_GIL = 65536     # bytes
    ALIGNMENT = 64       # of a part's memory
    LARGE = 256 << 10    # bytes from which on a part is a mapping of its own
    STEP = 256 << 10     # what its size is a multiple of
    SPARE = 64 << 20     # bytes of mappings that wait to be used again
    SPARES = 32          # how many may wait

cdef struct Mapping:
    char* at
    size_t size

# all of it is only touched with the GIL held
cdef Py_ssize_t _held = 0
cdef Mapping _spares[SPARES]     # the oldest first
cdef int _n_spares = 0
cdef size_t _spare_bytes = 0


def held_bytes() -> int:
    """Memory of all parts that are alive."""
    return _held


def trim():
    """Gives back the memory that waits to be used again."""
    while _n_spares:
        drop_spare(0)


cdef void forget_spare(int i) noexcept:
    global _n_spares, _spare_bytes
    _spare_bytes -= _spares[i].size
    _n_spares -= 1
    memmove(&_spares[i], &_spares[i + 1], (_n_spares - i) * sizeof(Mapping))


cdef void drop_spare(int i) noexcept:
    munmap(_spares[i].at, _spares[i].size)
    forget_spare(i)


cdef Mapping take_mapping(size_t n) noexcept:
    """A mapping of at least `n` bytes, used before if one is at most twice as large; NULL without memory."""
    cdef Mapping found
    cdef void* made
    cdef int i, best = -1
    n = (n + STEP - 1) & ~<size_t>(STEP - 1)
    for i in range(_n_spares):
        if n <= _spares[i].size <= 2 * n and (best < 0 or _spares[i].size < _spares[best].size):
            best = i
    if best >= 0:
        found = _spares[best]
        forget_spare(best)
        return found
    made = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    found.at = <char*>(NULL if made == MAP_FAILED else made)
    found.size = n
    return found


cdef void give_mapping(char* at, size_t size) noexcept:
    global _n_spares, _spare_bytes
    if size > SPARE:
        munmap(at, size)
        return
    while _n_spares == SPARES or (_n_spares and _spare_bytes + size > SPARE):
        drop_spare(0)
    _spares[_n_spares].at = at
    _spares[_n_spares].size = size
    _n_spares += 1
    _spare_bytes += size


cdef class FilePart:
    """Bytes that were read from a file. A buffer that its owner may write to."""

    def __dealloc__(self):
        global _held
        if self.ptr == NULL:
            return
        _held -= self.nbytes
        if self.mapped:
            give_mapping(self.ptr, self.mapped)
        else:
            free(self.ptr)

    cdef int allocate(self, size_t n) except -1:
        global _held
        cdef Mapping mapping
        if n < LARGE:
            self.ptr = <char*>aligned_alloc(ALIGNMENT, (n + ALIGNMENT) & ~<size_t>(ALIGNMENT - 1))
        else:
            mapping = take_mapping(n)
            self.ptr = mapping.at
            self.mapped = mapping.size
        if self.ptr == NULL:
            raise MemoryError(f"no memory for {n} bytes")
        self.nbytes = n
        _held += n
        return 0

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.ptr, self.nbytes, 0, flags)


cdef ssize_t read_all(int fd, int64_t offset, char* to, Py_ssize_t n) noexcept nogil:
    """Bytes that were read, fewer than `n` where the file ends; -1 and errno."""
    cdef Py_ssize_t have = 0
    cdef ssize_t got
    while have < n:
        got = pread(fd, to + have, n - have, offset + have)
        if got == 0:
            break
        if got > 0:
            have += got
        elif errno != EINTR:
            return -1
    return have


cdef ssize_t write_all(int fd, int64_t offset, const char* data, Py_ssize_t n) noexcept nogil:
    cdef Py_ssize_t done = 0
    cdef ssize_t got
    while done < n:
        got = pwrite(fd, data + done, n - done, offset + done)
        if got >= 0:
            done += got
        elif errno != EINTR:
            return -1
    return done


def read(int fd, int64_t offset, Py_ssize_t nbytes):
    """A FilePart of `nbytes` from `offset` on; None when the file ends before. Raises OSError, MemoryError."""
    cdef FilePart part = FilePart.__new__(FilePart)
    cdef ssize_t have
    if nbytes < 0 or offset < 0:
        raise ValueError(f"{nbytes} bytes at {offset}")
    part.allocate(nbytes)
    if nbytes <= KEEP_GIL:
        have = read_all(fd, offset, part.ptr, nbytes)
    else:
        with nogil:
            have = read_all(fd, offset, part.ptr, nbytes)
    if have < 0:
        raise OSError(errno, os.strerror(errno))
    return part if have == nbytes else None


def write(int fd, int64_t offset, data not None):
    """Writes a buffer's bytes from `offset` on. Raises OSError."""
    cdef Py_buffer view
    cdef ssize_t done
    if offset < 0:
        raise ValueError(f"at {offset}")
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if view.len <= KEEP_GIL:
            done = write_all(fd, offset, <const char*>view.buf, view.len)
        else:
            with nogil:
                done = write_all(fd, offset, <const char*>view.buf, view.len)
        if done < 0:
            raise OSError(errno, os.strerror(errno))
    finally:
        PyBuffer_Release(&view)
