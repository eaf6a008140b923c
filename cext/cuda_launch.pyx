# distutils: language = c++
"""Kernel models on a GPU: staging, launches and waiting without the GIL.

An instance has one compute stream, one copy stream and two slots. A slot is a pinned staging
buffer, a device block for inputs and scratch, a device block for outputs, and events. A batch

    stage    gathers its inputs into the pinned buffer and copies them to the device (copy stream)
    launch   waits for that on the device, launches the kernels, copies the outputs back
    finish   waits for one event

and between launch and finish the instance's thread takes the next batch out of its mailbox, if
there is one, and stages it into the other slot: host-to-device copies overlap the kernels.

Rules:
 1. A slot belongs to one batch from stage to finish; batches alternate between the two slots.
 2. Outputs arrive in pinned blocks that the responses view; a block goes back to its pool when
    the last response has been sent. Nothing is copied on the host on the way out.
 3. Inputs in device memory are used where they lie when a request is alone, and are copied on the
    device when several requests are gathered. Outputs that go to a registered device region are
    copied there on the device.
 4. A driver error fails the batch with the error's name. Errors that break the context (STICKY)
    fail every later batch of the queue as well; the backend then takes the model out of service.
 5. Graphs are recorded per slot and plan once a plan with several launches has run GRAPH_AFTER
    times; growing a slot's memory makes its graphs stale.
"""
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

cimport cuda.bindings.cydriver as cu
cimport cython

from neptrio._cext.batch cimport Batch
from neptrio._cext.kernel_plan cimport (
    Block,
    KernelArgument,
    KernelLaunch,
    KernelPlan,
    Plan,
    PlanTensor,
    new_block,
)
from neptrio._cext.mailbox cimport Mailbox, Work
from neptrio._cext.request cimport InferRequest, InferResponse, RequestedOutput, Tensor, now_ns

from neptrio.errors import Internal, InvalidArgument, Reason, TritonError

# errors after which the context is unusable (the driver's documentation of each says so)
STICKY = frozenset((700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 214, 220, 226))

cdef enum:
    GRAPHS = 64
    GRAPH_AFTER = 3
    MAX_ARGUMENTS = 256
    SPIN_NS = 30000

cdef struct Graph:
    uint64_t plan
    uint64_t generation
    int uses
    cu.CUgraphExec executable

cdef struct Slot:
    char* pinned
    size_t pinned_size
    cu.CUdeviceptr work
    size_t work_size
    cu.CUdeviceptr out
    size_t out_size
    cu.CUevent begin
    cu.CUevent staged
    cu.CUevent started
    cu.CUevent ran
    cu.CUevent done
    uint64_t generation
    Graph graphs[GRAPHS]

cdef struct Queue:
    cu.CUcontext context
    cu.CUmemoryPool pool
    cu.CUstream compute
    cu.CUstream copy
    cu.CUfunction* functions
    int n_functions
    bint busy_wait
    bint use_graphs
    Slot slots[2]
    int next
    int broken              # the sticky error that ended it
    int64_t graph_launches
    int64_t staged_ahead
    size_t device_bytes
    size_t pinned_bytes

cdef struct DevicePiece:
    int slot
    bint on_device
    const char* source
    size_t offset           # in the input part of the work block
    size_t nbytes

cdef struct Export:         # one request's part of one output, to where it is wanted
    cu.CUdeviceptr target   # a registered region; 0: the pinned block
    size_t offset           # in the output block
    size_t nbytes

cdef struct DeviceRun:
    Plan* plan
    int first_piece
    int n_pieces
    int first_export
    int n_exports           # 0: the whole output block goes to `output`
    bint gather
    char* output
    int slot
    bint own_inputs         # an input is used where it lies: no graph

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


