# Memory of a GPU: the device's pool, and blocks of it that tensors own.
from libc.stdint cimport int64_t, uint64_t
cimport cuda.bindings.cydriver as cu

cdef struct Memory:             # what threads without the GIL use of a device
    cu.CUcontext context
    cu.CUmemoryPool pool
    int ordinal                 # the GPU's number
    uint64_t peers              # GPUs that were given access to the pool, as bits
    cu.CUstream side            # for copies and frees that no instance's stream does
    int broken                  # the error that ended the context, 0 while it works; never cleared
    int doubts                  # how many calls in a row had an error that may pass

cdef int enter(Memory* memory, cu.CUstreamCaptureMode* before) noexcept nogil
cdef void leave(cu.CUstreamCaptureMode before) noexcept nogil
cdef int judged(Memory* memory, int code) noexcept nogil
cdef int wait_stream(Memory* memory, cu.CUstream stream, double seconds) noexcept nogil
cdef void nap(int64_t nanoseconds) noexcept nogil
cdef int allocate(Memory* memory, cu.CUdeviceptr* address, size_t size, cu.CUstream stream) noexcept nogil
cdef void give_access(Memory* memory, int device) noexcept nogil

cdef class DevicePool:
    cdef Memory c
    cdef readonly int ordinal
    cdef readonly int64_t blocks    # how many DeviceBlocks exist
    cdef public object on_idle      # called when the last of them is gone  # type: Callable[[], object] | None
    cdef public double patience     # seconds that close() waits for the device
    cdef public object post         # has the device's thread call it  # type: Callable[[Callable[[], object]], None] | None
    cdef public object ask          # does so and waits for the result  # type: Callable[[Callable[[], Any]], Any] | None
    cdef list freed                 # addresses of blocks that are gone, for the device's thread
    cdef list outlived              # page-locked memory of queues that were closed, for free_pinned()
    cdef bint closed
    cdef int copy_(self, const char* from_host, cu.CUdeviceptr to, char* to_host, cu.CUdeviceptr source,
                   size_t nbytes) noexcept nogil

cdef class DeviceBlock:
    cdef DevicePool pool
    cdef readonly cu.CUdeviceptr address     # 0 until a batch has allocated the memory  # type: int
    cdef readonly size_t nbytes

cdef DeviceBlock new_device_block(DevicePool pool, size_t nbytes)

cdef size_t rounded(size_t n) noexcept nogil
