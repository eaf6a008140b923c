# Memory on and for a GPU: the device's pool, blocks of it that tensors own, page-locked outputs.
from libc.stdint cimport int64_t
cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.plan cimport Block

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_rwlock_t:
        pass
    int pthread_rwlock_init(pthread_rwlock_t*, void*)
    int pthread_rwlock_destroy(pthread_rwlock_t*)
    int pthread_rwlock_rdlock(pthread_rwlock_t*)
    int pthread_rwlock_wrlock(pthread_rwlock_t*)
    int pthread_rwlock_unlock(pthread_rwlock_t*)

cdef struct Memory:             # what threads without the GIL need of a device
    cu.CUcontext context
    cu.CUmemoryPool pool
    cu.CUstream side            # copies and frees beside the instances' streams
    pthread_rwlock_t alive      # read: the driver is being called; write: the context is being reset
    int broken                  # the sticky error that ended the context, 0 while it is fine

cdef class DevicePool:
    cdef Memory c
    cdef readonly int ordinal
    cdef readonly int64_t blocks    # DeviceBlocks that exist
    cdef public object on_idle      # called when the last of them goes, or None
    cdef bint closed
    cdef int copy_(self, const char* from_host, cu.CUdeviceptr to, char* to_host, cu.CUdeviceptr source,
                   size_t nbytes) noexcept nogil

cdef class DeviceBlock:
    cdef DevicePool pool
    cdef cu.CUdeviceptr address     # 0 until a batch has taken the memory
    cdef readonly size_t nbytes

cdef DeviceBlock new_device_block(DevicePool pool, size_t nbytes)

cdef class PinnedPool:
    cdef DevicePool device
    cdef public size_t limit        # lowering it frees nothing
    cdef readonly size_t total
    cdef readonly size_t used
    cdef public object on_idle      # called when the last block comes back, or None
    cdef dict idle                  # size -> [address]
    cdef bint closed
    cdef Block take(self, size_t nbytes)
    cdef object give(self, char* pointer, size_t size)
    cdef object drop(self)

cdef size_t rounded(size_t n) noexcept nogil
