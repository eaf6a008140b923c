"""Plans of kernel models: geometry, arguments and memory layout for one set of input shapes.

A plan is made once per distinct set of shapes (backends.kernel.model_spec evaluates the expressions) and is then only read,
by any thread, without the GIL. Offsets are multiples of 256 bytes, which the CUDA allocator guarantees for addresses,
so kernels that rely on this alignment work in every buffer.
"""
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

from neptrio.request.infer_request cimport InferRequest

cdef uint64_t _last_id = 0


cdef inline size_t aligned(size_t n) noexcept nogil:
    return (n + 255) & ~(<size_t>255)


cdef class Block:
    """Aligned host memory for tensors. Not cleared."""

    def __dealloc__(self):
        free(self.ptr)

    @property
    def address(self) -> int:
        """The address of its first byte."""
        return <size_t>self.ptr


cdef Block new_block(size_t nbytes):
    cdef Block block = Block.__new__(Block)
    block.ptr = <char*>aligned_alloc(64, ((nbytes if nbytes else 1) + 63) & ~(<size_t>63))
    if block.ptr == NULL:
        raise MemoryError(f"{nbytes} bytes for a kernel model's outputs")
    block.nbytes = nbytes
    return block


cdef class KernelPlan:
    """The plan for one set of input shapes (plan.pxd); `batch` is the size of the whole batch."""

    def __init__(self, int n_inputs, int n_outputs, int n_scratch, int64_t batch):
        global _last_id
        _last_id += 1
        self.c.id = _last_id
        self.c.n_inputs = n_inputs
        self.c.n_outputs = n_outputs
        self.c.n_scratch = n_scratch
        self.c.n_slots = n_inputs + n_outputs + n_scratch
        self.batch = batch
        self.names = [None] * self.c.n_slots
        self.dtypes = [0] * self.c.n_slots
        self.shapes = [()] * self.c.n_slots
        self.c.tensors = <PlanTensor*>realloc(self.c.tensors, self.c.n_slots * sizeof(PlanTensor))
        if self.c.tensors == NULL:
            raise MemoryError
        memset(self.c.tensors, 0, self.c.n_slots * sizeof(PlanTensor))

    def __dealloc__(self):
        free(self.c.tensors)
        free(self.c.launches)
        free(self.c.arguments)

    def set_tensor(self, int slot, str name, int dtype, tuple shape, size_t nbytes, bint zero):
        # type: (..., ..., ..., tuple[int, ...], ..., ...) -> None
        """Sets the name, datatype, shape and size of a slot's tensor."""
        if not 0 <= slot < self.c.n_slots:
            raise IndexError(slot)
        self.names[slot] = name
        self.dtypes[slot] = dtype
        self.shapes[slot] = shape
        self.c.tensors[slot].nbytes = nbytes
        self.c.tensors[slot].zero = zero
        self.layout()

    def clear(self, int slot):
        """Has the slot's tensor, an output or scratch buffer, cleared before the first launch."""
        if not self.c.n_inputs <= slot < self.c.n_slots:
            raise IndexError(slot)
        self.c.tensors[slot].zero = True

    def copy(self, int slot):
        """Has kernels get a copy of the slot's tensor, an input: one of them may write to it."""
        if not 0 <= slot < self.c.n_inputs:
            raise IndexError(slot)
        self.c.tensors[slot].copied = True

    cdef int layout(self) except -1:
        cdef int i
        cdef size_t at = 0
        for i in range(self.c.n_inputs):
            self.c.tensors[i].offset = at
            at += aligned(self.c.tensors[i].nbytes)
        self.c.input_bytes = at
        for i in range(self.c.n_inputs + self.c.n_outputs, self.c.n_slots):
            self.c.tensors[i].offset = at
            at += aligned(self.c.tensors[i].nbytes)
        self.c.work_bytes = at
        at = 0
        for i in range(self.c.n_inputs, self.c.n_inputs + self.c.n_outputs):
            self.c.tensors[i].offset = at
            at += aligned(self.c.tensors[i].nbytes)
        self.c.output_bytes = at
        return 0

    def add_launch(self, int kernel, tuple grid, tuple block, unsigned int shared, bint cooperative=False,
                   tuple cluster=(0, 0, 0)):
        # type: (..., tuple[int, ...], tuple[int, ...], ..., ..., tuple[int, ...]) -> None
        """Adds a launch; its arguments are added next. `cluster` is a cluster's size in blocks, zeros for none."""
        cdef KernelLaunch* grown = <KernelLaunch*>realloc(
            self.c.launches, (self.c.n_launches + 1) * sizeof(KernelLaunch))
        if grown == NULL:
            raise MemoryError
        self.c.launches = grown
        cdef KernelLaunch* launch = &grown[self.c.n_launches]
        launch.kernel = kernel
        for i in range(3):
            launch.grid[i] = grid[i]
            launch.block[i] = block[i]
            launch.cluster[i] = cluster[i]
        launch.shared = shared
        launch.cooperative = cooperative
        launch.first = self.c.n_arguments
        launch.count = 0
        self.c.n_launches += 1

    cdef KernelArgument* _argument(self) except NULL:
        cdef KernelArgument* grown = <KernelArgument*>realloc(
            self.c.arguments, (self.c.n_arguments + 1) * sizeof(KernelArgument))
        if grown == NULL:
            raise MemoryError
        self.c.arguments = grown
        self.c.n_arguments += 1
        self.c.launches[self.c.n_launches - 1].count += 1
        return &grown[self.c.n_arguments - 1]

    def add_tensor_argument(self, int slot):
        """Adds an argument to the last launch: a tensor's address."""
        if not 0 <= slot < self.c.n_slots:
            raise IndexError(slot)
        self._argument().slot = slot

    def add_scalar_argument(self, bytes value):
        """Adds an argument to the last launch: a scalar of up to 8 bytes."""
        cdef KernelArgument* argument
        cdef uint64_t bits = 0
        if len(value) > 8:
            raise ValueError("a scalar argument has at most 8 bytes")
        memcpy(&bits, <const char*>value, len(value))
        argument = self._argument()
        argument.slot = -1
        argument.value = bits

    def launches_as_text(self) -> list:
        # type: () -> list[tuple[int, tuple[int, ...], tuple[int, ...], int, int]]
        """Kernel index, grid, block and shared memory of each launch; for tests and statistics."""
        return [
            (self.c.launches[i].kernel, tuple(self.c.launches[i].grid), tuple(self.c.launches[i].block),
             self.c.launches[i].shared, self.c.launches[i].count)
            for i in range(self.c.n_launches)
        ]


cdef bint _same_rows(tuple a, tuple b) except -1:
    """True when the shapes are equal apart from the batch dimension."""
    cdef Py_ssize_t i
    for i in range(len(a)):
        x = a[i]
        y = b[i]
        if x is None or y is None:
            if x is not y:
                return False
        elif x[1:] != y[1:]:
            return False
    return True


cdef Py_ssize_t run_end(list requests, list keys, Py_ssize_t start, bint batching, int64_t* rows) except -1:
    cdef Py_ssize_t i = start + 1
    rows[0] = (<InferRequest>requests[start]).batch_size
    while i < len(requests) and batching and keys[i] is not None and _same_rows(keys[start], keys[i]):
        rows[0] += (<InferRequest>requests[i]).batch_size
        i += 1
    return i
