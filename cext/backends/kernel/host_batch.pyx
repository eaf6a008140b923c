"""Runs kernel models on the host.

prepare() on the trio thread does everything that needs Python: it finds the plan for the batch's shapes, allocates the
outputs, makes the response tensors as views of them, and writes pointers into C arrays. run_host() then gathers the
inputs of several requests, clears what must be cleared, and calls the compiled entry points, all without the GIL.

Rules:
 1. A batch keeps its requests, plans, output blocks and image alive; run_host() touches no Python object.
 2. The inputs of a lone request are used in place if their addresses are multiples of VECTOR bytes, which a kernel's
    float4 or double2 needs. Others (a tensor may start at any byte of a request's body), and the inputs of several
    requests, are copied into the image's work memory, and so are those that a kernel may write to (its pointer is not
    const): others read the same memory. Outputs are never copied: responses are views of them.
 3. An image belongs to one instance, which runs one batch at a time: its static variables, stacks and work memory
    need no lock.
 4. A kernel that faults fails the requests of its run (guard.h), and no others.
"""
import os
import shutil
import tempfile
from signal import SIGBUS, SIGFPE, SIGILL, SIGSEGV
from sys import intern

from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

cdef extern from "<stdlib.h>" nogil:
    void* aligned_alloc(size_t, size_t)

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.plan cimport (
    Block,
    KernelArgument,
    KernelLaunch,
    KernelPlan,
    Plan,
    PlanTensor,
    new_block,
    run_end,
)
from neptrio.loop.mailbox cimport Work
from neptrio.execution.inline_policy cimport CLIP_NS, INLINE_NS, mean_after
from neptrio.request.infer_request cimport GPU_MEMORY, InferRequest, InferResponse, Tensor, now_ns, same_name

from neptrio.errors import Internal, InvalidArgument, Reason, TritonError

cdef extern from "guard.h" nogil:
    enum: GUARD_STATUS
    void guard_install()
    void guard_code_of(const void* function, uintptr_t* low, uintptr_t* high)
    int guard_call(kernel_entry entry, void** arguments, const unsigned int* grid, const unsigned int* block,
                   uintptr_t low, uintptr_t high)

cdef extern from "dlfcn.h" nogil:
    void* dlopen(const char*, int)
    void* dlsym(void*, const char*)
    int dlclose(void*)
    char* dlerror()
    int RTLD_NOW
    int RTLD_LOCAL

STATUS = {
    1: "threads of a block wait for each other for ever (a barrier or warp operation that not all of them reach)",
    2: "no memory for the threads' stacks",
    3: "an assertion failed or __trap() was called",
    4: "no memory for the batch",
    GUARD_STATUS + SIGFPE: "an integer was divided by zero, or the smallest one by -1",
    GUARD_STATUS + SIGSEGV: "it reached for memory that it does not have (SIGSEGV)",
    GUARD_STATUS + SIGBUS: "it reached for memory that is not there (SIGBUS)",
    GUARD_STATUS + SIGILL: "it came upon an instruction that can't be executed (SIGILL)",
}  # type: dict[int, str]
cdef int NO_MEMORY = 4

cdef enum:
    VECTOR = 16          # bytes: the largest alignment of CUDA's vector types


cdef class HostImage:
    """A compiled object, loaded as a private copy, so that its static variables belong to this instance alone."""

    def __init__(self, str path, list order, list names):
        # type: (..., list[str], list[str]) -> None
        """`order` lists the kernels as plans number them; `names` are those with an entry point."""
        cdef Py_ssize_t i
        cdef bytes name
        cdef void* found
        self.path = path
        # dlopen returns the same handle for the same file; a copy has static variables of its own
        descriptor, copy = tempfile.mkstemp(prefix="neptrio-", suffix=".so")
        os.close(descriptor)
        try:
            shutil.copyfile(path, copy)
            os.chmod(copy, 0o700)
            encoded = os.fsencode(copy)
            self.handle = dlopen(encoded, RTLD_NOW | RTLD_LOCAL)
            if self.handle == NULL:
                raise Internal(f"the compiled kernels can't be loaded: {dlerror().decode(errors='replace')}")
        finally:
            os.unlink(copy)
        self.n_entries = len(order)
        self.order = order
        guard_install()
        self.c.entries = <kernel_entry*>calloc(max(self.n_entries, 1), sizeof(kernel_entry))
        if self.c.entries == NULL:
            raise MemoryError
        for i in range(len(order)):
            if order[i] in names:
                name = f"neptrio_run_{order[i]}".encode()
                found = dlsym(self.handle, name)
                if found == NULL:
                    raise Internal(f"the compiled kernels have no entry point for '{order[i]}'")
                self.c.entries[i] = <kernel_entry>found
                guard_code_of(found, &self.c.low, &self.c.high)

    def __dealloc__(self):
        cdef void* close
        if self.handle != NULL:
            close = dlsym(self.handle, b"neptrio_close")
            if close != NULL:
                (<void (*)() noexcept nogil>close)()
            dlclose(self.handle)
        free(self.c.entries)
        free(self.c.work)


