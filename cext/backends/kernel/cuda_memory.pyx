# distutils: language = c++
"""Memory of a GPU: a pool per device, and blocks of it that tensors own. Page-locked host memory: cuda_pinned.

The problem: device memory is used by work that runs later, in streams; but it is freed by Python objects that die at
any time, on any thread, perhaps after their context is gone. The choice: a block is freed only after the host has
waited for the end of the work that used it, so it may be freed in any stream; and every call first checks in the pool
whether the context still exists.

Rules:
 1. A DeviceBlock is allocated in the stream of the work that fills it (launch_run) and freed in the pool's side
    stream. Whoever reads or writes it keeps it alive until an event after that work was waited for.
 2. `broken` is set once, by whoever meets an error that ends the context, and never cleared. Memory of a broken pool
    is never passed to the driver, and host memory that the device may still write to is never used again.
 3. The driver is called without the GIL, and never on the trio thread: blocks die there, so their addresses are noted
    and the device's own thread (driver_thread.py) frees them; copies that the trio thread needs are made there too.
 4. No wait is for ever: streams are asked whether they are done (wait_stream), with naps between.
 5. A pool is closed when nothing of it is in use; `on_idle` is called then. A stream is destroyed only when its work
    has ended.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memset
from libc.time cimport time_t

cimport cuda.bindings.cydriver as cu
cimport cython

from trio.lowlevel import in_trio_run

from neptrio.backends.kernel.cuda_error cimport check, doubtful, sticky
from neptrio.backends.kernel.expected_end cimport nap_after
from neptrio.backends.kernel.plan cimport Block, new_block
from neptrio.request.infer_request cimport now_ns

from neptrio.backends.kernel.cuda_error import error_name

cdef extern from "<time.h>" nogil:
    cdef struct timespec:
        time_t tv_sec
        long tv_nsec
    int nanosleep(const timespec*, timespec*)

cdef enum:
    PATIENCE = 30           # seconds that copies and closing wait for a device before they give it up


cdef size_t rounded(size_t n) noexcept nogil:
    """The sizes in which memory is allocated: powers of two from 64 KiB to 64 MiB, then multiples of 64 MiB."""
    cdef size_t size = 65536
    if n > (<size_t>1 << 26):
        return (n + (<size_t>1 << 26) - 1) & ~((<size_t>1 << 26) - 1)
    while size < n:
        size *= 2
    return size


cdef class DevicePool:
    """A GPU's memory pool, and the pool's side stream. The caller owns the handles."""

    def __cinit__(self):
        memset(&self.c, 0, sizeof(Memory))
        self.freed = []
        self.outlived = []
        self.patience = PATIENCE

    def __init__(self, uintptr_t context, uintptr_t pool, int ordinal):
        self.c.context = <cu.CUcontext>context
        self.c.pool = <cu.CUmemoryPool>pool
        self.ordinal = ordinal
        self.c.ordinal = ordinal
        cdef int r
        with nogil:
            r = cu.cuStreamCreate(&self.c.side, 1)  # non-blocking
        check(r, "creating a stream")

    @property
    def broken(self) -> str:
        """The name of the error that made the context unusable, "" while it works."""
        return error_name(self.c.broken) if self.c.broken else ""

    def give_up(self, int code):
        """Nothing of this pool is used from now on: its context has ended with that error."""
        if not self.c.broken:
            self.c.broken = code

    def told(self, int code) -> bool:
        """Another library got this error of the driver; True if the context has ended with it. Any thread."""
        if not self.c.broken:
            judged(&self.c, code)
        return self.c.broken != 0

    def free(self):
        """Gives the memory of blocks that are gone back to the pool. On the device's thread."""
        cdef list freed = self.freed
        cdef cu.CUdeviceptr address
        cdef cu.CUstreamCaptureMode mode
        cdef int r
        self.freed = []
        for number in freed:
            address = number
            if self.c.broken:
                return
            with nogil:
                r = enter(&self.c, &mode)
                if r == 0:
                    r = cu.cuMemFreeAsync(address, self.c.side)
                    leave(mode)
                judged(&self.c, r)

    def free_pinned(self):
        """Frees the page-locked memory of queues that were closed. It may wait for all that runs on the device."""
        cdef list outlived = self.outlived
        cdef cu.CUstreamCaptureMode mode
        cdef uintptr_t pointer
        cdef int r
        self.outlived = []
        for number in outlived:
            pointer = number
            if self.c.broken:
                return
            with nogil:
                r = enter(&self.c, &mode)
                if r == 0:
                    r = cu.cuMemFreeHost(<void*>pointer)
                    leave(mode)
                judged(&self.c, r)

    def trim(self):
        """Gives memory that the pool holds unused back to the device. Not on the trio thread."""
        cdef cu.CUstreamCaptureMode mode
        if self.closed or self.c.broken:
            return
        with nogil:
            if enter(&self.c, &mode) == 0:
                if wait_stream(&self.c, self.c.side, 1.0) == 0:  # frees under way
                    cu.cuMemPoolTrimTo(self.c.pool, 0)
                leave(mode)

    def close(self):
        """Destroys the side stream, after its work. When that does not end in time, the context is given up: what is
        under way may still use the memory. No block may be left. On the device's thread."""
        cdef cu.CUstreamCaptureMode mode
        cdef double seconds = self.patience
        cdef int r
        self.free()
        if self.closed or self.c.broken:
            return
        self.closed = True
        with nogil:
            r = enter(&self.c, &mode)
            if r == 0:
                r = wait_stream(&self.c, self.c.side, seconds)
                if r == 0:
                    cu.cuStreamDestroy(self.c.side)
                leave(mode)
            if r and not self.c.broken:
                self.c.broken = r

    def fetch(self, uintptr_t address, size_t nbytes):
        # type: (..., ...) -> Block
        """Copies device memory to the host; returns a Block. Raises Internal with the CUDA error's name."""
        if self.ask is not None and in_trio_run():
            return self.ask(lambda: self._fetch(address, nbytes))
        return self._fetch(address, nbytes)

    def _fetch(self, uintptr_t address, size_t nbytes):
        cdef Block block = new_block(nbytes)
        cdef int r
        with nogil:
            r = self.copy_(NULL, 0, block.ptr, <cu.CUdeviceptr>address, nbytes)
        check(r, "copying a tensor to the host")
        return block

    def store(self, uintptr_t address, source):
        # type: (..., Buffer) -> None
        """Copies a buffer to device memory. Raises Internal."""
        if self.ask is not None and in_trio_run():
            self.ask(lambda: self._store(address, source))
        else:
            self._store(address, source)

    def _store(self, uintptr_t address, source):
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
        if self.ask is not None and in_trio_run():
            self.ask(lambda: self._copy(to, source, nbytes))
        else:
            self._copy(to, source, nbytes)

    def _copy(self, uintptr_t to, uintptr_t source, size_t nbytes):
        cdef int r
        with nogil:
            r = self.copy_(NULL, <cu.CUdeviceptr>to, NULL, <cu.CUdeviceptr>source, nbytes)
        check(r, "copying a tensor on the device")

    def block(self, size_t nbytes):
        # type: (...) -> DeviceBlock
        """A DeviceBlock with memory for `nbytes`, not cleared. Not on the trio thread. Raises Internal."""
        cdef DeviceBlock made = new_device_block(self, nbytes)
        cdef cu.CUstreamCaptureMode mode
        cdef int r = self.c.broken
        with nogil:
            if r == 0:
                r = enter(&self.c, &mode)
                if r == 0:
                    r = allocate(&self.c, &made.address, nbytes if nbytes else 1, self.c.side)
                    if r == 0:
                        r = wait_stream(&self.c, self.c.side, PATIENCE)
                    leave(mode)
                judged(&self.c, r)
        check(r, "allocating memory on the device")
        return made

    def wait_default_stream(self):
        """Waits for the work that other libraries have queued in the default stream. Raises Internal."""
        cdef cu.CUstreamCaptureMode mode
        cdef int r
        with nogil:
            r = enter(&self.c, &mode)
            if r == 0:
                r = wait_stream(&self.c, <cu.CUstream><uintptr_t>1, PATIENCE)  # CU_STREAM_LEGACY
                leave(mode)
            judged(&self.c, r)
        check(r, "waiting for the default stream")

    cdef int copy_(self, const char* from_host, cu.CUdeviceptr to, char* to_host, cu.CUdeviceptr source,
                   size_t nbytes) noexcept nogil:
        cdef Memory* m = &self.c
        cdef cu.CUstreamCaptureMode mode
        cdef int r
        if nbytes == 0:
            return 0
        r = m.broken
        if r == 0:
            r = enter(m, &mode)
            if r == 0:
                if from_host != NULL:
                    r = cu.cuMemcpyHtoDAsync(to, from_host, nbytes, m.side)
                elif to_host != NULL:
                    r = cu.cuMemcpyDtoHAsync(to_host, source, nbytes, m.side)
                else:
                    r = cu.cuMemcpyDtoDAsync(to, source, nbytes, m.side)
                if r == 0:
                    r = wait_stream(m, m.side, PATIENCE)
                leave(mode)
            judged(m, r)
        return r


