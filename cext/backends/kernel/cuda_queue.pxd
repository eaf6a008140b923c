# The resources of one instance on a GPU: streams, events, functions, and two slots for alternating batches.
from libc.stdint cimport int64_t, uint64_t
cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_memory cimport DevicePool, Memory, PinnedPool
from neptrio.backends.kernel.plan cimport Plan

cdef enum:
    GRAPHS = 64
    OUTGROWN = 16
    SMALL_BLOCK = 65536         # bytes; so much is copied by the host sooner than a block is locked for it

cdef struct Graph:              # a plan's kernels recorded as one launch (cuda_graph)
    uint64_t plan
    uint64_t generation
    int uses
    cu.CUgraphExec executable

cdef struct Slot:
    char* pinned                # buffer for staging inputs, and behind them the outputs of small batches
    size_t pinned_size
    char* outgrown[OUTGROWN]    # smaller ones that it had before
    int n_outgrown
    cu.CUdeviceptr work         # inputs and scratch buffers
    size_t work_size
    cu.CUdeviceptr out
    size_t out_size
    cu.CUevent begin
    cu.CUevent staged
    cu.CUevent started
    cu.CUevent ran
    cu.CUevent done             # the host waits for it, so it has no times
    cu.CUevent timed            # the same moment, where times are measured
    cu.CUevent grown
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
    int64_t limit_ns            # how long an execution may take, 0: no limit
    bint use_graphs
    Slot slots[2]
    int next
    int64_t graph_launches
    int64_t staged_ahead
    int64_t grown               # how often memory was allocated, so that a change is noticed
    size_t device_bytes
    size_t pinned_bytes

cdef int ensure(Queue* q, Slot* s, Plan* plan, bint small) noexcept nogil

cdef class DeviceQueue:
    cdef Queue c
    cdef readonly DevicePool pool
    cdef readonly PinnedPool pinned
    cdef object owner
    cdef int64_t told               # the value of `grown` at the last report
    cdef object make(self)
    cdef int create(self) noexcept nogil
    cdef void give_back(self) noexcept nogil
