# distutils: language = c++
"""What is queued for one run of a kernel model on a GPU: copies in, launches, copies out. All without the GIL.

A run passes through two steps, of which advance_run() does as much as does not take long:

    stage    gathers the inputs in its slot's page-locked buffer, a CHUNK at a time, each of which is sent to the device
    launch   launches the kernels and queues the copies of the outputs

cuda_pipeline calls it, for the run that is awaited and for those after it, and waits for their ends. While nothing else
is under way one stream does everything for a small run, because an event between two streams costs more than a small
copy. Otherwise copies in, kernels and copies out have a stream each, with events between them.

Rules:
 1. A slot belongs to one run from its first chunk to its end; runs take the slots in turn,
    from the first one when none is under way.
 2. Large outputs arrive in page-locked blocks, of which the responses are views. A block returns to its pool when the
    last of these responses was sent. Small outputs arrive in the slot and are copied on the host, which takes less
    time than a driver call; so a small run uses no addresses but its slot's, and after some executions of its shapes
    all of it is one graph (cuda_graph).
 3. A large input that was received into page-locked memory is sent from there.
 4. Device memory of others (a registered region, a tensor of another step, a sequence's state) is read and written
    in place for a lone request, and copied on the device when several requests are gathered. cuda_batch decides
    which; the code here follows its arrays.
 5. Outputs that stay on the device get memory of their own from the pool, allocated in the compute stream. Their
    tensors know the address after the batch was delivered.
 6. A copy to ordinary memory does not return before it is done, with all that was queued before it in its stream. So
    it is made when the kernels have ended (copy_late), in a stream that has nothing else.
 7. Times are measured for the first executions of a plan and then for one in SAMPLE; the others get the last ones.
"""
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy, memset

cimport cuda.bindings.cydriver as cu

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.cuda_graph cimport end_recording, graph_of, not_recorded
from neptrio.backends.kernel.cuda_memory cimport (
    DeviceBlock,
    allocate,
    give_access,
    wait_stream,
)
from neptrio.backends.kernel.cuda_pinned cimport PINNED, pin
from neptrio.backends.kernel.cuda_queue cimport SLOTS, SMALL_BLOCK, Graph, Queue, Slot, ensure
from neptrio.backends.kernel.plan cimport KernelArgument, KernelLaunch, Plan, PlanTensor
from neptrio.request.infer_request cimport Tensor, now_ns

from neptrio.backends.kernel.cuda_error import error_name
from neptrio.errors import Code, Internal, Reason, TritonError

cdef enum:
    GRAPH_AFTER = 3
    MAX_ARGUMENTS = 256
    TIMED_FIRST = 4     # so many executions of a plan are timed, then one in SAMPLE
    SAMPLE = 64
    CHUNK = 1 << 19     # bytes; gathering them takes some tens of microseconds, sending them about ten
    PATIENCE = 30       # seconds that a late copy may take