cdef class KernelBatch(Batch):
    """A prepared batch of a kernel model on the host."""

    def __dealloc__(self):
        free(self.c.runs)
        free(self.c.pieces)
        free(self.c.slots)
        free(self.c.arguments)

    def times(self) -> tuple:
        # type: () -> tuple[int, ...]
        """Start, end of input, start of output and end of the execution, in nanoseconds."""
        return tuple(self.c.times)

    cdef object fail(self, Run* run):
        """Answers the requests of a run that has failed."""
        cdef int j
        what = "the batch" if run.status == NO_MEMORY else f"kernel '{self.image.order[run.failed]}'"
        said = STATUS.get(run.status, "it was ended by a signal")
        error = Internal(f"{what} of model '{self.model.name}' failed: {said}", reason=Reason.BACKEND)
        if run.n_requests == len(self.requests):
            self.error = error
        for j in range(run.first_request, run.first_request + run.n_requests):
            self.responses[j] = InferResponse(None, error)

    cpdef object deliver(self):
        # type: () -> None
        cdef int i
        cdef Run* run
        cdef bint failed = False
        cdef KernelPlan plan
        cdef int64_t took
        self.compute_start = self.c.times[0]
        self.input_end = self.c.times[1]
        self.output_start = self.c.times[2]
        self.compute_end = self.c.times[3]
        for i in range(self.c.n_runs):
            run = &self.c.runs[i]
            if run.status:
                failed = True
                self.fail(run)
        if not failed and self.c.n_runs == 1:
            plan = self.plans[0]
            took = self.c.times[3] - self.c.times[0]
            plan.mean_ns = mean_after(plan.mean_ns, took) if plan.mean_ns else min(took, <int64_t>CLIP_NS)
        return Batch.deliver(self)


cdef int execute(HostWork* batch, Run* run) noexcept nogil:
    """Executes one run. Returns a status; on failure of a kernel `run.failed` is its number."""
    cdef Image* image = batch.image
    cdef Plan* plan = run.plan
    cdef void** slots = batch.slots
    cdef void** arguments = batch.arguments
    cdef PlanTensor* t
    cdef Piece* piece
    cdef KernelLaunch* launch
    cdef KernelArgument* argument
    cdef int i, k, status
    cdef size_t need = plan.work_bytes
    cdef char* at
    if image.work_size < need:
        free(image.work)
        image.work_size = 0
        image.work = <char*>aligned_alloc(256, (need + 4095) & ~(<size_t>4095))
        if image.work == NULL:
            return NO_MEMORY
        image.work_size = need
    for i in range(plan.n_inputs):
        slots[i] = NULL
    if run.gather:
        for i in range(plan.n_inputs):
            slots[i] = image.work + plan.tensors[i].offset
        # each slot's pointer moves forward while pieces are copied one after the other; afterwards it is set back
        for i in range(run.n_pieces):
            piece = &batch.pieces[run.first_piece + i]
            if piece.nbytes == 0:    # the pointer of an empty tensor may be NULL
                continue
            memcpy(slots[piece.slot], piece.source, piece.nbytes)
            slots[piece.slot] = <char*>slots[piece.slot] + piece.nbytes
        for i in range(plan.n_inputs):
            slots[i] = image.work + plan.tensors[i].offset
    else:
        for i in range(run.n_pieces):
            piece = &batch.pieces[run.first_piece + i]
            if <size_t>piece.source % VECTOR == 0 and not plan.tensors[piece.slot].copied:
                slots[piece.slot] = <void*>piece.source
            else:
                slots[piece.slot] = image.work + plan.tensors[piece.slot].offset
                if piece.nbytes:
                    memcpy(slots[piece.slot], piece.source, piece.nbytes)
    for i in range(plan.n_inputs, plan.n_slots):
        t = &plan.tensors[i]
        at = run.output if i < plan.n_inputs + plan.n_outputs else image.work
        slots[i] = at + t.offset
        if t.zero:
            memset(slots[i], 0, t.nbytes)
    if batch.times[1] == 0:
        batch.times[1] = now_ns()
    for k in range(plan.n_launches):
        launch = &plan.launches[k]
        for i in range(launch.count):
            argument = &plan.arguments[launch.first + i]
            arguments[i] = &slots[argument.slot] if argument.slot >= 0 else <void*>&argument.value
        status = guard_call(
            image.entries[launch.kernel], arguments, launch.grid, launch.block, image.low, image.high)
        if status:
            run.failed = launch.kernel
            return status
    return 0


