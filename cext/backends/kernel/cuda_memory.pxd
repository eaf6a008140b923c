# Memory of a GPU: the device's pool, blocks of it that tensors own, and page-locked host memory for outputs.
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

cdef struct Memory:             # what threads without the GIL use of a device
    cu.CUcontext context
    cu.CUmemoryPool pool
    cu.CUstream side            # for copies and frees that no instance's stream does
    pthread_rwlock_t alive      # held for reading while the driver is called, for writing while the context is reset
    int broken                  # the error that ended the context, 0 while it works

cdef class DevicePool:
    cdef Memory c
    cdef readonly int ordinal
    cdef readonly int64_t blocks    # how many DeviceBlocks exist
    cdef public object on_idle      # called when the last of them is gone, or None
    cdef bint closed
    cdef int copy_(self, const char* from_host, cu.CUdeviceptr to, char* to_host, cu.CUdeviceptr source,
                   size_t nbytes) noexcept nogil

cdef class DeviceBlock:
    cdef DevicePool pool
    cdef cu.CUdeviceptr address     # 0 until a batch has allocated the memory
    cdef readonly size_t nbytes

cdef DeviceBlock new_device_block(DevicePool pool, size_t nbytes)

cdef class PinnedPool:
    cdef DevicePool device
    cdef public size_t limit        # lowering it frees nothing
    cdef readonly size_t total
    cdef readonly size_t used
    cdef public object on_idle      # called when the last block has come back, or None
    cdef dict idle                  # size -> [address]
    cdef bint closed
    cdef Block take(self, size_t nbytes)
    cdef object give(self, char* pointer, size_t size)
    cdef object drop(self)

cdef size_t rounded(size_t n) noexcept nogil
