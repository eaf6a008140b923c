# distutils: language = c++
"""Prepares batches of kernel models for a GPU on the trio thread: where each input is read, where each output goes.

prepare() does everything that needs Python: it finds the plan for the batch's shapes, makes the response tensors, and
writes addresses into C arrays. cuda_launch then executes these without the GIL.

Rules:
 1. An input in device memory is read in place when its request is alone in a run. Otherwise it is copied on the
    device. It is also copied when its address is not a multiple of 256 (kernels may rely on that, and a misaligned
    access ends the context), and when it is small and the plan has several launches, because recording a graph then
    saves more than the copy costs. The driver copies inputs from other GPUs.
    An input that a kernel may write to is copied always: others read the same memory (a region, another step).
 2. The same holds for outputs that go to a registered region of this GPU. Kernels never write directly to memory
    that overlaps one of their inputs.
 3. An output stays on the device when the next step of an ensemble reads it there, and when it is a sequence's state
    that no client sees. Each request gets memory of its own for it, so that it keeps nobody else's alive.
 4. All other outputs arrive in one block per run; responses are views of it. It is page-locked, unless it is so small
    that copying it once more costs less (cuda_launch).
 5. Device memory that was lost with its context (a region, a tensor between two steps) is refused.
"""
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

cimport cuda.bindings.cydriver as cu

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.cuda_error cimport check
from neptrio.backends.kernel.cuda_launch cimport (
    DeviceBatch,
    DevicePiece,
    DeviceRun,
    DeviceWork,
    Export,
    find_addresses,
    kernels,
)
from neptrio.backends.kernel.cuda_memory cimport DeviceBlock, DevicePool, new_device_block
from neptrio.backends.kernel.cuda_pinned cimport PinnedBlock
from neptrio.backends.kernel.cuda_pipeline cimport run_device, work_off
from neptrio.backends.kernel.cuda_queue cimport SMALL_BLOCK, DeviceQueue, Queue, Slot
from neptrio.backends.kernel.plan cimport Block, KernelPlan, Plan, PlanTensor, new_block, run_end
from neptrio.loop.mailbox cimport Mailbox
from neptrio.request.infer_request cimport (
    GPU_MEMORY,
    InferRequest,
    InferResponse,
    ModelCore,
    RequestedOutput,
    Tensor,
    now_ns,
)

from neptrio.request.device_memory import pools
from neptrio.errors import Internal, InvalidArgument, Reason, TritonError, Unavailable

cdef enum:
    ALIGNED = 256
    PLANS = 1024
    SMALL = 1 << 20     # bytes; copying less on the device takes less time than launching without a graph


cdef DevicePool home(Tensor tensor):
    """The pool to which a device tensor's memory belongs, None when another library made it."""
    owner = tensor.owner
    while type(owner) is Tensor:
        owner = (<Tensor>owner).owner
    if type(owner) is DeviceBlock:
        return (<DeviceBlock>owner).pool
    return getattr(owner, "device_pool", None)


cdef bint used_in_place(Plan* plan, const void* address, size_t nbytes) noexcept:
    return <uintptr_t>address % ALIGNED == 0 and (plan.n_launches == 1 or nbytes >= SMALL)


