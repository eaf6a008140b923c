# A batch that runs on a GPU: what it reads, launches and writes, as C arrays that the instance's thread works through
# without the GIL.
from libc.stdint cimport int64_t
cimport cuda.bindings.cydriver as cu

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.cuda_memory cimport Memory
from neptrio.backends.kernel.cuda_pinned cimport Pin
from neptrio.backends.kernel.cuda_queue cimport DeviceQueue, Graph, Queue, Slot
from neptrio.backends.kernel.plan cimport Plan
from neptrio.loop.mailbox cimport Work

cdef struct DevicePiece:        # one request's part of one input
    int slot
    bint on_device
    bint in_place               # kernels read it where it is
    Memory* peer                # the memory of another GPU that it is on, NULL: of this one
    Pin* pin                    # the page-locked block that it was received into, or NULL
    const char* source
    size_t offset               # in the part of the work block for inputs
    size_t nbytes

cdef struct Export:             # one request's part of one output, and where it goes
    cu.CUdeviceptr target       # device memory; 0: the page-locked block
    # where to store the address of memory allocated for it, which the response keeps; or NULL
    cu.CUdeviceptr* kept
    bint direct                 # kernels write there directly
    int slot
    size_t offset               # in the output block
    size_t nbytes

cdef struct DeviceRun:          # requests with equal shapes, usually the whole batch
    Plan* plan
    int first_piece
    int n_pieces
    int first_export
    int n_exports               # 0: the whole output block is copied to `output`
    bint gather
    bint own_memory             # kernels use addresses that only this batch has, so no graph is used
    char* output
    Pin* pin                    # the page-locked block that `output` points to, NULL: ordinary memory
    bint small                  # the outputs arrive in the slot, from where they are copied to `output`
    bint late                   # the outputs on the host are copied when the kernels have ended
    bint timed                  # its times are measured
    bint apart                  # it is copied in and out in streams of their own
    Graph* graph                # the recorded whole of it: copies in, launches, copies out; or NULL
    int64_t launched
    int slot
    bint begun                  # it has a slot
    int piece                   # how far it is staged: the next piece, how much of that was gathered in the slot,
    size_t within
    size_t gathered             # where that ends there,
    size_t sent                 # and up to where it was sent to the device

cdef struct DeviceWork:
    Queue* queue
    void* mailbox
    DeviceWork* following       # the batch that was taken out of the mailbox after this one, or NULL
    DeviceRun* runs
    int n_runs
    int launched                # so many runs were launched,
    int finished                # and so many have ended
    DevicePiece* pieces
    int n_pieces
    Export* exports
    int n_exports
    cu.CUdeviceptr* addresses
    bint begun
    bint late                   # it took longer than it may
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
    cdef list kept              # (Tensor, DeviceBlock) pairs whose address is known after the batch has run
    cdef list inputs            # tensors in device memory
    cdef DeviceWork c

cdef int advance_run(DeviceWork* w, DeviceRun* run) noexcept nogil
cdef void find_addresses(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil
cdef int kernels(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil
cdef int copy_late(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil
cdef int fence(Queue* q, Slot* s) noexcept nogil
