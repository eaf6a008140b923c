"""Reads and writes parts of files that other processes may change at any moment, by copying.

The problem: a mapped file may be shortened by anyone who may write to it, and whoever then touches a missing page is
ended by SIGBUS; so is whoever writes to a hole while the file system is full. Checking first does not help, because
the file may change afterwards. The choice: such files are not mapped. The kernel copies, and reports what it could not
copy. That costs one more copy of inputs and none of outputs. And what was read cannot change while it is used: a
length that was checked stays the same.

Rules:
 1. A FilePart is complete: read() returns all bytes it was asked for, or None.
 2. LargeFiles.held counts the memory of all living parts of a server, so that it can limit it.
 3. The GIL is kept during small copies, which take less time than switching threads.
 4. The memory of large parts is reused, because getting new pages from the system takes several times as long as the
    copy. At most SPARE bytes are kept for that; trim() frees them. Old contents are never visible, by rule 1.
"""
from cpython.buffer cimport PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer, PyBUF_SIMPLE
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free
from libc.string cimport memmove

import os

cimport cython

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

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
    KEEP_GIL = 65536     # bytes; copying fewer takes less time than switching threads
    ALIGNMENT = 64       # in bytes, of a part's memory
    LARGE = 256 << 10    # bytes; parts of at least this size get a mapping of their own
    STEP = 256 << 10     # bytes; sizes of mappings are multiples of this
    SPARE = 64 << 20     # most bytes of mappings kept for reuse
    SPARES = 32          # most mappings kept for reuse

cdef struct Mapping:
    char* at
    size_t size

# these are used only with the GIL held
cdef Mapping _spares[SPARES]     # oldest first
cdef int _n_spares = 0
cdef size_t _spare_bytes = 0


def trim():
    """Frees the memory that is kept for reuse."""
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
    """A mapping of at least `n` bytes: a kept one if it is at most twice as large. NULL when there is no memory."""
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


cdef class LargeFiles:
    """Says whether it is worth looking for large parts in a request, so that others do not pay for it."""

    def __cinit__(self):
        self.least = PY_SSIZE_T_MAX


@cython.no_gc   # it refers to numbers alone
cdef class FilePart:
    """Bytes read from a file. A buffer that its owner may write to."""

    def __dealloc__(self):
        if self.ptr == NULL:
            return
        if self.files is not None:
            self.files.held -= self.nbytes
        if self.mapped:
            give_mapping(self.ptr, self.mapped)
        else:
            free(self.ptr)

    cdef int allocate(self, size_t n, LargeFiles files) except -1:
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
        if files is not None:
            self.files = files
            files.held += n
        return 0

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.ptr, self.nbytes, 0, flags)


cdef ssize_t read_all(int fd, int64_t offset, char* to, Py_ssize_t n) noexcept nogil:
    """Reads up to `n` bytes; returns how many, fewer where the file ends, or -1 with errno set."""
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


def read(int fd, int64_t offset, Py_ssize_t nbytes, LargeFiles files=None):
    # type: (..., ..., ..., ...) -> FilePart | None
    """A FilePart with the `nbytes` from `offset` on, which `files` counts; None when the file ends earlier. Raises OSError,
    MemoryError."""
    cdef FilePart part = FilePart.__new__(FilePart)
    cdef ssize_t have
    if nbytes < 0 or offset < 0:
        raise ValueError(f"{nbytes} bytes at {offset}")
    part.allocate(nbytes, files)
    if nbytes <= KEEP_GIL:
        have = read_all(fd, offset, part.ptr, nbytes)
    else:
        with nogil:
            have = read_all(fd, offset, part.ptr, nbytes)
    if have < 0:
        raise OSError(errno, os.strerror(errno))
    return part if have == nbytes else None


def write(int fd, int64_t offset, data not None):
    # type: (..., ..., Buffer) -> bool
    """Writes a buffer's bytes at `offset`. Raises OSError."""
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