cdef void run_host(Work* work) noexcept nogil:
    cdef HostWork* batch = &(<KernelBatch>work.owner).c
    cdef int i
    batch.times[0] = now_ns()
    batch.times[1] = 0
    for i in range(batch.n_runs):
        batch.runs[i].status = execute(batch, &batch.runs[i])
    batch.times[2] = batch.times[3] = now_ns()


cdef class KernelBuilder:
    """Makes KernelBatches. `plan(shapes, batch)` is called once for each distinct set of shapes."""

    cdef list names
    cdef list optional
    cdef bint batching
    cdef object plan
    cdef HostImage image
    cdef dict plans

    def __init__(self, list names, list optional, bint batching, plan):
        # type: (list[str], list[bool], ..., ...) -> None
        self.names = [intern(name) for name in names]
        self.optional = optional
        self.batching = batching
        self.plan = plan
        self.plans = {}

    def use(self, HostImage image):
        # type: (HostImage | None) -> None
        """Sets the object in which batches run; None removes it."""
        self.image = image

    cdef tuple shapes_of(self, InferRequest r, list tensors):
        """The request's input shapes in the order of the configuration; appends its tensors (or None) to a list."""
        cdef Tensor t
        cdef Tensor found
        cdef Py_ssize_t i, n = len(self.names)
        cdef list shapes = []
        cdef list inputs = r.inputs
        for i in range(n):
            found = None
            if i < len(inputs) and same_name((<Tensor>inputs[i]).name, <str>self.names[i]):
                found = inputs[i]
            else:
                for t in inputs:
                    if t.name == self.names[i]:
                        found = t
                        break
            if found is None and not self.optional[i]:
                raise InvalidArgument(f"input '{self.names[i]}' is missing for model '{r.model_name}'")
            if found is not None and found.memory_kind == GPU_MEMORY:
                raise InvalidArgument(
                    f"input '{found.name}' lies in GPU memory and this instance of '{r.model_name}' runs on the CPU")
            tensors.append(found)
            shapes.append(None if found is None else found.shape)
        return tuple(shapes)

    cdef KernelPlan plan_for(self, tuple shapes, int64_t batch, bint fixed):
        """The plan for these shapes; with `fixed`, `batch` is already their first dimension."""
        cdef KernelPlan plan
        key = (shapes, batch)
        plan = self.plans.get(key)
        if plan is None:
            whole = [
                None if s is None else (batch, *s[1:]) if self.batching else s for s in shapes
            ]
            plan = self.plan(whole, batch)
            if len(self.plans) >= 1024:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    def prepare(self, Batch batch not None):
        # type: (...) -> KernelBatch
        """Returns the batch as one that runs without the GIL. Requests that cannot be executed fail on their own."""
        cdef KernelBatch made = KernelBatch(batch.model, batch.requests, batch.close_reason, batch.oldest_wait_ns)
        cdef list requests = batch.requests
        cdef Py_ssize_t n = len(requests), i, j, start
        cdef list tensors = []     # per request: its input tensors in order
        cdef list keys = []
        cdef list mine
        cdef int n_inputs = len(self.names)
        cdef int64_t size
        cdef KernelPlan plan
        cdef Block block
        cdef Tensor t
        cdef Run* run
        cdef Piece* piece
        cdef InferRequest r
        cdef int most_slots = 0, most_arguments = 0
        cdef double expected = 0
        made.instance = batch.instance
        made.image = self.image
        made.c.image = &self.image.c
        made.plans = []
        made.blocks = []
        made.work.run = run_host
        made.c.runs = <Run*>calloc(max(n, 1), sizeof(Run))
        made.c.pieces = <Piece*>calloc(max(n * n_inputs, 1), sizeof(Piece))
        if made.c.runs == NULL or made.c.pieces == NULL:
            raise MemoryError
        for i in range(n):
            r = requests[i]
            mine = []
            try:
                keys.append(self.shapes_of(r, mine))
            except TritonError as error:
                made.responses[i] = InferResponse(None, error)
                keys.append(None)
            tensors.append(mine)
        start = 0
        while start < n:
            if keys[start] is None:
                start += 1
                continue
            i = run_end(requests, keys, start, self.batching, &size)
            try:
                plan = self.plan_for(keys[start], size, False)
                block = new_block(plan.c.output_bytes)
            except TritonError as error:
                for j in range(start, i):
                    made.responses[j] = InferResponse(None, error)
                start = i
                continue
            except MemoryError as error:
                for j in range(start, i):
                    made.responses[j] = InferResponse(None, Internal(str(error), reason=Reason.BACKEND))
                start = i
                continue
            run = &made.c.runs[made.c.n_runs]
            run.output = block.ptr
            run.first_request = start
            run.n_requests = i - start
            run.first_piece = made.c.n_pieces
            run.gather = i - start > 1
            made.plans.append(plan)
            made.blocks.append(block)
            run.plan = &plan.c
            made.c.n_runs += 1
            for j in range(start, i):
                mine = tensors[j]
                for k in range(n_inputs):
                    t = mine[k]
                    if t is None:
                        continue
                    piece = &made.c.pieces[made.c.n_pieces]
                    piece.slot = k
                    piece.source = t.ptr
                    piece.nbytes = t.nbytes
                    made.c.n_pieces += 1
            run.n_pieces = made.c.n_pieces - run.first_piece
            respond(made, plan, block, start, i, self.batching)
            most_slots = max(most_slots, plan.c.n_slots)
            most_arguments = max(most_arguments, plan.c.n_arguments)
            expected += plan.mean_ns if plan.mean_ns else first_guess(plan)
            start = i
        made.off_loop = expected > INLINE_NS
        made.c.slots = <void**>calloc(max(most_slots, 1), sizeof(void*))
        made.c.arguments = <void**>calloc(max(most_arguments, 1), sizeof(void*))
        if made.c.slots == NULL or made.c.arguments == NULL:
            raise MemoryError
        return made


