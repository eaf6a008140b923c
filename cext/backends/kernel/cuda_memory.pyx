# distutils: language = c++
"""Memory on a GPU and for it: a pool per device, blocks of it that tensors own, page-locked outputs.

The problem: device memory is used by work that runs later, in streams, and is given back by Python
objects that die at any time, on any thread, perhaps after the context that it belonged to. The choice:
a block is given back only when the host has seen the work end that used it, so that any stream will
do for the freeing, and everything asks its pool whether the context still exists.

Rules:
 1. A DeviceBlock is allocated in its producer's stream (launch_run) and freed in the pool's side
    stream. Whoever reads or writes it keeps it alive until an event after that work was waited for.
 2. `broken` is set once, by whoever meets a sticky error, and never cleared. Nothing of a broken pool
    is given to the driver again: the reset of the context frees it.
 3. The driver is called without the GIL only under `alive` for reading. A reset takes it for writing, so
    it waits for calls under way; none comes later, by rule 2.
 4. Outputs arrive in ordinary memory that is registered with the driver: a context that is reset
    takes the registration with it and leaves the memory to the responses that are being sent.
 5. A pool is closed once nothing of it is in use; `on_idle` tells when.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset

cimport cuda.bindings.cydriver as cu
cimport cython

from neptrio.backends.kernel.cuda_error cimport check, sticky
from neptrio.backends.kernel.plan cimport Block, new_block

from neptrio.backends.kernel.cuda_error import error_name

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

cdef enum:
    PAGE = 4096


cdef size_t rounded(size_t n) noexcept nogil:
    """Sizes that are asked for: powers of two from 64 KiB to 64 MiB, then multiples of that."""
    cdef size_t size = 65536
    if n > (<size_t>1 << 26):
        return (n + (<size_t>1 << 26) - 1) & ~((<size_t>1 << 26) - 1)
    while size < n:
        size *= 2
    return size


# ---------------------------------------------------------------- device memory

cdef class DevicePool:
    """A GPU's memory pool and the stream beside all others. Handles are the caller's."""

    def __cinit__(self):
        memset(&self.c, 0, sizeof(Memory))
        pthread_rwlock_init(&self.c.alive, NULL)

    def __init__(self, uintptr_t context, uintptr_t pool, int ordinal):
        self.c.context = <cu.CUcontext>context
        self.c.pool = <cu.CUmemoryPool>pool
        self.ordinal = ordinal
        check(cu.cuStreamCreate(&self.c.side, 1), "creating a stream")  # non-blocking

    def __dealloc__(self):
        pthread_rwlock_destroy(&self.c.alive)

    @property
    def broken(self) -> str:
        """The error that made the context unusable, '' while it is fine."""
        return error_name(self.c.broken) if self.c.broken else ""

    def abandon(self, int code=709):
        """Nothing of this pool is used from now on: its context is about to be reset."""
        if not self.c.broken:
            self.c.broken = code
        with nogil:  # until the calls under way have returned
            pthread_rwlock_wrlock(&self.c.alive)
            pthread_rwlock_unlock(&self.c.alive)

    def close(self):
        """Gives the side stream back. No block may be left."""
        cdef cu.CUcontext old
        if self.closed or self.c.broken:
            return
        self.closed = True
        if cu.cuCtxPushCurrent(self.c.context) == 0:
            cu.cuStreamSynchronize(self.c.side)
            cu.cuStreamDestroy(self.c.side)
            cu.cuCtxPopCurrent(&old)

    def fetch(self, uintptr_t address, size_t nbytes):
        """A host copy of device memory as a block. Raises Internal with the CUDA error's name."""
        cdef Block block = new_block(nbytes)
        cdef int r
        with nogil:
            r = self.copy_(NULL, 0, block.ptr, <cu.CUdeviceptr>address, nbytes)
        check(r, "copying a tensor to the host")
        return block

    def store(self, uintptr_t address, source):
        """Copies a buffer to device memory. Raises Internal."""
        cdef Py_buffer view
        cdef int r
        PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
        try:
            if view.len == 0:
                return
            with nogil:
                r = self.copy_(<const char*>view.buf, <cu.CUdeviceptr>address, NULL, 0, view.len)
            check(r, "copying a tensor to the device")
        finally:
            PyBuffer_Release(&view)

    def copy(self, uintptr_t to, uintptr_t source, size_t nbytes):
        """Copies within the device. Raises Internal."""
        cdef int r
        with nogil:
            r = self.copy_(NULL, <cu.CUdeviceptr>to, NULL, <cu.CUdeviceptr>source, nbytes)
        check(r, "copying a tensor on the device")

    def wait_default_stream(self):
        """Waits for what other libraries have queued in the default stream. Raises Internal."""
        cdef cu.CUcontext old
        cdef int r
        with nogil:
            r = cu.cuCtxPushCurrent(self.c.context)
            if r == 0:
                r = cu.cuStreamSynchronize(<cu.CUstream><uintptr_t>1)  # CU_STREAM_LEGACY
                cu.cuCtxPopCurrent(&old)
        check(r, "waiting for the default stream")

    cdef int copy_(self, const char* from_host, cu.CUdeviceptr to, char* to_host, cu.CUdeviceptr source,
                   size_t nbytes) noexcept nogil:
        cdef Memory* m = &self.c
        cdef cu.CUcontext old
        cdef int r
        if nbytes == 0:
            return 0
        pthread_rwlock_rdlock(&m.alive)
        r = m.broken
        if r == 0:
            r = cu.cuCtxPushCurrent(m.context)
            if r == 0:
                if from_host != NULL:
                    r = cu.cuMemcpyHtoDAsync(to, from_host, nbytes, m.side)
                elif to_host != NULL:
                    r = cu.cuMemcpyDtoHAsync(to_host, source, nbytes, m.side)
                else:
                    r = cu.cuMemcpyDtoDAsync(to, source, nbytes, m.side)
                if r == 0:
                    r = cu.cuStreamSynchronize(m.side)
                cu.cuCtxPopCurrent(&old)
            if sticky(r):
                m.broken = r
        pthread_rwlock_unlock(&m.alive)
        return r


