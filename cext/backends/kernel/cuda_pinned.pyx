# distutils: language = c++
"""Page-locked host memory: outputs are copied into it, and large inputs received.

Rules:
 1. Output blocks are locked by the instance's thread that first uses them, others on the device's own thread: the driver is
    never called on the trio thread.
 2. Memory that a broken device may still write to is never used again.
"""
from cpython.buffer cimport PyBuffer_FillInfo
from libc.stdint cimport uintptr_t
from libc.stdlib cimport free

cimport cuda.bindings.cydriver as cu
cimport cython

from neptrio.backends.kernel.cuda_memory cimport DevicePool, Memory, enter, judged, leave, rounded
from neptrio.backends.kernel.plan cimport Block, new_block

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

cdef enum:
    PAGE = 4096


@cython.no_gc_clear  # blocks that the collector frees later return to this pool
cdef class PinnedPool:
    """Page-locked host memory for outputs, in powers of two, up to `limit` bytes.

    Beyond the limit, or when the driver refuses more, outputs go to ordinary memory, which is slower.
    """

    def __init__(self, DevicePool device not None, size_t limit):
        self.device = device
        self.limit = limit
        self.idle = {}
        self.lent = {}

    cdef Block take(self, size_t nbytes):
        """A block for outputs. The driver is not called: pin() locks it, on the instance's thread."""
        cdef size_t size = rounded(nbytes)
        cdef PinnedBlock block
        cdef char* pointer = NULL
        cdef int state = PINNED
        cdef list idle = self.idle.get(size)
        if idle:
            pointer = <char*><uintptr_t>idle.pop()
        elif self.total + size <= self.limit and not self.closed and not self.device.c.broken:
            pointer = <char*>aligned_alloc(PAGE, size)
            if pointer != NULL:
                self.total += size
                state = PIN_NEW
        if pointer == NULL:
            return new_block(nbytes)
        block = PinnedBlock.__new__(PinnedBlock)
        block.ptr = pointer
        block.nbytes = nbytes
        block.pin.ptr = pointer
        block.pin.size = size
        block.pin.state = state
        block.pool = self
        self.used += size
        return block

    def lend(self, size_t nbytes):
        # type: (...) -> PinnedBlock | None
        """A writable block into which an input can be received; None when half of the limit is lent, or there is no
        room. It is locked by the device's own thread, meanwhile."""
        cdef PinnedBlock block
        cdef size_t size = rounded(nbytes)
        if (self.lent_bytes + size) * 2 > self.limit or self.closed or self.device.post is None:
            return None
        found = self.take(nbytes)
        if type(found) is not PinnedBlock:
            return None
        block = found
        block.lent = True
        self.lent_bytes += size
        self.lent[<uintptr_t>block.ptr] = <uintptr_t>&block.pin
        if block.pin.state == PIN_NEW:
            self.device.post(block.lock)
        return block

    cdef Pin* holding(self, const char* data, size_t nbytes):
        """The block that was lent and in which these bytes lie, or NULL."""
        cdef Pin* found
        for number in self.lent.values():
            found = <Pin*><uintptr_t>number
            if found.ptr <= data and data + nbytes <= found.ptr + found.size:
                return found
        return NULL

    cdef object give(self, PinnedBlock owner):
        cdef Pin* block = &owner.pin
        if owner.lent:
            del self.lent[<uintptr_t>block.ptr]
            self.lent_bytes -= block.size
        self.used -= block.size
        if block.state == PINNED:
            if not self.device.c.broken:  # or the device may still write there
                self.idle.setdefault(block.size, []).append(<uintptr_t>block.ptr)
        else:
            self.total -= block.size
            free(block.ptr)
        if self.used == 0 and self.on_idle is not None:
            self.on_idle()

    def drop(self):
        """Unlocks and frees the blocks that are unused. Not on the trio thread."""
        cdef uintptr_t pointer
        cdef cu.CUstreamCaptureMode mode
        cdef int r
        taken, self.idle = self.idle, {}
        for size, idle in taken.items():
            for number in idle:
                pointer = number
                if self.device.c.broken:
                    return
                with nogil:
                    r = enter(&self.device.c, &mode)
                    if r == 0:
                        r = cu.cuMemHostUnregister(<void*>pointer)
                        leave(mode)
                    judged(&self.device.c, r)
                if r == 0:
                    free(<void*>pointer)
                self.total -= <size_t>size

    def close(self):
        """Frees the blocks. None may be in use. On the device's thread."""
        self.closed = True
        self.drop()


cdef int pin(Pin* block) noexcept nogil:
    """Has the driver lock a new block, in the current context. It may refuse: then it stays ordinary memory."""
    cdef int r
    if block.state == PIN_NEW:
        r = cu.cuMemHostRegister(block.ptr, block.size, 1)  # portable
        block.state = PINNED if r == 0 else PIN_REFUSED
        return r
    return 0


@cython.no_gc_clear  # the pool must still exist when a block is freed
cdef class PinnedBlock(Block):
    """A block of a PinnedPool, writable as a buffer."""

    def lock(self):
        """Has the driver lock the block. On the device's thread."""
        cdef cu.CUstreamCaptureMode mode
        cdef Memory* m = &self.pool.device.c
        if m.broken or self.pool.closed:
            return
        with nogil:
            if enter(m, &mode) == 0:
                judged(m, pin(&self.pin))
                leave(mode)

    def __len__(self):
        return self.nbytes

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.ptr, self.nbytes, False, flags)

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.give(self)
            self.ptr = NULL  # or Block would free it
