# The resources of one instance on a GPU: streams, events, functions, and two slots for alternating batches.
from libc.stdint cimport int64_t, uint64_t
cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_memory cimport DevicePool, Memory, PinnedPool
from neptrio.backends.kernel.plan cimport Plan

cdef enum:
    GRAPHS = 64

cdef struct Graph:              # a plan's kernels recorded as one launch (cuda_graph)
    uint64_t plan
    uint64_t generation
    int uses
    cu.CUgraphExec executable

cdef struct Slot:
    char* pinned                # buffer for staging inputs
    size_t pinned_size
    cu.CUdeviceptr work         # inputs and scratch buffers
    size_t work_size
    cu.CUdeviceptr out
    size_t out_size
    cu.CUevent begin
    cu.CUevent staged
    cu.CUevent started
    cu.CUevent ran
    cu.CUevent done
    # increases when its memory is replaced: graphs of older generations have other addresses
    uint64_t generation
    Graph graphs[GRAPHS]

cdef struct Queue:
    Memory* memory
    cu.CUstream compute
    cu.CUstream copy
    cu.CUfunction* functions
    int n_functions
    bint busy_wait
    bint use_graphs
    Slot slots[2]
    int next
    int64_t graph_launches
    int64_t staged_ahead
    int64_t grown               # how often memory was allocated, so that a change is noticed
    size_t device_bytes
    size_t pinned_bytes

cdef int ensure(Queue* q, Slot* s, Plan* plan) noexcept nogil

cdef class DeviceQueue:
    cdef Queue c
    cdef readonly DevicePool pool
    cdef readonly PinnedPool pinned
    cdef object owner
    cdef int64_t told               # the value of `grown` at the last report
    cdef object make(self, unsigned int flags)
    cdef void give_back(self) noexcept nogil
