# The resources of one instance on a GPU: streams, events, functions, and the slots of the runs under way.
from libc.stdint cimport int64_t, uint64_t
cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_memory cimport DevicePool, Memory
from neptrio.backends.kernel.cuda_pinned cimport PinnedPool
from neptrio.backends.kernel.plan cimport Plan

cdef enum:
    SLOTS = 3                   # so many runs may be under way: one computes while others are copied in and out
    GRAPHS = 64
    SMALL_BLOCK = 65536         # bytes; so much is copied by the host sooner than a block is locked for it

cdef struct Graph:              # a plan's kernels recorded as one launch (cuda_graph)
    uint64_t plan
    uint64_t generation
    int uses
    int failures
    cu.CUgraphExec executable

cdef struct Slot:
    char* pinned                # buffer for staging inputs, and behind them the outputs of small batches
    size_t pinned_size
    char** outgrown             # smaller ones that it had before
    int n_outgrown
    cu.CUdeviceptr work         # inputs and scratch buffers
    size_t work_size
    cu.CUdeviceptr out
    size_t out_size
    cu.CUevent ready            # the inputs are on the device
    cu.CUevent computed         # the kernels have ended
    cu.CUevent done             # all of the run has: the host waits for it
    cu.CUevent begin            # from here on for times only
    cu.CUevent staged
    cu.CUevent started
    cu.CUevent ran
    cu.CUevent ended
    # increases when its memory is replaced: graphs of older generations have other addresses
    uint64_t generation
    Graph graphs[GRAPHS]

cdef struct Queue:
    Memory* memory
    cu.CUstream compute
    cu.CUstream inward          # copies to the device
    cu.CUstream outward         # copies from it
    cu.CUstream last            # copies to ordinary memory, of runs whose kernels have ended
    cu.CUfunction* functions
    int n_functions
    bint busy_wait
    int64_t limit_ns            # how long an execution may take, 0: no limit
    bint use_graphs
    Slot slots[SLOTS]
    int next
    int under_way               # runs that have a slot
    int64_t finished            # when the last of them ended
    bint asleep                 # nobody has asked for the one that is awaited since it was slept through
    int64_t graph_launches
    int64_t launched_ahead      # runs that were launched while an earlier one was under way
    int64_t grown               # how often memory was allocated, so that a change is noticed
    size_t device_bytes
    size_t pinned_bytes

cdef int ensure(Queue* q, Slot* s, Plan* plan, bint small, cu.CUstream stream) noexcept nogil

cdef class DeviceQueue:
    cdef Queue c
    cdef readonly DevicePool pool
    cdef readonly PinnedPool pinned
    cdef object owner
    cdef int64_t told               # the value of `grown` at the last report
    cdef object make(self)
    cdef int create(self) noexcept nogil
    cdef bint give_back(self) noexcept nogil
    cdef object leave_pinned(self)