cdef int ensure(Queue* q, Slot* s, Plan* plan) noexcept nogil:
    """Grows a slot's memory to what the plan needs. Returns a CUresult."""
    cdef int r
    cdef size_t size
    cdef bint grew = False
    if s.pinned_size < plan.input_bytes:
        if s.pinned != NULL:
            cu.cuMemFreeHost(s.pinned)
            q.pinned_bytes -= s.pinned_size
        s.pinned = NULL
        s.pinned_size = 0
        size = rounded(plan.input_bytes)
        r = cu.cuMemHostAlloc(<void**>&s.pinned, size, 0)
        if r:
            s.pinned = NULL
            return r
        s.pinned_size = size
        q.pinned_bytes += size
    if s.work_size < plan.work_bytes:
        r = regrow(q, &s.work, &s.work_size, plan.work_bytes)
        if r:
            return r
        grew = True
    if s.out_size < plan.output_bytes:
        r = regrow(q, &s.out, &s.out_size, plan.output_bytes)
        if r:
            return r
        grew = True
    if grew:
        s.generation += 1
        return cu.cuStreamSynchronize(q.compute)
    return 0


cdef size_t rounded(size_t n) noexcept nogil:
    """Sizes that are asked for: powers of two up to 64 MiB, then multiples of that."""
    cdef size_t size = 65536
    if n > (<size_t>1 << 26):
        return (n + (<size_t>1 << 26) - 1) & ~((<size_t>1 << 26) - 1)
    while size < n:
        size *= 2
    return size


cdef int regrow(Queue* q, cu.CUdeviceptr* pointer, size_t* size, size_t wanted) noexcept nogil:
    cdef int r
    cdef size_t want = rounded(wanted)
    if size[0]:
        r = cu.cuMemFreeAsync(pointer[0], q.compute)
        q.device_bytes -= size[0]
        pointer[0] = 0
        size[0] = 0
        if r:
            return r
    r = cu.cuMemAllocFromPoolAsync(pointer, want, q.pool, q.compute)
    if r:
        pointer[0] = 0
        return r
    size[0] = want
    q.device_bytes += want
    return 0