cdef class DeviceBuilder:
    """Makes DeviceBatches. `plan(shapes, batch)` is called once for each distinct set of shapes."""

    cdef list names
    cdef list optional
    cdef bint batching
    cdef int device
    cdef object host
    cdef object regions
    cdef DeviceQueue queue
    cdef dict plans

    def __init__(self, list names, list optional, bint batching, int device, host, regions):
        # type: (list[str], list[bool], ..., ..., ..., ...) -> None
        """`host` is the DeviceInstance, for its plan(), broke() and memory_changed(). `regions(region, offset, size,
        needed, output)` returns (address, owner) of a place in a registered device region, or None."""
        if len(names) > 64:
            raise InvalidArgument(f"a kernel model on a GPU has at most 64 inputs, got {len(names)}")
        self.names = names
        self.optional = optional
        self.batching = batching
        self.device = device
        self.host = host
        self.regions = regions
        self.plans = {}

    def use(self, DeviceQueue queue):
        # type: (DeviceQueue | None) -> None
        """Sets the queue on which batches run; None removes it."""
        self.queue = queue
        self.plans = {}

    cdef list find_inputs(self, InferRequest r):
        """The request's tensors in the order of the configuration, None for an optional one that is absent."""
        cdef Tensor t
        cdef list found = []
        cdef Py_ssize_t i
        for i in range(len(self.names)):
            here = None
            for t in r.inputs:
                if t.name == self.names[i]:
                    here = t
                    break
            if here is None and not self.optional[i]:
                raise InvalidArgument(f"input '{self.names[i]}' is missing for model '{r.model_name}'")
            if here is not None and (<Tensor>here).memory_kind == GPU_MEMORY:
                self.check_device(here)
            found.append(here)
        return found

    cdef int check_device(self, Tensor tensor) except -1:
        """Raises for device memory that was lost with its context (rule 5)."""
        cdef DevicePool pool = pools.get(tensor.memory_id)
        cdef DevicePool own = home(tensor)
        if pool is None or pool.c.broken or (own is not None and own is not pool):
            raise Unavailable(f"tensor '{tensor.name}' was lost when GPU {tensor.memory_id} failed")
        return 0

    def prepare(self, Batch batch not None, Mailbox mailbox not None):
        # type: (..., ...) -> DeviceBatch
        """Returns the batch as one that runs on the device. Requests that cannot be executed fail on their own."""
        cdef DeviceBatch made = DeviceBatch(batch.model, batch.requests, batch.close_reason, batch.oldest_wait_ns)
        cdef list requests = batch.requests
        cdef Py_ssize_t n = len(requests), i, j, start
        cdef int n_inputs = len(self.names), most = 0
        cdef list tensors = [], keys = [], mine
        cdef int64_t size
        cdef KernelPlan plan
        made.instance = batch.instance
        made.queue = self.queue
        made.mailbox = mailbox
        made.host = self.host
        made.plans = []
        made.blocks = []
        made.kept = []
        made.inputs = []
        made.off_loop = True  # always waits for the GPU
        made.work.run = run_device
        made.c.queue = &self.queue.c
        made.c.mailbox = <void*>mailbox
        made.c.runs = <DeviceRun*>calloc(max(n, 1), sizeof(DeviceRun))
        made.c.pieces = <DevicePiece*>calloc(max(n * n_inputs, 1), sizeof(DevicePiece))
        if made.c.runs == NULL or made.c.pieces == NULL:
            raise MemoryError
        for i in range(n):
            r = requests[i]
            try:
                mine = self.find_inputs(r)
                keys.append(tuple([None if x is None else (<Tensor>x).shape for x in mine]))
                tensors.append(mine)
            except TritonError as error:
                made.responses[i] = InferResponse(None, error)
                keys.append(None)
                tensors.append(None)
        start = 0
        while start < n:
            if keys[start] is None:
                start += 1
                continue
            i = run_end(requests, keys, start, self.batching, &size)
            try:
                plan = self.plan_for(keys[start], size)
                self.add_run(made, plan, tensors, start, i)
                most = max(most, plan.c.n_slots)
            except (TritonError, MemoryError) as error:
                failure = error if isinstance(error, TritonError) else Internal(str(error), reason=Reason.BACKEND)
                for j in range(start, i):
                    made.responses[j] = InferResponse(None, failure)
            start = i
        made.c.addresses = <cu.CUdeviceptr*>calloc(max(most, 1), sizeof(cu.CUdeviceptr))
        if made.c.addresses == NULL:
            raise MemoryError
        return made

    cdef KernelPlan plan_for(self, tuple shapes, int64_t batch):
        key = (shapes, batch)
        plan = self.plans.get(key)
        if plan is None:
            whole = [None if s is None else (batch, *s[1:]) if self.batching else s for s in shapes]
            plan = self.host.plan(whole, batch)
            if len(self.plans) >= PLANS:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    cdef int add_run(self, DeviceBatch made, KernelPlan plan, list tensors, Py_ssize_t start,
                     Py_ssize_t end) except -1:
        """Prepares one run: the requests from `start` to `end`, with equal shapes. Changes `made` only on success."""
        cdef DeviceRun* run = &made.c.runs[made.c.n_runs]
        cdef int first = made.c.n_pieces, exports = made.c.n_exports
        run.plan = &plan.c
        run.gather = end - start > 1
        run.own_memory = False
        run.first_piece = first
        try:
            self.add_inputs(made, run, plan, tensors, start, end)
            self.add_outputs(made, run, plan, start, end)
        except BaseException:
            made.c.n_pieces = first
            made.c.n_exports = exports
            raise
        made.plans.append(plan)
        made.c.n_runs += 1
        return 0

    cdef int add_inputs(self, DeviceBatch made, DeviceRun* run, KernelPlan plan, list tensors, Py_ssize_t start,
                        Py_ssize_t end) except -1:
        cdef DevicePiece* piece
        cdef Tensor t
        cdef Py_ssize_t j
        cdef int k, n_inputs = len(self.names)
        cdef size_t at
        for k in range(n_inputs):  # in the order in which they lie in the slot
            at = plan.c.tensors[k].offset
            for j in range(start, end):
                t = tensors[j][k]
                if t is None:
                    continue
                piece = &made.c.pieces[made.c.n_pieces]
                made.c.n_pieces += 1
                piece.slot = k
                piece.source = t.ptr
                piece.nbytes = t.nbytes
                piece.offset = at
                piece.peer = NULL
                piece.pin = NULL
                piece.in_place = False
                at += t.nbytes
                piece.on_device = t.memory_kind == GPU_MEMORY
                if piece.on_device:
                    made.inputs.append(t)
                    if t.memory_id != self.device:
                        piece.peer = &(<DevicePool>pools[t.memory_id]).c
                    elif (not run.gather and not plan.c.tensors[k].copied
                          and used_in_place(&plan.c, t.ptr, t.nbytes)):
                        piece.in_place = True
                        run.own_memory = True
                elif t.nbytes >= SMALL_BLOCK:
                    piece.pin = self.queue.pinned.holding(t.ptr, t.nbytes)
        run.n_pieces = made.c.n_pieces - run.first_piece
        return 0

    cdef object place_of(self, InferRequest r, str name, size_t nbytes):
        """Where an output goes: (address, owner) in a region, True to stay on the device, None to the host."""
        cdef RequestedOutput asked
        cdef ModelCore model = r.model
        if r.outputs is not None:
            for asked in r.outputs:
                if asked.name == name:
                    if asked.keep_on_device:
                        return True if r.cache_key is None else None
                    if asked.shm_region is not None and self.regions is not None and not asked.class_count:
                        place = self.regions(asked.shm_place, asked.shm_offset, asked.shm_byte_size, nbytes, name)
                        return place if place is not None and place[1].device_id == self.device else None
        if model is not None and r.collect_statistics and model.output_names:
            states = getattr(model, "state_outputs", None)
            if states and name in states and name not in model.output_names:
                return True
        return None

    cdef int add_outputs(self, DeviceBatch made, DeviceRun* run, KernelPlan plan, Py_ssize_t start,
                         Py_ssize_t end) except -1:
        """Makes the responses of one run: views of the page-locked block, of regions, or of device memory."""
        cdef Py_ssize_t j
        cdef int k, n = plan.c.n_outputs
        cdef InferRequest r
        cdef Tensor t
        cdef Block block = None
        cdef list responses = [], placed = [], outputs
        cdef int64_t row = 0
        cdef size_t per_row, offset, nbytes
        cdef PlanTensor* p
        cdef Export* export
        cdef bint exporting = False, on_host = False, alone = end - start == 1
        for j in range(start, end):
            r = made.requests[j]
            outputs = []
            error = None
            for k in range(n):
                p = &plan.c.tensors[plan.c.n_inputs + k]
                t = Tensor.__new__(Tensor)
                t.name = plan.names[plan.c.n_inputs + k]
                t.dtype = plan.dtypes[plan.c.n_inputs + k]
                if alone:
                    offset = p.offset
                    nbytes = p.nbytes
                    t.shape = plan.shapes[plan.c.n_inputs + k]
                else:
                    per_row = p.nbytes // <size_t>plan.batch if plan.batch else 0
                    offset = p.offset + row * per_row
                    nbytes = r.batch_size * per_row
                    t.shape = (r.batch_size, *plan.shapes[plan.c.n_inputs + k][1:])
                t.nbytes = nbytes
                place = None
                try:
                    place = self.place_of(r, t.name, nbytes)
                except TritonError as problem:
                    error = problem
                if place is None:
                    on_host = True
                else:
                    exporting = True
                placed.append((place, offset, k))
                outputs.append(t)
            responses.append(InferResponse(outputs) if error is None else InferResponse(None, error))
            placed.append(outputs)
            row += r.batch_size
        run.pin = NULL
        run.small = not exporting and plan.c.output_bytes <= SMALL_BLOCK
        if run.small:
            block = new_block(plan.c.output_bytes)
        elif on_host or not exporting:
            block = self.queue.pinned.take(plan.c.output_bytes)
            if isinstance(block, PinnedBlock):
                run.pin = &(<PinnedBlock>block).pin
        if block is not None:
            made.blocks.append(block)
        run.output = block.ptr if block is not None else NULL
        run.first_export = made.c.n_exports
        run.n_exports = 0
        if exporting:
            self.make_room(made, (end - start) * n)
        for j in range(end - start):
            outputs = placed[j * (n + 1) + n]
            for k in range(n):
                place, offset, _ = placed[j * (n + 1) + k]
                t = outputs[k]
                export = NULL
                if exporting:
                    export = &made.c.exports[made.c.n_exports]
                    made.c.n_exports += 1
                    run.n_exports += 1
                    export.target = 0
                    export.kept = NULL
                    export.direct = False
                    export.slot = plan.c.n_inputs + k
                    export.offset = offset
                    export.nbytes = t.nbytes
                if place is None:
                    t.owner = block
                    t.ptr = block.ptr + <size_t>offset
                else:
                    self.put(made, run, export, t, place, alone)
            made.responses[start + j] = responses[j]
        return 0

    cdef int put(self, DeviceBatch made, DeviceRun* run, Export* export, Tensor t, place, bint alone) except -1:
        """Prepares an output into device memory: `place` in a region, or True for memory of its own."""
        cdef DeviceBlock block
        t.memory_kind = GPU_MEMORY
        t.memory_id = self.device
        if place is True:
            block = new_device_block(self.queue.pool, t.nbytes)
            t.owner = block
            made.kept.append((t, block))
            export.kept = &block.address
            export.direct = alone and used_in_place(run.plan, NULL, t.nbytes)
        else:
            t.ptr = <const char*><uintptr_t>place[0]
            t.owner = place[1]
            made.inputs.append(t)  # keeps the region open while the batch writes to it
            export.target = <cu.CUdeviceptr><uintptr_t>t.ptr
            export.direct = (alone and used_in_place(run.plan, t.ptr, t.nbytes)
                             and not self.overlaps(made, run, t.ptr, t.nbytes))
        if export.direct and t.nbytes:
            run.own_memory = True
        return 0

    cdef bint overlaps(self, DeviceBatch made, DeviceRun* run, const char* address, size_t nbytes):
        """True when an input that is read in place overlaps the output's memory."""
        cdef int i
        cdef DevicePiece* piece
        for i in range(run.n_pieces):
            piece = &made.c.pieces[run.first_piece + i]
            if piece.in_place and piece.source < address + nbytes and address < piece.source + piece.nbytes:
                return True
        return False

    cdef int make_room(self, DeviceBatch made, Py_ssize_t more) except -1:
        cdef Export* grown = <Export*>calloc(made.c.n_exports + more, sizeof(Export))
        if grown == NULL:
            raise MemoryError
        if made.c.exports != NULL:
            memcpy(grown, made.c.exports, made.c.n_exports * sizeof(Export))
            free(made.c.exports)
        made.c.exports = grown
        return 0


