# distutils: language = c++
"""Memory of a GPU: a pool per device, blocks of it that tensors own, and page-locked host memory for outputs.

The problem: device memory is used by work that runs later, in streams; but it is freed by Python objects that die at
any time, on any thread, perhaps after their context is gone. The choice: a block is freed only after the host has
waited for the end of the work that used it, so it may be freed in any stream; and every call first checks in the pool
whether the context still exists.

Rules:
 1. A DeviceBlock is allocated in the stream of the work that fills it (launch_run) and freed in the pool's side
    stream. Whoever reads or writes it keeps it alive until an event after that work was waited for.
 2. `broken` is set once, by whoever meets an error that ends the context, and never cleared. Memory of a broken pool
    is never passed to the driver: resetting the context frees it.
 3. The driver is called without the GIL only with `alive` held for reading. A reset takes it for writing, so it waits
    for calls under way; by rule 2 there are none later.
 4. Outputs arrive in ordinary memory that is registered with the driver. Resetting the context ends the registration,
    but leaves the memory to the responses that are being sent.
 5. A pool is closed when nothing of it is in use; `on_idle` is called then.
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
    """The sizes in which memory is allocated: powers of two from 64 KiB to 64 MiB, then multiples of 64 MiB."""
    cdef size_t size = 65536
    if n > (<size_t>1 << 26):
        return (n + (<size_t>1 << 26) - 1) & ~((<size_t>1 << 26) - 1)
    while size < n:
        size *= 2
    return size


# ---------------------------------------------------------------- device memory

cdef class DevicePool:
    """A GPU's memory pool, and the pool's side stream. The caller owns the handles."""

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
        """The name of the error that made the context unusable, "" while it works."""
        return error_name(self.c.broken) if self.c.broken else ""

    def abandon(self, int code=709):
        """From now on nothing of this pool is used: its context is about to be reset."""
        if not self.c.broken:
            self.c.broken = code
        with nogil:  # waits for calls of the driver that are under way
            pthread_rwlock_wrlock(&self.c.alive)
            pthread_rwlock_unlock(&self.c.alive)

    def close(self):
        """Destroys the side stream. No block may be left."""
        cdef cu.CUcontext old
        if self.closed or self.c.broken:
            return
        self.closed = True
        if cu.cuCtxPushCurrent(self.c.context) == 0:
            cu.cuStreamSynchronize(self.c.side)
            cu.cuStreamDestroy(self.c.side)
            cu.cuCtxPopCurrent(&old)

    def fetch(self, uintptr_t address, size_t nbytes):
        """Copies device memory to the host; returns a Block. Raises Internal with the CUDA error's name."""
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
        """Copies between two places on the device. Raises Internal."""
        cdef int r
        with nogil:
            r = self.copy_(NULL, <cu.CUdeviceptr>to, NULL, <cu.CUdeviceptr>source, nbytes)
        check(r, "copying a tensor on the device")

    def wait_default_stream(self):
        """Waits for the work that other libraries have queued in the default stream. Raises Internal."""
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


@cython.no_gc_clear  # the pool must still exist when a block is freed
cdef class DeviceBlock:
    """Device memory kept alive by a tensor; `address` is set by the batch that allocates it."""

    @property
    def device_pool(self):
        """The pool it belongs to."""
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

@cython.no_gc_clear  # blocks that the collector frees later return to this pool
cdef class PinnedPool:
    """Page-locked host memory for outputs, in powers of two, up to `limit` bytes.

    Beyond the limit, or when the driver refuses more, outputs go to ordinary memory, which is slower.
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
        """Frees the blocks that are unused, and later each block that comes back."""
        self.closed = True
        self.drop()


@cython.no_gc_clear  # the pool must still exist when a block is freed
cdef class PinnedBlock(Block):
    cdef PinnedPool pool
    cdef size_t size

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.give(self.ptr, self.size)
            self.ptr = NULL  # or Block would free it
