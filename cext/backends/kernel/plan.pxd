# A plan: what one execution of a kernel model does for one set of input shapes, as C arrays that an instance's thread
# reads without the GIL. Made on the trio thread, not changed afterwards except for measured times, and kept alive by every
# batch that uses it.
#   Slots number the tensors: first inputs, then outputs, then scratch buffers.
from libc.stdint cimport int64_t, uint64_t

cdef struct KernelArgument:
    int slot              # >= 0: the address of the tensor in that slot; -1: the scalar in `value`
    uint64_t value

cdef struct KernelLaunch:
    int kernel            # index into the instance's functions
    unsigned int grid[3]
    unsigned int block[3]
    unsigned int shared   # bytes of dynamic shared memory
    bint cooperative      # all blocks run at once, and may wait for each other
    unsigned int cluster[3]  # blocks of a cluster along each axis; 0: the source says, or there are none
    int first             # index of the first argument
    int count

cdef struct PlanTensor:
    size_t nbytes
    size_t offset         # outputs: in the output block; inputs and scratch: in the work block
    bint zero
    bint copied           # an input that a kernel may write to: it gets a copy of its own

cdef struct Plan:
    uint64_t id           # never used again, unlike an address
    int n_inputs
    int n_outputs
    int n_scratch
    int n_slots
    PlanTensor* tensors
    KernelLaunch* launches
    int n_launches
    KernelArgument* arguments
    int n_arguments
    size_t output_bytes   # of all outputs, each aligned
    size_t input_bytes    # of all inputs, each aligned
    size_t work_bytes     # of inputs and scratch buffers
    uint64_t runs         # on a GPU: executions so far, how long their ends were waited for, and the last measured times
    double wait_ns
    double input_ms
    double infer_ms
    double output_ms

cdef class KernelPlan:
    cdef Plan c
    cdef readonly int64_t batch
    cdef readonly list names  # type: list[str]
    cdef readonly list dtypes  # type: list[int]
    cdef readonly list shapes  # type: list[tuple[int, ...]]
    cdef public double mean_ns          # measured execution time, 0 = not run yet
    cdef public object graphs           # graphs recorded by the GPU code
    cdef int layout(self) except -1
    cdef KernelArgument* _argument(self) except NULL

cdef class Block:
    cdef char* ptr
    cdef readonly size_t nbytes

cdef Block new_block(size_t nbytes)

# The end of the run that begins with request `start`: neighbours with equal shapes, apart from their rows, execute
# together. `keys` has each request's input shapes, None for a refused one; `rows` is set to the sum of their rows.
cdef Py_ssize_t run_end(list requests, list keys, Py_ssize_t start, bint batching, int64_t* rows) except -1