cdef double first_guess(KernelPlan plan) noexcept:
    """How long a plan is assumed to take before it was measured: 1 ns per byte moved and per 4 threads."""
    cdef double n = plan.c.output_bytes + plan.c.work_bytes
    cdef int k
    cdef KernelLaunch* launch
    for k in range(plan.c.n_launches):
        launch = &plan.c.launches[k]
        n += (<double>launch.grid[0] * launch.grid[1] * launch.grid[2]
              * launch.block[0] * launch.block[1] * launch.block[2]) / 4
    return n


cdef int respond(KernelBatch made, KernelPlan plan, Block block, Py_ssize_t start, Py_ssize_t end,
                 bint batching) except -1:
    """Makes the responses of one run: views of the output block, one part per request."""
    cdef Py_ssize_t j
    cdef int k, slot
    cdef InferRequest r
    cdef Tensor t
    cdef list outputs
    cdef int64_t row = 0
    cdef size_t per_row
    cdef tuple shape
    cdef PlanTensor* p
    for j in range(start, end):
        r = made.requests[j]
        outputs = []
        for k in range(plan.c.n_outputs):
            slot = plan.c.n_inputs + k
            p = &plan.c.tensors[slot]
            t = Tensor.__new__(Tensor)
            t.name = plan.names[slot]
            t.dtype = plan.dtypes[slot]
            t.owner = block
            if end - start == 1:
                t.shape = plan.shapes[slot]
                t.ptr = block.ptr + p.offset
                t.nbytes = p.nbytes
            else:
                shape = plan.shapes[slot]
                per_row = p.nbytes // <size_t>plan.batch if plan.batch else 0
                t.shape = (r.batch_size, *shape[1:])
                t.ptr = block.ptr + p.offset + row * per_row
                t.nbytes = r.batch_size * per_row
            outputs.append(t)
        made.responses[j] = InferResponse(outputs)
        row += r.batch_size
    return 0