cdef int stage(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Inputs on their way to the device. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s
    cdef DevicePiece* piece
    cdef int i, r, on_host = 0
    run.slot = q.next
    q.next = 1 - q.next
    s = &q.slots[run.slot]
    w.doing = "allocating memory"
    r = ensure(q, s, plan)
    if r:
        return r
    w.doing = "copying inputs"
    r = cu.cuEventRecord(s.begin, q.copy)
    if r:
        return r
    for i in range(run.n_pieces):
        piece = &w.pieces[run.first_piece + i]
        if not piece.on_device:
            memcpy(s.pinned + piece.offset, piece.source, piece.nbytes)
            on_host += 1
    if on_host == run.n_pieces and on_host:
        r = cu.cuMemcpyHtoDAsync(s.work, s.pinned, plan.input_bytes, q.copy)
        if r:
            return r
    else:
        for i in range(run.n_pieces):
            piece = &w.pieces[run.first_piece + i]
            if piece.nbytes == 0:
                continue
            if not piece.on_device:
                r = cu.cuMemcpyHtoDAsync(s.work + piece.offset, s.pinned + piece.offset, piece.nbytes, q.copy)
            elif run.gather:
                r = cu.cuMemcpyDtoDAsync(s.work + piece.offset, <cu.CUdeviceptr><uintptr_t>piece.source,
                                         piece.nbytes, q.copy)
            if r:
                return r
    return cu.cuEventRecord(s.staged, q.copy)


cdef int kernels(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Clears and launches, on the compute stream (or into the graph that it records)."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef PlanTensor* t
    cdef KernelLaunch* launch
    cdef KernelArgument* argument
    cdef void* arguments[MAX_ARGUMENTS]
    cdef cu.CUdeviceptr* addresses = w.addresses
    cdef int i, k, r
    for i in range(plan.n_inputs, plan.n_slots):
        t = &plan.tensors[i]
        if t.zero and t.nbytes:
            w.doing = "clearing a buffer"
            r = cu.cuMemsetD8Async(addresses[i], 0, t.nbytes, q.compute)
            if r:
                return r
    w.doing = "launching a kernel"
    for k in range(plan.n_launches):
        launch = &plan.launches[k]
        for i in range(launch.count):
            argument = &plan.arguments[launch.first + i]
            arguments[i] = <void*>&addresses[argument.slot] if argument.slot >= 0 else <void*>&argument.value
        r = cu.cuLaunchKernel(q.functions[launch.kernel], launch.grid[0], launch.grid[1], launch.grid[2],
                              launch.block[0], launch.block[1], launch.block[2], launch.shared, q.compute,
                              arguments, NULL)
        if r:
            return r
    return 0


cdef int record(DeviceWork* w, DeviceRun* run, Slot* s, Graph* graph) noexcept nogil:
    """Records the plan's kernels as a graph. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef cu.CUgraph made = NULL
    cdef int r, ended
    w.doing = "recording a graph"
    r = cu.cuStreamBeginCapture(q.compute, cu.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if r:
        return r
    r = kernels(w, run, s)
    ended = cu.cuStreamEndCapture(q.compute, &made)
    if r == 0:
        r = ended
    if r == 0:
        r = cu.cuGraphInstantiate(&graph.executable, made, 0)
    if made != NULL:
        cu.cuGraphDestroy(made)
    if r:
        graph.executable = NULL
    return r


cdef Graph* graph_of(Slot* s, Plan* plan) noexcept nogil:
    """The slot's entry for a plan; another plan's entry is given up for it."""
    cdef Graph* graph = &s.graphs[plan.id % GRAPHS]
    if graph.plan != plan.id or graph.generation != s.generation:
        if graph.executable != NULL:
            cu.cuGraphExecDestroy(graph.executable)
        memset(graph, 0, sizeof(Graph))
        graph.plan = plan.id
        graph.generation = s.generation
    return graph


cdef int launch_run(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Everything after staging up to the event that finish() waits for. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s = &q.slots[run.slot]
    cdef Graph* graph
    cdef Export* export
    cdef DevicePiece* piece
    cdef PlanTensor* t
    cdef int i, r
    for i in range(plan.n_slots):
        t = &plan.tensors[i]
        w.addresses[i] = (s.out if plan.n_inputs <= i < plan.n_inputs + plan.n_outputs else s.work) + t.offset
    for i in range(plan.n_inputs):
        w.addresses[i] = 0  # an optional input that no request brought is a null pointer
    for i in range(run.n_pieces):
        piece = &w.pieces[run.first_piece + i]
        if piece.on_device and not run.gather:
            w.addresses[piece.slot] = <cu.CUdeviceptr><uintptr_t>piece.source
        else:
            w.addresses[piece.slot] = s.work + plan.tensors[piece.slot].offset
    w.doing = "waiting for the inputs"
    r = cu.cuStreamWaitEvent(q.compute, s.staged, 0)
    if r:
        return r
    r = cu.cuEventRecord(s.started, q.compute)
    if r:
        return r
    graph = NULL
    if q.use_graphs and plan.n_launches > 1 and not run.own_inputs:
        graph = graph_of(s, plan)
        graph.uses += 1
        if graph.executable == NULL and graph.uses > GRAPH_AFTER:
            r = record(w, run, s, graph)
            if r:
                return r
    if graph != NULL and graph.executable != NULL:
        w.doing = "launching a graph"
        r = cu.cuGraphLaunch(graph.executable, q.compute)
        q.graph_launches += 1
    else:
        r = kernels(w, run, s)
    if r:
        return r
    r = cu.cuEventRecord(s.ran, q.compute)
    if r:
        return r
    w.doing = "copying outputs"
    if run.n_exports == 0:
        if plan.output_bytes:
            r = cu.cuMemcpyDtoHAsync(run.output, s.out, plan.output_bytes, q.compute)
    else:
        for i in range(run.n_exports):
            export = &w.exports[run.first_export + i]
            if export.nbytes == 0:
                continue
            if export.target:
                r = cu.cuMemcpyDtoDAsync(export.target, s.out + export.offset, export.nbytes, q.compute)
            else:
                r = cu.cuMemcpyDtoHAsync(run.output + export.offset, s.out + export.offset, export.nbytes, q.compute)
            if r:
                return r
    if r:
        return r
    return cu.cuEventRecord(s.done, q.compute)


cdef int finish(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Waits for the run and reads its event times. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Slot* s = &q.slots[run.slot]
    cdef float ms = 0
    cdef int r
    cdef int64_t until = now_ns() + SPIN_NS
    w.doing = "executing"
    while True:
        r = cu.cuEventQuery(s.done)
        if r != cu.CUDA_ERROR_NOT_READY:
            break
        if not q.busy_wait and now_ns() > until:
            r = cu.cuEventSynchronize(s.done)
            break
    if r:
        return r
    if cu.cuEventElapsedTime(&ms, s.begin, s.staged) == 0:
        w.input_ms += ms
    if cu.cuEventElapsedTime(&ms, s.started, s.ran) == 0:
        w.infer_ms += ms
    if cu.cuEventElapsedTime(&ms, s.ran, s.done) == 0:
        w.output_ms += ms
    return 0


cdef void run_device(Work* work) noexcept nogil:
    cdef DeviceWork* w = &(<DeviceBatch>work.owner).c
    cdef DeviceWork* following
    cdef Work* ahead
    cdef Queue* q = w.queue
    cdef int i, r = 0
    if not w.staged:
        w.times[0] = now_ns()
    if q.broken:
        w.status = q.broken
        w.doing = "executing"
    else:
        if w.status == 0:
            r = cu.cuCtxSetCurrent(q.context)
        else:
            r = w.status  # staging it ahead failed
        for i in range(w.n_runs):
            if r:
                break
            if not (i == 0 and w.staged):
                r = stage(w, &w.runs[i])
                if r:
                    break
            r = launch_run(w, &w.runs[i])
            if r:
                break
            if i == w.n_runs - 1:
                ahead = (<Mailbox>w.mailbox).take_ahead(run_device)
                if ahead != NULL:
                    following = &(<DeviceBatch>ahead.owner).c
                    if following.n_runs and following.queue == q:
                        following.times[0] = now_ns()
                        following.status = stage(following, &following.runs[0])
                        following.staged = True
                        q.staged_ahead += 1
            r = finish(w, &w.runs[i])
        w.status = r
        if sticky(r):
            q.broken = r
        elif r:
            cu.cuStreamSynchronize(q.copy)  # nothing of the failed batch may still use its memory
            cu.cuStreamSynchronize(q.compute)
    w.times[3] = now_ns()
    w.times[2] = w.times[3] - <int64_t>(w.output_ms * 1e6)
    w.times[1] = w.times[2] - <int64_t>(w.infer_ms * 1e6)
    if w.times[1] < w.times[0]:  # events and the host's clock differ by some microseconds
        w.times[1] = w.times[0]
    if w.times[2] < w.times[1]:
        w.times[2] = w.times[1]


cdef bint sticky(int r) noexcept nogil:
    return r in (700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 214, 220, 226)


# ---------------------------------------------------------------- pinned output blocks

cdef class PinnedPool:
    """Page-locked host memory for outputs, in powers of two, up to `limit` bytes.

    Past the limit, or when the driver has no more, outputs go to ordinary memory: slower, correct.
    """

    cdef cu.CUcontext context
    cdef public size_t limit   # lowering it frees nothing
    cdef readonly size_t total
    cdef readonly size_t used
    cdef dict idle             # size -> [address]
    cdef bint closed

    def __init__(self, uintptr_t context, size_t limit):
        self.context = <cu.CUcontext>context
        self.limit = limit
        self.idle = {}

    cdef Block take(self, size_t nbytes):
        cdef size_t size = rounded(nbytes)
        cdef PinnedBlock block
        cdef void* pointer = NULL
        cdef cu.CUcontext old
        cdef int r
        cdef list idle = self.idle.get(size)
        if idle:
            pointer = <void*><uintptr_t>idle.pop()
        elif self.total + size <= self.limit and not self.closed:
            with nogil:
                r = cu.cuCtxPushCurrent(self.context)
                if r == 0:
                    r = cu.cuMemHostAlloc(&pointer, size, 1)  # portable
                    cu.cuCtxPopCurrent(&old)
            if r:
                pointer = NULL
            else:
                self.total += size
        if pointer == NULL:
            return new_block(nbytes)
        block = PinnedBlock.__new__(PinnedBlock)
        block.ptr = <char*>pointer
        block.nbytes = nbytes
        block.size = size
        block.pool = self
        self.used += size
        return block

    cdef void give(self, char* pointer, size_t size):
        self.used -= size
        self.idle.setdefault(size, []).append(<uintptr_t>pointer)
        if self.closed:
            self.drop()

    cdef drop(self):
        cdef uintptr_t pointer
        cdef cu.CUcontext old
        for size, idle in self.idle.items():
            for pointer in idle:
                if cu.cuCtxPushCurrent(self.context) == 0:
                    cu.cuMemFreeHost(<void*>pointer)
                    cu.cuCtxPopCurrent(&old)
                self.total -= <size_t>size
            idle.clear()

    def close(self):
        """Frees what is idle now and what comes back later."""
        self.closed = True
        self.drop()


@cython.no_gc_clear  # its pool must be there when it is freed
cdef class PinnedBlock(Block):
    cdef PinnedPool pool
    cdef size_t size

    def __dealloc__(self):
        if self.pool is not None:
            self.pool.give(self.ptr, self.size)
            self.ptr = NULL  # Block would free it


# ---------------------------------------------------------------- queue and batches

cdef check(int result, str doing):
    if result:
        raise Internal(f"{error_name(result)} while {doing}", reason=Reason.BACKEND)


def error_name(int code) -> str:
    """The driver's name of an error code, such as CUDA_ERROR_ILLEGAL_ADDRESS."""
    cdef const char* name = NULL
    try:
        if cu.cuGetErrorName(<cu.CUresult>code, &name) == 0 and name != NULL:
            return name.decode()
    except Exception:  # no driver at all
        pass
    return f"CUDA error {code}"


cdef class DeviceQueue:
    """One instance's streams, slots and functions. Made, used and closed on the instance's thread."""

    cdef Queue c
    cdef readonly PinnedPool pinned
    cdef object owner

    def __init__(self, uintptr_t context, uintptr_t pool, list functions, PinnedPool pinned, bint busy_wait,
                 bint use_graphs, owner):
        """`functions` are CUfunction addresses in the order of plans (0: not used); `owner` keeps
        context and module alive."""
        cdef int i
        cdef Slot* s
        cdef uintptr_t function
        cdef unsigned int flags = 0 if busy_wait else 1  # CU_EVENT_BLOCKING_SYNC
        self.owner = owner
        self.pinned = pinned
        self.c.context = <cu.CUcontext>context
        self.c.pool = <cu.CUmemoryPool>pool
        self.c.busy_wait = busy_wait
        self.c.use_graphs = use_graphs
        check(cu.cuCtxSetCurrent(self.c.context), "making the context current")
        self.c.n_functions = len(functions)
        self.c.functions = <cu.CUfunction*>calloc(max(len(functions), 1), sizeof(cu.CUfunction))
        if self.c.functions == NULL:
            raise MemoryError
        for i in range(len(functions)):
            function = functions[i]
            self.c.functions[i] = <cu.CUfunction>function
        check(cu.cuStreamCreate(&self.c.compute, 1), "creating a stream")  # non-blocking
        check(cu.cuStreamCreate(&self.c.copy, 1), "creating a stream")
        for i in range(2):
            s = &self.c.slots[i]
            check(cu.cuEventCreate(&s.begin, 0), "creating an event")
            check(cu.cuEventCreate(&s.staged, 0), "creating an event")
            check(cu.cuEventCreate(&s.started, 0), "creating an event")
            check(cu.cuEventCreate(&s.ran, 0), "creating an event")
            check(cu.cuEventCreate(&s.done, flags), "creating an event")

    @property
    def broken(self) -> str:
        """The error that made the context unusable, '' while it is fine."""
        return error_name(self.c.broken) if self.c.broken else ""

    def usage(self) -> dict:
        """Bytes held on the device and pinned on the host, and counts of graph launches and batches
        staged ahead of time."""
        return {
            "device_bytes": self.c.device_bytes,
            "pinned_bytes": self.c.pinned_bytes,
            "graph_launches": self.c.graph_launches,
            "staged_ahead": self.c.staged_ahead,
        }

    def close(self):
        """Gives everything back. Errors are ignored: after a broken context nothing else is possible."""
        cdef int i, k
        cdef Slot* s
        if self.c.context == NULL:
            return
        cu.cuCtxSetCurrent(self.c.context)
        if self.c.compute != NULL:
            cu.cuStreamSynchronize(self.c.compute)
        for i in range(2):
            s = &self.c.slots[i]
            for k in range(GRAPHS):
                if s.graphs[k].executable != NULL:
                    cu.cuGraphExecDestroy(s.graphs[k].executable)
            if s.pinned != NULL:
                cu.cuMemFreeHost(s.pinned)
            if s.work_size:
                cu.cuMemFreeAsync(s.work, self.c.compute)
            if s.out_size:
                cu.cuMemFreeAsync(s.out, self.c.compute)
            for event in (<uintptr_t>s.begin, <uintptr_t>s.staged, <uintptr_t>s.started, <uintptr_t>s.ran,
                          <uintptr_t>s.done):
                if event:
                    cu.cuEventDestroy(<cu.CUevent><uintptr_t>event)
        if self.c.compute != NULL:
            cu.cuStreamSynchronize(self.c.compute)
            cu.cuStreamDestroy(self.c.compute)
        if self.c.copy != NULL:
            cu.cuStreamDestroy(self.c.copy)
        free(self.c.functions)
        memset(&self.c, 0, sizeof(Queue))
        self.owner = None


cdef class DeviceBatch(Batch):
    """A prepared batch of a kernel model on a GPU."""

    cdef DeviceQueue queue
    cdef object mailbox
    cdef object on_broken
    cdef list plans
    cdef list blocks
    cdef DeviceWork c

    def __dealloc__(self):
        free(self.c.runs)
        free(self.c.pieces)
        free(self.c.exports)
        free(self.c.addresses)

    def times(self) -> tuple:
        """Start, end of input, start of output and end of the execution, in nanoseconds."""
        return tuple(self.c.times)

    cpdef object deliver(self):
        self.compute_start = self.c.times[0]
        self.input_end = self.c.times[1]
        self.output_start = self.c.times[2]
        self.compute_end = self.c.times[3]
        if self.c.status:
            name = error_name(self.c.status)
            doing = self.c.doing.decode() if self.c.doing != NULL else "executing"
            self.error = Internal(f"model '{self.model.name}': {name} while {doing}", reason=Reason.BACKEND)
            if sticky(self.c.status) and self.on_broken is not None:
                self.on_broken(self.model, name)
        return Batch.deliver(self)


cdef class DeviceBuilder:
    """Makes DeviceBatches: `plan(shapes, batch)` is asked once per distinct shapes."""

    cdef list names
    cdef list optional
    cdef bint batching
    cdef int device
    cdef object plan
    cdef object on_broken
    cdef object regions
    cdef DeviceQueue queue
    cdef dict plans

    def __init__(self, list names, list optional, bint batching, int device, plan, on_broken, regions):
        """`regions(name, offset, size)` gives (address, owner) of a registered device region, or None."""
        if len(names) > 64:
            raise InvalidArgument(f"a kernel model on a GPU has at most 64 inputs, got {len(names)}")
        self.names = names
        self.optional = optional
        self.batching = batching
        self.device = device
        self.plan = plan
        self.on_broken = on_broken
        self.regions = regions
        self.plans = {}

    def use(self, DeviceQueue queue):
        """The queue that batches run on; None drops it."""
        self.queue = queue
        self.plans = {}

    cdef list find_inputs(self, InferRequest r):
        """The request's tensors in configured order, None for an optional one that is absent."""
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
            if here is not None and (<Tensor>here).memory_kind == 2 and (<Tensor>here).memory_id != self.device:
                raise InvalidArgument(
                    f"input '{self.names[i]}' lies on GPU {(<Tensor>here).memory_id}, this instance of "
                    f"'{r.model_name}' runs on GPU {self.device}")
            found.append(here)
        return found

    def prepare(self, Batch batch not None, Mailbox mailbox not None):
        """The batch as one that runs on the device; requests that don't fit fail on their own."""
        cdef DeviceBatch made = DeviceBatch(batch.model, batch.requests, batch.close_reason, batch.oldest_wait_ns)
        cdef list requests = batch.requests
        cdef Py_ssize_t n = len(requests), i, j, start
        cdef int k, n_inputs = len(self.names), most = 0
        cdef list tensors = [], keys = [], mine
        cdef int64_t size
        cdef KernelPlan plan
        cdef Block block
        cdef Tensor t
        cdef DeviceRun* run
        cdef DevicePiece* piece
        cdef InferRequest r
        cdef size_t at[64]
        made.instance = batch.instance
        made.queue = self.queue
        made.mailbox = mailbox
        made.on_broken = self.on_broken
        made.plans = []
        made.blocks = []
        made.off_loop = True  # a GPU batch waits
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
            i = start + 1
            size = (<InferRequest>requests[start]).batch_size
            while i < n and self.batching and keys[i] is not None and same_rows(keys[start], keys[i]):
                size += (<InferRequest>requests[i]).batch_size
                i += 1
            try:
                plan = self.plan_for(keys[start], size)
                block = self.queue.pinned.take(plan.c.output_bytes)
            except (TritonError, MemoryError) as error:
                failure = error if isinstance(error, TritonError) else Internal(str(error), reason=Reason.BACKEND)
                for j in range(start, i):
                    made.responses[j] = InferResponse(None, failure)
                start = i
                continue
            run = &made.c.runs[made.c.n_runs]
            made.c.n_runs += 1
            run.plan = &plan.c
            run.output = block.ptr
            run.first_piece = made.c.n_pieces
            run.gather = i - start > 1
            made.plans.append(plan)
            made.blocks.append(block)
            for k in range(n_inputs):
                at[k] = plan.c.tensors[k].offset
            for j in range(start, i):
                mine = tensors[j]
                for k in range(n_inputs):
                    t = mine[k]
                    if t is None:
                        continue
                    piece = &made.c.pieces[made.c.n_pieces]
                    made.c.n_pieces += 1
                    piece.slot = k
                    piece.on_device = t.memory_kind == 2
                    piece.source = t.ptr
                    piece.nbytes = t.nbytes
                    piece.offset = at[k]
                    at[k] += t.nbytes
                    if piece.on_device and not run.gather:
                        run.own_inputs = True
            run.n_pieces = made.c.n_pieces - run.first_piece
            self.respond(made, run, plan, block, start, i)
            most = max(most, plan.c.n_slots)
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
            plan = self.plan(whole, batch)
            if len(self.plans) >= 1024:
                self.plans.clear()
            self.plans[key] = plan
        return plan

    cdef int respond(self, DeviceBatch made, DeviceRun* run, KernelPlan plan, Block block, Py_ssize_t start,
                     Py_ssize_t end) except -1:
        """The responses of one run: views of the pinned block, or of the regions outputs go to."""
        cdef Py_ssize_t j
        cdef int k, slot, wanted = 0
        cdef InferRequest r
        cdef Tensor t
        cdef RequestedOutput asked
        cdef list outputs
        cdef int64_t row = 0
        cdef size_t per_row, offset, nbytes
        cdef PlanTensor* p
        cdef Export* export
        for j in range(start, end):
            r = made.requests[j]
            if self.regions is not None and r.outputs is not None:
                for asked in r.outputs:
                    wanted += asked.shm_region is not None
        if wanted:
            export = <Export*>calloc(made.c.n_exports + (end - start) * plan.c.n_outputs, sizeof(Export))
            if export == NULL:
                raise MemoryError
            if made.c.exports != NULL:
                memcpy(export, made.c.exports, made.c.n_exports * sizeof(Export))
                free(made.c.exports)
            made.c.exports = export
            run.first_export = made.c.n_exports
        for j in range(start, end):
            r = made.requests[j]
            outputs = []
            error = None
            for k in range(plan.c.n_outputs):
                slot = plan.c.n_inputs + k
                p = &plan.c.tensors[slot]
                t = Tensor.__new__(Tensor)
                t.name = plan.names[slot]
                t.dtype = plan.dtypes[slot]
                if end - start == 1:
                    offset = p.offset
                    nbytes = p.nbytes
                    t.shape = plan.shapes[slot]
                else:
                    per_row = p.nbytes // <size_t>plan.batch if plan.batch else 0
                    offset = p.offset + row * per_row
                    nbytes = r.batch_size * per_row
                    t.shape = (r.batch_size, *plan.shapes[slot][1:])
                t.owner = block
                t.ptr = block.ptr + offset
                t.nbytes = nbytes
                if wanted:
                    export = &made.c.exports[made.c.n_exports]
                    made.c.n_exports += 1
                    run.n_exports += 1
                    export.offset = offset
                    export.nbytes = nbytes
                    for asked in (r.outputs or ()):
                        if asked.name == t.name and asked.shm_region is not None:
                            try:
                                place = self.regions(asked.shm_region, asked.shm_offset, asked.shm_byte_size,
                                                     nbytes, t.name)
                            except TritonError as problem:
                                error = problem
                                break
                            if place is not None:
                                export.target = <cu.CUdeviceptr><uintptr_t>place[0]
                                t.owner = place[1]
                                t.ptr = <const char*><uintptr_t>place[0]
                                t.memory_kind = 2
                                t.memory_id = self.device
                outputs.append(t)
            made.responses[j] = InferResponse(outputs) if error is None else InferResponse(None, error)
            row += r.batch_size
        return 0


def time_bare(DeviceBatch batch not None, int rounds, bint copies) -> list:
    """Nanoseconds of each of `rounds` repetitions of a prepared batch's work, without anything of the
    server around it: kernels and one wait, with `copies` also the transfers. For benchmarks."""
    cdef DeviceWork* w = &batch.c
    cdef DeviceRun* run = &w.runs[0]
    cdef Queue* q = w.queue
    cdef Slot* s
    cdef int i, r
    cdef int64_t start
    cdef list times = []
    if w.n_runs != 1:
        raise ValueError("the batch must be a single run")
    check(cu.cuCtxSetCurrent(q.context), "making the context current")
    check(stage(w, run), "staging")
    check(launch_run(w, run), "launching")
    check(finish(w, run), "waiting")
    s = &q.slots[run.slot]
    for i in range(rounds):
        start = now_ns()
        with nogil:
            if copies:
                r = stage(w, run)
                if r == 0:
                    r = launch_run(w, run)
                if r == 0:
                    r = finish(w, run)
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
        times.append(now_ns() - start)
    return times


cdef bint same_rows(tuple a, tuple b):
    """Equal shapes apart from the batch dimension."""
    for x, y in zip(a, b):
        if x is None or y is None:
            if x is not y:
                return False
        elif x[1:] != y[1:]:
            return False
    return True
