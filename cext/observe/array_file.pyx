"""A JSON array on disk that grows and is complete at every moment, also after `kill -9`.

The problem: replacing the bracket at an array's end by more text is not one step (a killed write may end at any page),
and rewriting the whole file for every addition costs its whole size each time. The choice: two files alternate. The
spare file, which no reader sees, gets what it lacks, copied from the other one, and then the new text; then the two
exchange names in one step. So every text is written twice, whatever the file's size, and none is kept in memory. Where
files cannot exchange names (NFS), a hard link keeps the old file as the next spare; where there are no links either,
the array is copied each time.

An addition is one call without the GIL, not a dozen calls that give it up and take it back: each time the writer's
thread took the GIL, the loop would have to wait until that thread gave it up again.

Rules:
 1. From the first addition on, the file at `path` is a complete array.
 2. A reader that keeps the file open may see the addition after the next in it; what it has read is never changed.
 3. A file that somebody has moved, removed or changed is left alone: a new array begins at `path`.
 4. rest() removes the spare file; the next addition copies the array once.
 5. sweep() removes spare files left by servers that are gone.
"""
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_GET_SIZE
from libc.errno cimport EINTR, errno
from libc.stdint cimport int64_t
from libc.stdlib cimport free, malloc

import glob
import os

from neptrio.observe.file_sink cimport Sink, flush_sink, open_sink, put_text
from neptrio.observe.trace_block cimport Records, TraceBlock, write_text

cdef extern from *:
    """
    #include <fcntl.h>
    #include <stdio.h>
    #include <sys/stat.h>
    #include <sys/syscall.h>
    #include <unistd.h>

    /* glibc before 2.28 and musl have no function for it; 2 is RENAME_EXCHANGE */
    static int exchange_files(const char* one, const char* other) {
    #ifdef SYS_renameat2
        return (int)syscall(SYS_renameat2, AT_FDCWD, one, AT_FDCWD, other, 2);
    #else
        return -1;
    #endif
    }
    """
    struct stat_t "stat":
        unsigned long st_ino
        int64_t st_size
    int c_stat "stat"(const char* path, stat_t* found) nogil
    int fstat(int fd, stat_t* found) nogil
    int c_open "open"(const char* path, int flags, int mode) nogil
    int c_close "close"(int fd) nogil
    int c_link "link"(const char* old, const char* new) nogil
    int c_unlink "unlink"(const char* path) nogil
    int c_rename "rename"(const char* old, const char* new) nogil
    int exchange_files(const char* one, const char* other) nogil
    int64_t lseek(int fd, int64_t offset, int whence) nogil
    ssize_t pread(int fd, void* data, size_t n, int64_t offset) nogil
    int O_RDONLY, O_RDWR, O_CREAT, O_TRUNC, O_CLOEXEC, SEEK_SET

cdef enum:
    END_BYTES = 3           # "\n]\n"
    COPY_BYTES = 65536
    NO_MEMORY = -1          # distinct from the values of errno
    SHORTER = -2

cdef struct Piece:
    const char* text        # NULL: take `records` instead
    Py_ssize_t size
    bint goes_on            # an object has begun in the piece before it
    Records* records