cdef int enter(Memory* memory, cu.CUstreamCaptureMode* before) noexcept nogil:
    """Makes the context current on a thread that may be anybody's, until leave(). Returns a CUresult.

    Until then the thread takes no notice of graphs that others record. Libraries in the process (torch, ONNX Runtime) do
    so in a mode in which the driver refuses many calls of every other thread, a mere query of an event among them, and
    gives up their recording for it. Nothing here touches their streams.
    """
    cdef int r
    before[0] = cu.CU_STREAM_CAPTURE_MODE_RELAXED
    r = cu.cuThreadExchangeStreamCaptureMode(before)
    if r:
        return r
    r = cu.cuCtxPushCurrent(memory.context)
    if r:
        cu.cuThreadExchangeStreamCaptureMode(before)
    return r


cdef void leave(cu.CUstreamCaptureMode before) noexcept nogil:
    """Ends what enter() began; `before` is what it told."""
    cdef cu.CUcontext old
    cu.cuCtxPopCurrent(&old)
    cu.cuThreadExchangeStreamCaptureMode(&before)


cdef int judged(Memory* memory, int code) noexcept nogil:
    """Notes what an error of the driver says about the context; returns the error."""
    if code == 0:
        memory.doubts = 0
    elif sticky(code):
        memory.broken = code
    elif doubtful(code):
        memory.doubts += 1
        if memory.doubts > 1:
            memory.broken = code
    return code