cdef int advance_run(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Stages a chunk of the run and, after the last one, launches it: then w.launched grows. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef int r
    if not run.begun:
        r = begin(w, run)
        if r:
            return r
    r = gather(w, run)
    if r or run.piece < run.n_pieces:
        return r
    r = launch(w, run)
    if r == 0:
        w.doing = "executing"
        w.launched += 1
        if q.under_way > 1:
            q.launched_ahead += 1
    return r


cdef int begin(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Gives the run a slot, which must be free. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s
    cdef cu.CUstream stream
    cdef int r
    if q.under_way == 0:
        q.next = 0  # its graphs were recorded first
    s = &q.slots[q.next]
    run.begun = True
    run.slot = q.next
    q.next = (q.next + 1) % SLOTS
    run.apart = q.under_way > 0 or plan.input_bytes + plan.output_bytes > CHUNK
    q.under_way += 1
    run.timed = plan.runs < TIMED_FIRST or plan.runs % SAMPLE == 0
    run.graph = NULL
    run.late = False
    run.piece = 0
    run.within = run.gathered = run.sent = 0
    run.launched = now_ns()
    plan.runs += 1
    w.doing = "allocating memory"
    stream = q.inward if run.apart else q.compute
    r = ensure(q, s, plan, run.small, stream)
    if r == 0 and run.timed:
        r = cu.cuEventRecord(s.begin, stream)
    return r


cdef int gather(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Copies the next CHUNK of the inputs to the device, or nothing if a graph will do that. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Slot* s = &q.slots[run.slot]
    cdef DevicePiece* piece
    cdef cu.CUstream stream = q.inward if run.apart else q.compute
    cdef size_t left = CHUNK, part
    cdef int r
    cdef bint on_host = True
    w.doing = "copying inputs"
    while run.piece < run.n_pieces and left:
        piece = &w.pieces[run.first_piece + run.piece]
        if piece.on_device or (piece.pin != NULL and piece.pin.state == PINNED):
            on_host = False
            r = send(run, s, stream) or copy_piece(q, s, piece, stream)
            if r:
                return r
            run.sent = run.gathered = piece.offset + piece.nbytes
            run.piece += 1
            continue
        if run.gathered == run.sent and run.within == 0:
            run.gathered = run.sent = piece.offset
        part = min(piece.nbytes - run.within, left)
        if part:  # the pointer of an empty tensor may be NULL
            memcpy(s.pinned + piece.offset + run.within, piece.source + run.within, part)
        run.within += part
        left -= part
        run.gathered = piece.offset + run.within
        if run.within == piece.nbytes:
            run.within = 0
            run.piece += 1
    if run.piece == run.n_pieces and on_host and whole_is_small(q, run):
        r = whole(w, run, s)
        if r or run.graph != NULL:
            return r
    return send(run, s, stream)


cdef int send(DeviceRun* run, Slot* s, cu.CUstream stream) noexcept nogil:
    """Queues the copy of what was gathered and not sent. Returns a CUresult."""
    cdef size_t start = run.sent
    if run.gathered <= start:
        return 0
    run.sent = run.gathered
    return cu.cuMemcpyHtoDAsync(s.work + start, s.pinned + start, run.gathered - start, stream)


cdef int copy_piece(Queue* q, Slot* s, DevicePiece* piece, cu.CUstream stream) noexcept nogil:
    """Queues the copy of an input that lies in device memory or in page-locked memory. Returns a CUresult."""
    cdef cu.CUdeviceptr to = s.work + piece.offset
    if piece.nbytes == 0 or piece.in_place:
        return 0
    if not piece.on_device:
        return cu.cuMemcpyHtoDAsync(to, piece.source, piece.nbytes, stream)
    if piece.peer == NULL:
        return cu.cuMemcpyDtoDAsync(to, <cu.CUdeviceptr><uintptr_t>piece.source, piece.nbytes, stream)
    give_access(piece.peer, q.memory.ordinal)
    return cu.cuMemcpyPeerAsync(to, q.memory.context, <cu.CUdeviceptr><uintptr_t>piece.source, piece.peer.context,
                                piece.nbytes, stream)


cdef bint whole_is_small(Queue* q, DeviceRun* run) noexcept nogil:
    """Whether all of a run whose inputs were gathered may be one graph."""
    return q.use_graphs and run.small and run.plan.input_bytes <= SMALL_BLOCK and not run.timed


cdef int copy_in(Plan* plan, Slot* s, cu.CUstream stream) noexcept nogil:
    return cu.cuMemcpyHtoDAsync(s.work, s.pinned, plan.input_bytes, stream) if plan.input_bytes else 0


cdef int copy_out(Plan* plan, Slot* s, cu.CUstream stream) noexcept nogil:
    if plan.output_bytes == 0:
        return 0
    return cu.cuMemcpyDtoHAsync(s.pinned + plan.input_bytes, s.out, plan.output_bytes, stream)


cdef int whole(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Sets `run.graph` to the graph of all that the run does, recorded here at the third use. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Graph* graph = graph_of(s, run.plan)
    cdef int r
    graph.uses += 1
    if graph.executable == NULL:
        if graph.uses < GRAPH_AFTER:
            return 0
        find_addresses(w, run, s)
        w.doing = "recording a graph"
        r = cu.cuStreamBeginCapture(q.compute, cu.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        if r == 0:
            r = copy_in(run.plan, s, q.compute)
            if r == 0:
                r = kernels(w, run, s)
            if r == 0:
                r = copy_out(run.plan, s, q.compute)
            r = end_recording(q.compute, graph, r)
        if r:
            return not_recorded(q, graph, r)
    run.graph = graph
    return 0


cdef void find_addresses(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Where each tensor is: in the slot, or for inputs that are read in place where they lie."""
    cdef Plan* plan = run.plan
    cdef DevicePiece* piece
    cdef int i
    for i in range(plan.n_slots):
        w.addresses[i] = plan.tensors[i].offset + (
            s.out if plan.n_inputs <= i < plan.n_inputs + plan.n_outputs else s.work)
    for i in range(plan.n_inputs):
        w.addresses[i] = 0  # an optional input that no request has is a null pointer for the kernel
    for i in range(run.n_pieces):
        piece = &w.pieces[run.first_piece + i]
        if piece.in_place:
            w.addresses[piece.slot] = <cu.CUdeviceptr><uintptr_t>piece.source
        else:
            w.addresses[piece.slot] = s.work + plan.tensors[piece.slot].offset


cdef int kernels(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Queues clears and launches on the compute stream, or into the graph being recorded."""
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
        if launch.cooperative or launch.cluster[0]:
            r = launch_with_attributes(q.functions[launch.kernel], launch, q.compute, arguments)
        else:
            r = cu.cuLaunchKernel(q.functions[launch.kernel], launch.grid[0], launch.grid[1], launch.grid[2],
                                  launch.block[0], launch.block[1], launch.block[2], launch.shared, q.compute,
                                  arguments, NULL)
        if r:
            return r
    return 0


cdef int launch_with_attributes(cu.CUfunction function, KernelLaunch* launch, cu.CUstream stream,
                                void** arguments) noexcept nogil:
    """A launch whose blocks run at once or in clusters. Returns a CUresult."""
    cdef cu.CUlaunchConfig config
    cdef cu.CUlaunchAttribute attributes[2]
    memset(&config, 0, sizeof(config))
    memset(attributes, 0, sizeof(attributes))
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid[0], launch.grid[1], launch.grid[2]
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block[0], launch.block[1], launch.block[2]
    config.sharedMemBytes = launch.shared
    config.hStream = stream
    config.attrs = attributes
    if launch.cooperative:
        attributes[config.numAttrs].id = cu.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attributes[config.numAttrs].value.cooperative = 1
        config.numAttrs += 1
    if launch.cluster[0]:
        attributes[config.numAttrs].id = cu.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attributes[config.numAttrs].value.clusterDim.x = launch.cluster[0]
        attributes[config.numAttrs].value.clusterDim.y = launch.cluster[1]
        attributes[config.numAttrs].value.clusterDim.z = launch.cluster[2]
        config.numAttrs += 1
    return cu.cuLaunchKernelEx(&config, function, arguments, NULL)


cdef int record(DeviceWork* w, DeviceRun* run, Slot* s, Graph* graph) noexcept nogil:
    """Records the plan's kernels as a graph. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef int r
    w.doing = "recording a graph"
    r = cu.cuStreamBeginCapture(q.compute, cu.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if r == 0:
        r = end_recording(q.compute, graph, kernels(w, run, s))
    return not_recorded(q, graph, r) if r else 0


cdef int launch(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Queues everything after staging, up to the event that tells its end. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s = &q.slots[run.slot]
    cdef cu.CUstream into = q.inward if run.apart else q.compute
    cdef cu.CUstream out = q.outward if run.apart else q.compute
    cdef Graph* graph = NULL
    cdef int r = 0
    run.launched = now_ns()
    if run.graph != NULL:
        w.doing = "launching a graph"
        r = cu.cuGraphLaunch(run.graph.executable, q.compute)
        q.graph_launches += 1
        return r or cu.cuEventRecord(s.done, q.compute)
    if run.pin != NULL:
        pin(run.pin)  # before the kernels are queued: it may take long
    find_addresses(w, run, s)
    r = make_outputs(w, run)
    if r:
        return r
    w.doing = "waiting for the inputs"
    if run.timed:
        r = cu.cuEventRecord(s.staged, into)
    if r == 0 and run.apart:
        r = cu.cuEventRecord(s.ready, into) or cu.cuStreamWaitEvent(q.compute, s.ready, 0)
    if r == 0 and run.timed:
        r = cu.cuEventRecord(s.started, q.compute)
    if r:
        return r
    if q.use_graphs and plan.n_launches > 1 and not run.own_memory and not run.small:
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
    if r == 0 and run.timed:
        r = cu.cuEventRecord(s.ran, q.compute)
    if r:
        return r
    w.doing = "copying outputs"
    if run.apart:
        r = cu.cuEventRecord(s.computed, q.compute) or cu.cuStreamWaitEvent(out, s.computed, 0)
    if r == 0:
        r = copies_out(w, run, s, out)
    if r == 0 and run.timed:
        r = cu.cuEventRecord(s.ended, out)
    return r or cu.cuEventRecord(s.done, out)


cdef int make_outputs(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Allocates the outputs that stay on the device, and lets kernels write where that is possible. Returns a
    CUresult."""
    cdef Queue* q = w.queue
    cdef Export* export
    cdef int i, r
    w.doing = "allocating outputs"
    for i in range(run.n_exports):
        export = &w.exports[run.first_export + i]
        if export.kept != NULL and export.nbytes:
            r = allocate(q.memory, export.kept, export.nbytes, q.compute)
            if r:
                return r
            export.target = export.kept[0]
        if export.direct and export.target:
            w.addresses[export.slot] = export.target
    return 0


cdef int copies_out(DeviceWork* w, DeviceRun* run, Slot* s, cu.CUstream stream) noexcept nogil:
    """Queues the copies of the outputs to where they go, but for late ones. Returns a CUresult."""
    cdef Export* export
    cdef int i, r = 0
    if run.small:
        return copy_out(run.plan, s, stream)
    run.late = run.output != NULL and (run.pin == NULL or run.pin.state != PINNED)
    for i in range(run.n_exports):
        export = &w.exports[run.first_export + i]
        if export.target and export.nbytes and not export.direct:
            r = cu.cuMemcpyDtoDAsync(export.target, s.out + export.offset, export.nbytes, stream)
            if r:
                return r
    return 0 if run.late else copies_to_host(w, run, s, stream)


cdef int copies_to_host(DeviceWork* w, DeviceRun* run, Slot* s, cu.CUstream stream) noexcept nogil:
    """Copies what goes to `run.output`: all of the output block, or some exports. Returns a CUresult."""
    cdef Export* export
    cdef int i, r = 0
    if run.n_exports == 0 and run.plan.output_bytes:
        return cu.cuMemcpyDtoHAsync(run.output, s.out, run.plan.output_bytes, stream)
    for i in range(run.n_exports):
        export = &w.exports[run.first_export + i]
        if not export.target and export.nbytes and not export.direct:
            r = cu.cuMemcpyDtoHAsync(run.output + export.offset, s.out + export.offset, export.nbytes, stream)
            if r:
                return r
    return 0


cdef int copy_late(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Copies the outputs of a run that has ended to ordinary memory (rule 6). Returns a CUresult."""
    cdef int r
    w.doing = "copying outputs"
    r = copies_to_host(w, run, s, w.queue.last)
    return r or wait_stream(w.queue.memory, w.queue.last, PATIENCE)


cdef int fence(Queue* q, Slot* s) noexcept nogil:
    """Has the slot's event tell the end of all that was queued in any stream: for a run whose launch has failed half
    way. Returns a CUresult."""
    cdef int r = cu.cuEventRecord(s.ready, q.inward)
    if r == 0:
        r = cu.cuStreamWaitEvent(q.compute, s.ready, 0)
    if r == 0:
        r = cu.cuEventRecord(s.computed, q.compute)
    if r == 0:
        r = cu.cuStreamWaitEvent(q.outward, s.computed, 0)
    return r or cu.cuEventRecord(s.done, q.outward)


cdef class DeviceBatch(Batch):
    """A prepared batch of a kernel model on a GPU."""

    def __dealloc__(self):
        free(self.c.runs)
        free(self.c.pieces)
        free(self.c.exports)
        free(self.c.addresses)

    def times(self) -> tuple:
        # type: () -> tuple[int, ...]
        """Start, end of input, start of output and end of the execution, in nanoseconds."""
        return tuple(self.c.times)

    def settle(self):
        """After the batch has run: sets the addresses of its tensors in device memory."""
        cdef Tensor tensor
        cdef DeviceBlock block
        for tensor, block in self.kept:
            tensor.ptr = <const char*><uintptr_t>block.address

    cpdef object deliver(self):
        # type: () -> None
        self.compute_start = self.c.times[0]
        self.input_end = self.c.times[1]
        self.output_start = self.c.times[2]
        self.compute_end = self.c.times[3]
        if self.kept:
            self.settle()
        if self.queue.c.grown != self.queue.told:
            self.queue.told = self.queue.c.grown
            self.host.memory_changed()
        if self.c.status:
            name = error_name(self.c.status)
            doing = self.c.doing.decode() if self.c.doing != NULL else "executing"
            what = f"model '{self.model.name}': {name} while {doing}"
            if self.c.late:
                seconds = self.c.queue.limit_ns / 1e9
                name = f"no end of a kernel within {seconds:g} s (EXECUTE_TIMEOUT_SECONDS)"
                self.error = TritonError(f"model '{self.model.name}': {name}", Code.TIMED_OUT, Reason.BACKEND)
            else:
                self.error = Internal(what, reason=Reason.BACKEND)
            if self.queue.pool.broken:
                self.host.broke(name)
        return Batch.deliver(self)
