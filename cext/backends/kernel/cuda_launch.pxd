# A batch on its way through a GPU: what it reads, runs and writes, as C arrays that the instance's
# thread follows without the GIL.
from libc.stdint cimport int64_t
cimport cuda.bindings.cydriver as cu

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.cuda_queue cimport DeviceQueue, Queue, Slot
from neptrio.backends.kernel.plan cimport Plan
from neptrio.loop.mailbox cimport Work

cdef struct DevicePiece:        # one request's part of one input
    int slot
    bint on_device
    bint in_place               # the kernels read it where it lies
    cu.CUcontext peer           # of another GPU that it lies on, NULL: this one's
    const char* source
    size_t offset               # in the input part of the work block
    size_t nbytes

cdef struct Export:             # one request's part of one output, to where it is wanted
    cu.CUdeviceptr target       # device memory; 0: the pinned block
    cu.CUdeviceptr* kept        # memory that the batch allocates for it and the response keeps, or NULL
    bint direct                 # the kernels write there themselves
    int slot
    size_t offset               # in the output block
    size_t nbytes

cdef struct DeviceRun:          # requests of equal shapes: usually the whole batch
    Plan* plan
    int first_piece
    int n_pieces
    int first_export
    int n_exports               # 0: the whole output block goes to `output`
    bint gather
    bint own_memory             # kernels use addresses that only this batch has: no graph
    char* output
    int slot

cdef struct DeviceWork:
    Queue* queue
    void* mailbox
    DeviceRun* runs
    int n_runs
    DevicePiece* pieces
    int n_pieces
    Export* exports
    int n_exports
    cu.CUdeviceptr* addresses
    bint staged
    int status
    const char* doing
    int64_t times[4]
    double input_ms
    double infer_ms
    double output_ms

cdef class DeviceBatch(Batch):
    cdef DeviceQueue queue
    cdef object mailbox
    cdef object host            # the DeviceInstance: broke(name), memory_changed()
    cdef list plans
    cdef list blocks
    cdef list kept              # (Tensor, DeviceBlock) whose address is known once the batch has run
    cdef list inputs            # tensors in device memory
    cdef DeviceWork c

cdef void run_device(Work* work) noexcept nogil
cdef int stage(DeviceWork* w, DeviceRun* run) noexcept nogil
cdef int kernels(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil
cdef int launch_run(DeviceWork* w, DeviceRun* run) noexcept nogil
cdef int finish(DeviceWork* w, DeviceRun* run) noexcept nogil