@cython.no_gc_clear  # its pool must be there when it is freed
cdef class DeviceBlock:
    """Device memory that a tensor keeps alive; `address` is set by the batch that allocates it."""

    @property
    def device_pool(self):
        """The pool that it belongs to."""
        return self.pool

    def __dealloc__(self):
        cdef cu.CUcontext old
        cdef DevicePool pool = self.pool
        if pool is None:
            return
        if self.address and not pool.c.broken and cu.cuCtxPushCurrent(pool.c.context) == 0:
            cu.cuMemFreeAsync(self.address, pool.c.side)
            cu.cuCtxPopCurrent(&old)
        pool.blocks -= 1
        if pool.blocks == 0 and pool.on_idle is not None:
            pool.on_idle()


cdef DeviceBlock new_device_block(DevicePool pool, size_t nbytes):
    cdef DeviceBlock block = DeviceBlock.__new__(DeviceBlock)
    block.pool = pool
    block.nbytes = nbytes
    pool.blocks += 1
    return block


# ---------------------------------------------------------------- page-locked output blocks

@cython.no_gc_clear  # blocks that the collector frees later come back to it
cdef class PinnedPool:
    """Page-locked host memory for outputs, in powers of two, up to `limit` bytes.

    Past the limit, or when the driver refuses, outputs go to ordinary memory: slower, correct.
    """

    def __init__(self, DevicePool device not None, size_t limit):
        self.device = device
        self.limit = limit
        self.idle = {}

    cdef Block take(self, size_t nbytes):
        cdef size_t size = rounded(nbytes)
        cdef PinnedBlock block
        cdef char* pointer = NULL
        cdef cu.CUcontext old
        cdef int r
        cdef list idle = self.idle.get(size)
        if idle:
            pointer = <char*><uintptr_t>idle.pop()
        elif self.total + size <= self.limit and not self.closed and not self.device.c.broken:
            pointer = <char*>aligned_alloc(PAGE, size)
            if pointer != NULL:
                with nogil:
                    r = cu.cuCtxPushCurrent(self.device.c.context)
                    if r == 0:
                        r = cu.cuMemHostRegister(pointer, size, 1)  # portable
                        cu.cuCtxPopCurrent(&old)
                if r:
                    free(pointer)
                    pointer = NULL
                else:
                    self.total += size
        if pointer == NULL:
            return new_block(nbytes)
        block = PinnedBlock.__new__(PinnedBlock)
        block.ptr = pointer
        block.nbytes = nbytes
        block.size = size
        block.pool = self
        self.used += size
        return block

    cdef object give(self, char* pointer, size_t size):
        self.used -= size
        self.idle.setdefault(size, []).append(<uintptr_t>pointer)
        if self.closed or self.device.c.broken:
            self.drop()
        if self.used == 0 and self.on_idle is not None:
            self.on_idle()

    cdef object drop(self):
        cdef uintptr_t pointer
        cdef cu.CUcontext old
        for size, idle in self.idle.items():
            for pointer in idle:
                if not self.device.c.broken and cu.cuCtxPushCurrent(self.device.c.context) == 0:
                    cu.cuMemHostUnregister(<void*>pointer)
                    cu.cuCtxPopCurrent(&old)
                free(<void*>pointer)
                self.total -= <size_t>size
            idle.clear()

    def close(self):
        """Frees what is idle now and what comes back later."""
        self.closed = True
        self.drop()


@cython.no_gc_clear  # its pool must be there when it is freed
cdef class PinnedBlock(Block):
    cdef PinnedPool pool
    cdef size_t size

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.give(self.ptr, self.size)
            self.ptr = NULL  # Block would free it