def time_bare(DeviceBatch batch not None, int rounds, bint copies) -> list:
    # type: (..., ..., ...) -> list[int]
    """The nanoseconds of each of `rounds` repetitions of a prepared batch's work, without the server around it: the
    kernels and one wait; with `copies` also the transfers. For benchmarks."""
    cdef DeviceWork* w = &batch.c
    cdef DeviceRun* run = &w.runs[0]
    cdef Queue* q = w.queue
    cdef Slot* s = &q.slots[0]
    cdef int i, r
    cdef int64_t start
    cdef list times = []
    if w.n_runs != 1:
        raise ValueError("the batch must be a single run")
    with nogil:
        r = cu.cuCtxSetCurrent(q.memory.context)
    check(r, "making the context current")
    for i in range(rounds + 1):
        start = now_ns()
        with nogil:
            if copies or i == 0:
                w.launched = w.finished = 0
                run.begun = False
                work_off(w, False)
                r = w.status
                s = &q.slots[run.slot]
                find_addresses(w, run, s)  # a graph has those that it was recorded with, not these
            else:
                r = kernels(w, run, s)
                if r == 0:
                    r = cu.cuEventRecord(s.done, q.compute)
                while r == 0:
                    r = cu.cuEventQuery(s.done)
                    if r != cu.CUDA_ERROR_NOT_READY:
                        break
                    r = 0
        check(r, "measuring")
        if i:
            times.append(now_ns() - start)
    return times
