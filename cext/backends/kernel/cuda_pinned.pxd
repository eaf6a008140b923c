# Page-locked host memory, which a GPU reads and writes while the host does something else.
cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_memory cimport DevicePool
from neptrio.backends.kernel.plan cimport Block

cdef struct Pin:                # host memory for outputs
    char* ptr
    size_t size
    int state                   # one of the states below

cdef enum:
    PIN_NEW                     # the driver does not know it yet
    PINNED
    PIN_REFUSED                 # the driver would not lock it: it is ordinary memory

cdef int pin(Pin* block) noexcept nogil

cdef class PinnedBlock

cdef class PinnedPool:
    cdef DevicePool device
    cdef public size_t limit        # lowering it frees nothing
    cdef readonly size_t total
    cdef readonly size_t used
    cdef public object on_idle      # called when the last block has come back  # type: Callable[[], object] | None
    cdef dict idle                  # size -> [address] of locked memory
    cdef dict lent                  # address -> address of the Pin, of blocks into which inputs are received
    cdef readonly size_t lent_bytes
    cdef bint closed
    cdef Block take(self, size_t nbytes)
    cdef Pin* holding(self, const char* data, size_t nbytes)
    cdef object give(self, PinnedBlock owner)

cdef class PinnedBlock(Block):
    cdef PinnedPool pool
    cdef Pin pin
    cdef bint lent
