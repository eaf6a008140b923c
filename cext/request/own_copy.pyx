"""Copies a tensor into memory that only its reader has, in steps.

The problem: a copy of a hundred megabytes takes tens of milliseconds, too long for the loop, and Python's own ways to copy
keep the GIL meanwhile. The choice: a copy is an object with step(), which any thread may call, one at a time; it copies
STEP bytes without the GIL. The memory is that of request.file_part, which is reused and counted as long as it lives.

Rules:
 1. What is read is read once, so what a reader of the copy checks stays as it was.
 2. The source's owner is held until the copy is dropped.
"""
from libc.string cimport memcpy

from neptrio.request.file_part cimport FilePart, LargeFiles
from neptrio.request.infer_request cimport GPU_MEMORY, Tensor

cdef enum:
    STEP = 8 << 20  # bytes; a few milliseconds


cdef class OwnCopy:
    """A copy of a tensor in host memory that is being made."""

    cdef Tensor _source
    cdef FilePart _part
    cdef Py_ssize_t _done

    def __init__(self, Tensor source not None, LargeFiles files=None):
        """`files` counts its memory, from now on. Raises MemoryError."""
        if source.memory_kind == GPU_MEMORY:
            raise ValueError(f"tensor '{source.name}' lies in GPU memory")
        cdef FilePart part = FilePart.__new__(FilePart)
        part.allocate(source.nbytes, files)
        self._source = source
        self._part = part

    def step(self) -> bool:
        """Copies the next part; True when all is copied."""
        cdef Py_ssize_t at = self._done
        cdef Py_ssize_t size = min(<Py_ssize_t>STEP, self._source.nbytes - at)
        cdef char* target = self._part.ptr
        cdef const char* source = self._source.ptr
        if size > 0:
            with nogil:
                memcpy(target + at, source + at, size)
            self._done = at + size
        return self._done == self._source.nbytes

    def tensor(self) -> Tensor:
        """The copy, once step() has returned True."""
        if self._done < self._source.nbytes:
            raise RuntimeError("not copied yet")
        return Tensor(self._source.name, self._source.dtype, self._source.shape, self._part, True)