cdef int allocate(Memory* memory, cu.CUdeviceptr* address, size_t size, cu.CUstream stream) noexcept nogil:
    """Takes memory from the pool in a stream. Returns a CUresult; out of memory only after the pool gave back to the
    device what it held unused, and other pools could not help."""
    cdef int r = cu.cuMemAllocFromPoolAsync(address, size, memory.pool, stream)
    if r == cu.CUDA_ERROR_OUT_OF_MEMORY:
        wait_stream(memory, memory.side, 1.0)  # memory whose free is under way does not count as unused
        cu.cuMemPoolTrimTo(memory.pool, 0)
        r = cu.cuMemAllocFromPoolAsync(address, size, memory.pool, stream)
    if r:
        address[0] = 0
    return r


cdef void give_access(Memory* memory, int device) noexcept nogil:
    """Lets another GPU reach this pool's memory; where the machine cannot do that, the driver copies over the host."""
    cdef cu.CUmemAccessDesc access
    if memory.ordinal == device or memory.peers >> device & 1:
        return
    memset(&access, 0, sizeof(access))
    access.location.type = cu.CU_MEM_LOCATION_TYPE_DEVICE
    access.location.id = device
    access.flags = cu.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    cu.cuMemPoolSetAccess(memory.pool, &access, 1)
    memory.peers |= <uint64_t>1 << device


cdef void nap(int64_t nanoseconds) noexcept nogil:
    cdef timespec t
    t.tv_sec = nanoseconds // 1000000000
    t.tv_nsec = nanoseconds % 1000000000
    nanosleep(&t, NULL)


cdef int wait_stream(Memory* memory, cu.CUstream stream, double seconds) noexcept nogil:
    """Waits until a stream's work is done. Returns a CUresult; after `seconds`, or when another thread has met the end
    of the context, CUDA_ERROR_LAUNCH_TIMEOUT or that error: the work may go on, so its memory must not be used."""
    cdef int64_t start = now_ns(), waited, pause
    cdef int r
    while True:
        r = cu.cuStreamQuery(stream)
        if r != cu.CUDA_ERROR_NOT_READY:
            return r
        if memory.broken:
            return memory.broken
        waited = now_ns() - start
        if waited > <int64_t>(seconds * 1e9):
            return cu.CUDA_ERROR_LAUNCH_TIMEOUT
        pause = nap_after(waited)
        if pause:
            nap(pause)


@cython.no_gc_clear  # the pool must still exist when a block is freed
cdef class DeviceBlock:
    """Device memory kept alive by a tensor; `address` is set by the batch that allocates it."""

    @property
    def device_pool(self):
        # type: () -> DevicePool
        """The pool it belongs to."""
        return self.pool

    def __dealloc__(self):
        cdef DevicePool pool = self.pool
        if pool is None:
            return
        if self.address and not pool.c.broken:
            pool.freed.append(<uintptr_t>self.address)
            if len(pool.freed) == 1 and pool.post is not None:
                pool.post(pool.free)
        pool.blocks -= 1
        if pool.blocks == 0 and pool.on_idle is not None:
            pool.on_idle()


cdef DeviceBlock new_device_block(DevicePool pool, size_t nbytes):
    cdef DeviceBlock block = DeviceBlock.__new__(DeviceBlock)
    block.pool = pool
    block.nbytes = nbytes
    pool.blocks += 1
    return block
