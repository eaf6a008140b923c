# Kernel models on the host: each instance's private copy of a compiled object, and batches that run it without the
# GIL.
from libc.stdint cimport int64_t, uintptr_t
from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.plan cimport Plan

ctypedef int (*kernel_entry)(void** arguments, const unsigned int* grid, const unsigned int* block) noexcept nogil

cdef struct Image:
    kernel_entry* entries
    char* work               # gathered inputs and scratch buffers of the running batch; grows, never shrinks
    size_t work_size
    uintptr_t low            # the code of the compiled object
    uintptr_t high

cdef class HostImage:
    cdef void* handle
    cdef int n_entries
    cdef Image c
    cdef readonly str path
    cdef list order          # names of kernels, as plans number them

cdef struct Piece:           # one request's part of one input
    int slot
    const char* source
    size_t nbytes

cdef struct Run:             # requests with equal shapes, usually the whole batch
    Plan* plan
    int n_pieces
    int first_piece
    bint gather
    char* output
    int first_request
    int n_requests
    int status               # 0, or why it has failed; `failed` is the number of the kernel then
    int failed

cdef struct HostWork:
    Image* image
    Run* runs
    int n_runs
    Piece* pieces
    int n_pieces
    void** slots             # a tensor's address for each slot, filled while executing
    void** arguments
    int64_t times[4]

cdef class KernelBatch(Batch):
    cdef HostImage image
    cdef list plans          # KernelPlan of each run
    cdef list blocks         # output Block of each run
    cdef HostWork c
    cdef object fail(self, Run* run)
