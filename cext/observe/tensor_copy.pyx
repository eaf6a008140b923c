"""The elements of a traced tensor as they were at one moment.

The problem: the memory of a tensor is its request's, a model's or another process's, and a trace has to show what it held when
the request came. Copying dozens of megabytes at that moment would stop the loop for milliseconds. The choice: a TensorCopy
first only refers to its tensor, which keeps the memory where it is. Whoever comes first calls make(): the loop itself where
there is little to copy, the copier's thread (observe.tensor_copier), or the writer of traces, which needs the elements.

Rules:
 1. Nobody writes to the memory of a request's inputs but the Python model that gets them. A batch for one begins when the
    copies are made (execution.traced_inputs). Nobody writes to a response's outputs.
 2. Once the elements are copied, the tensor is let go: its memory may be another process's, which waits for it.
 3. Large copies release the GIL, and offer the core between two portions.
 4. Thousands of them wait for the writer, or to be shown as recent traces. So they are nothing that the garbage collector
    looks at, and have a lock only until they are made. No cycle lives longer than that.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.string cimport memcpy

from neptrio.request.sched cimport sched_yield
from neptrio.request.infer_request cimport GPU_MEMORY, Tensor

from threading import Lock

cdef enum:
    WITHOUT_GIL = 32768     # bytes; giving up the GIL takes longer than copying fewer
    PORTION = 262144        # bytes that are copied until the core is offered: 0.05 ms


cdef void copy_portions(char* target, const char* source, Py_ssize_t size) noexcept nogil:
    cdef Py_ssize_t at = 0
    while size - at > PORTION:
        memcpy(target + at, source + at, PORTION)
        sched_yield()
        at += PORTION
    memcpy(target + at, source + at, size - at)


@cython.no_gc
cdef class TensorCopy:
    """Up to `limit` bytes of a tensor, once make() was called."""

    def __init__(self, Tensor tensor not None, Py_ssize_t limit):
        self.name = tensor.name
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.nbytes = tensor.nbytes
        self.size = min(tensor.nbytes, limit)
        self.address = tensor.ptr
        if tensor.memory_kind == GPU_MEMORY:  # copying it to the host would stop the loop
            self.size = 0
            self.omitted = "the tensor is in GPU memory"
        else:
            self.tensor = tensor
            self.lock = Lock()

    @property
    def made(self) -> bool:
        """Whether the tensor is no longer needed."""
        return self.tensor is None

    def make(self):
        """Copies, unless that was done; waits for another thread that does."""
        cdef Tensor tensor
        cdef bytes raw
        cdef char* target
        lock = self.lock
        if lock is None:
            return
        with lock:
            tensor = self.tensor
            if tensor is None:
                return
            try:
                raw = PyBytes_FromStringAndSize(NULL, self.size)
                target = PyBytes_AS_STRING(raw)
                if self.size >= WITHOUT_GIL:
                    with nogil:
                        copy_portions(target, tensor.ptr, self.size)
                elif self.size:  # the pointer of an empty tensor may be NULL
                    memcpy(target, tensor.ptr, self.size)
                self.raw = raw
            except MemoryError:
                self.omitted = "there was no memory for it"
            self.tensor = self.lock = None

    def omit(self, str why not None):
        """Lets the tensor go without a copy, unless there is one, or somebody is about to make it. Does not wait."""
        lock = self.lock
        if lock is None or not lock.acquire(False):
            return
        if self.tensor is not None:
            self.omitted = why
            self.tensor = self.lock = None
        lock.release()

    cdef bint same(self, Tensor tensor):
        """Whether this is a copy of that tensor, unless somebody has written to it since."""
        return (self.address == tensor.ptr and self.nbytes == tensor.nbytes and self.dtype == tensor.dtype
                and self.shape == tensor.shape)