cdef class ArrayFile:
    """One growing array. One thread at a time."""

    cdef readonly str path
    cdef public bint exchange       # files can exchange names; False after the system refused it
    cdef tuple names                # owns the next three strings
    cdef const char* shown_path
    cdef const char* spare
    cdef const char* second         # a name needed while two files change names
    cdef unsigned long inode        # of the file at `path`
    cdef int64_t shown              # size of that file, 0: the array has not begun
    cdef int64_t spare_size         # size of the spare file, 0: there is none

    def __init__(self, str path):
        self.path = path
        self.exchange = True
        encoded = os.fsencode(path)
        spare = b"%s.%d.tmp" % (encoded, os.getpid())
        self.names = encoded, spare, spare + b"2"
        self.shown_path, self.spare, self.second = self.names

    def append(self, *pieces):
        # type: (TraceBlock | bytes | tuple[bytes, ...]) -> None
        """Adds objects. A piece is a TraceBlock, or bytes with objects joined by commas, or a tuple of bytes that are such
        objects one after the other.

        Raises OSError and then leaves the array as it was.
        """
        cdef Py_ssize_t n = 0, many = sum([len(piece) if isinstance(piece, tuple) else 1 for piece in pieces])
        cdef int failed
        cdef bint goes_on
        cdef Piece* made = <Piece*>malloc(max(1, many) * sizeof(Piece))
        if made == NULL:
            raise MemoryError()
        try:
            for piece in pieces:  # the caller's tuple keeps the pieces alive
                if isinstance(piece, TraceBlock):
                    made[n].text = NULL
                    made[n].goes_on = False
                    made[n].records = &(<TraceBlock>piece).records
                    n += 1
                    continue
                goes_on = False
                for text in piece if isinstance(piece, tuple) else (piece,):
                    made[n].text = PyBytes_AS_STRING(<bytes?>text)
                    made[n].size = PyBytes_GET_SIZE(text)
                    made[n].goes_on = goes_on
                    made[n].records = NULL
                    goes_on = True
                    n += 1
            with nogil:  # file systems may be slow
                failed = self.grow(made, n)
        finally:
            free(made)
        if failed == NO_MEMORY:
            raise MemoryError()
        if failed == SHORTER:
            raise OSError(f"{self.path} became shorter while it was read")
        if failed:
            raise OSError(failed, os.strerror(failed), self.path)

    cdef int grow(self, Piece* pieces, Py_ssize_t n) noexcept nogil:
        """Adds the pieces. Returns 0, or the number of the error."""
        cdef stat_t there
        cdef int failed, fd
        if self.shown and (
            c_stat(self.shown_path, &there) != 0 or there.st_ino != self.inode or there.st_size != self.shown
        ):
            self.forget()
            self.shown = 0
        fd = c_open(self.spare, O_RDWR | O_CREAT | O_CLOEXEC | (0 if self.spare_size else O_TRUNC), 0o600)
        if fd < 0:
            failed = errno
        else:
            failed = self.fill(fd, pieces, n)
            if not failed and fstat(fd, &there) != 0:
                failed = errno
            if c_close(fd) != 0 and not failed:
                failed = errno
        if not failed:
            failed = self.change_places()
        if failed:
            self.forget()
            c_unlink(self.spare)
            return failed
        self.inode = there.st_ino
        self.shown = there.st_size
        return 0

    cdef int fill(self, int fd, Piece* pieces, Py_ssize_t n) noexcept nogil:
        """Copies into the spare file what it lacks."""
        cdef int64_t start = self.spare_size - END_BYTES if self.spare_size else 0
        cdef Py_ssize_t i
        cdef int failed = 0
        cdef Sink sink
        open_sink(&sink, fd)
        if lseek(fd, start, SEEK_SET) < 0:
            return errno
        if self.shown:
            failed = copy(self.shown_path, &sink, start, self.shown - END_BYTES)
        for i in range(n):
            if not pieces[i].goes_on:
                put_text(&sink, b",\n" if self.shown or i else b"[\n", 2)
            if pieces[i].text != NULL:
                put_text(&sink, pieces[i].text, pieces[i].size)
            elif not failed:
                failed = write_text(pieces[i].records, &sink)
        put_text(&sink, b"\n]\n", END_BYTES)
        return failed if failed else flush_sink(&sink)

    cdef int change_places(self) noexcept nogil:
        """Puts the spare file in place of the visible one, which becomes the spare one if possible."""
        cdef bint linked
        if self.shown and self.exchange:
            if exchange_files(self.spare, self.shown_path) == 0:
                self.spare_size = self.shown
                return 0
            self.exchange = False
        linked = self.shown and c_link(self.shown_path, self.second) == 0
        if c_rename(self.spare, self.shown_path) != 0:
            if linked:
                c_unlink(self.second)
            return errno
        self.spare_size = 0
        if linked and c_rename(self.second, self.spare) == 0:
            self.spare_size = self.shown
        return 0

    cdef void forget(self) noexcept nogil:
        if self.spare_size:
            self.spare_size = 0
            c_unlink(self.spare)

    def rest(self):
        """Removes the spare file, when nothing more is expected soon."""
        with nogil:
            self.forget()

    def take_over(self, ArrayFile other):
        """Appends the contents of another array and removes that one."""
        other.rest()
        with open(other.path, "rb") as source:
            content = source.read()
        self.append(content[2:-END_BYTES])
        os.unlink(other.path)


cdef int copy(const char* path, Sink* sink, int64_t at, int64_t end) noexcept nogil:
    """Copies the bytes from `at` to `end` of a file."""
    cdef char* block
    cdef ssize_t n
    cdef int failed = 0, source
    if at >= end:
        return 0
    source = c_open(path, O_RDONLY | O_CLOEXEC, 0)
    if source < 0:
        return errno
    block = <char*>malloc(COPY_BYTES)
    if block == NULL:
        failed = NO_MEMORY
    while at < end and not failed:
        n = pread(source, block, COPY_BYTES if end - at > COPY_BYTES else end - at, at)
        if n > 0:
            put_text(sink, block, n)
            failed = flush_sink(sink)  # the next part will lie where this one does
            at += n
        elif n == 0:
            failed = SHORTER
        elif errno != EINTR:
            failed = errno
    free(block)
    c_close(source)
    return failed


def sweep(str path):
    """Removes spare files that servers which are gone left beside the array at `path` and its numbered ones."""
    for found in glob.glob(glob.escape(path) + ".*.tmp*"):
        owner = found.rpartition(".tmp")[0].rpartition(".")[2]
        if owner.isdigit() and int(owner) != os.getpid() and not os.path.exists(f"/proc/{owner}"):
            try:
                os.unlink(found)
            except OSError:
                pass
