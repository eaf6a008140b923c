# distutils: language = c++
"""Runs kernel models on a GPU: staging, launching and waiting, all without the GIL.

A batch is executed in three steps:

    stage    gathers its inputs in a slot's page-locked buffer and copies them to the device
    launch   launches the kernels, copies the outputs back
    finish   waits for one event

Between launch and finish the instance's thread takes the next batch out of its mailbox, if there is one, and stages it
into the other slot, with the copy stream, so that its copies to the device overlap the kernels. While nothing else is
under way one stream does everything: an event between two streams costs more than a small copy.

Rules:
 1. A slot belongs to one batch from stage to finish; batches alternate between the two slots.
 2. Large outputs arrive in page-locked blocks, of which the responses are views. A block returns to its pool when the
    last of these responses was sent. Small outputs arrive in the slot and are copied on the host, which takes less
    time than a driver call; so a small batch uses no addresses but its slot's, and after some executions of its shapes
    all of it is one graph (cuda_graph).
 3. Device memory of others (a registered region, a tensor of another step, a sequence's state) is read and written
    in place for a lone request, and copied on the device when several requests are gathered. cuda_batch decides
    which; the code here follows its arrays.
 4. Outputs that stay on the device get memory of their own from the pool, allocated in the compute stream. Their
    tensors know the address after the batch was delivered.
 5. A driver error fails the batch, with the error's name. Then both streams are waited for, so that nothing still
    uses the batch's memory. An error that breaks the context is noted in the pool, and from then on no batch of any
    instance on that GPU calls the driver.
 6. Nothing waits for ever: an execution that takes longer than its limit breaks the context, because no kernel can be
    stopped in any other way than by ending the process. A copy to ordinary memory, which does not return before it is
    done, is made only when the kernels have ended.
 7. Times are measured for the first executions of a plan and then for one in SAMPLE; the others get the last ones.
"""
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy

cimport cuda.bindings.cydriver as cu

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.cuda_graph cimport end_recording, graph_of
from neptrio.backends.kernel.cuda_memory cimport (
    PINNED,
    DeviceBlock,
    Memory,
    allocate,
    give_access,
    judged,
    nap,
    nap_after,
    pin,
    wait_stream,
)
from neptrio.backends.kernel.cuda_queue cimport SMALL_BLOCK, Graph, Queue, Slot, ensure
from neptrio.backends.kernel.plan cimport KernelArgument, KernelLaunch, Plan, PlanTensor
from neptrio.loop.mailbox cimport Mailbox, Work
from neptrio.request.infer_request cimport Tensor, now_ns

from neptrio.backends.kernel.cuda_error import error_name
from neptrio.errors import Code, Internal, Reason, TritonError

cdef enum:
    GRAPH_AFTER = 3
    MAX_ARGUMENTS = 256
    TIMED_FIRST = 4     # so many executions of a plan are timed, then one in SAMPLE
    SAMPLE = 64
    LONG_NS = 200000    # an execution that took longer last time is slept through at first
    LONG_NAP_NS = 2000000


cdef int stage(DeviceWork* w, DeviceRun* run, bint ahead) noexcept nogil:
    """Copies the inputs to the device; `ahead`: while another batch executes. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s
    cdef DevicePiece* piece
    cdef cu.CUstream stream = q.copy if ahead else q.compute
    cdef int i, r, on_host = 0
    run.slot = q.next
    q.next = 1 - q.next
    s = &q.slots[run.slot]
    run.timed = plan.runs < TIMED_FIRST or plan.runs % SAMPLE == 0
    run.apart = ahead
    run.graph = NULL
    plan.runs += 1
    w.doing = "allocating memory"
    r = ensure(q, s, plan, run.small)
    if r:
        return r
    w.doing = "copying inputs"
    for i in range(run.n_pieces):
        piece = &w.pieces[run.first_piece + i]
        if not piece.on_device:
            if piece.nbytes:      # the pointer of an empty tensor may be NULL
                memcpy(s.pinned + piece.offset, piece.source, piece.nbytes)
            on_host += 1
    if q.use_graphs and run.small and on_host == run.n_pieces and plan.input_bytes <= SMALL_BLOCK and not run.timed:
        r = whole(w, run, s)
        if r or run.graph != NULL:
            return r
    if run.timed:
        r = cu.cuEventRecord(s.begin, stream)
        if r:
            return r
    if on_host == run.n_pieces and on_host:
        r = copy_in(plan, s, stream)
        if r:
            return r
    else:
        for i in range(run.n_pieces):
            piece = &w.pieces[run.first_piece + i]
            if piece.nbytes == 0:
                continue
            if not piece.on_device:
                r = cu.cuMemcpyHtoDAsync(s.work + piece.offset, s.pinned + piece.offset, piece.nbytes, stream)
            elif piece.peer != NULL:
                give_access(piece.peer, q.memory.ordinal)
                r = cu.cuMemcpyPeerAsync(s.work + piece.offset, q.memory.context,
                                         <cu.CUdeviceptr><uintptr_t>piece.source, piece.peer.context, piece.nbytes,
                                         stream)
            elif not piece.in_place:
                r = cu.cuMemcpyDtoDAsync(s.work + piece.offset, <cu.CUdeviceptr><uintptr_t>piece.source,
                                         piece.nbytes, stream)
            if r:
                return r
    return cu.cuEventRecord(s.staged, stream) if run.apart or run.timed else 0


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
        if r:
            return r
        r = copy_in(run.plan, s, q.compute)
        if r == 0:
            r = kernels(w, run, s)
        if r == 0:
            r = copy_out(run.plan, s, q.compute)
        r = end_recording(q.compute, graph, r)
        if r:
            return r
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
        r = cu.cuLaunchKernel(q.functions[launch.kernel], launch.grid[0], launch.grid[1], launch.grid[2],
                              launch.block[0], launch.block[1], launch.block[2], launch.shared, q.compute,
                              arguments, NULL)
        if r:
            return r
    return 0


cdef int record(DeviceWork* w, DeviceRun* run, Slot* s, Graph* graph) noexcept nogil:
    """Records the plan's kernels as a graph. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef int r
    w.doing = "recording a graph"
    r = cu.cuStreamBeginCapture(q.compute, cu.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    if r:
        return r
    return end_recording(q.compute, graph, kernels(w, run, s))


cdef int launch_run(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Queues everything after staging, up to the event for which finish() waits. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s = &q.slots[run.slot]
    cdef Graph* graph
    cdef Export* export
    cdef int i, r
    run.launched = now_ns()
    if run.graph != NULL:
        w.doing = "launching a graph"
        r = cu.cuGraphLaunch(run.graph.executable, q.compute)
        q.graph_launches += 1
        return r or cu.cuEventRecord(s.done, q.compute)
    if run.pin != NULL:
        pin(run.pin)  # before anything is queued: it may take long
    find_addresses(w, run, s)
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
    w.doing = "waiting for the inputs"
    if run.apart:
        r = cu.cuStreamWaitEvent(q.compute, s.staged, 0)
        if r:
            return r
    if run.timed:
        r = cu.cuEventRecord(s.started, q.compute)
        if r:
            return r
    graph = NULL
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
    if r:
        return r
    if run.timed:
        r = cu.cuEventRecord(s.ran, q.compute)
        if r:
            return r
    r = copies_out(w, run, s)
    if r == 0 and run.timed:
        r = cu.cuEventRecord(s.timed, q.compute)
    return r or cu.cuEventRecord(s.done, q.compute)


cdef int copies_out(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Queues the copies of the outputs to where they go. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Export* export
    cdef int i, r = 0
    if run.small:
        w.doing = "copying outputs"
        return copy_out(plan, s, q.compute)
    if run.output != NULL and (run.pin == NULL or run.pin.state != PINNED):
        r = cu.cuEventRecord(s.done, q.compute)
        if r == 0:
            r = wait_done(w, run, s)  # rule 6
        if r:
            return r
    w.doing = "copying outputs"
    if run.n_exports == 0:
        if plan.output_bytes:
            r = cu.cuMemcpyDtoHAsync(run.output, s.out, plan.output_bytes, q.compute)
        return r
    for i in range(run.n_exports):
        export = &w.exports[run.first_export + i]
        if export.nbytes == 0 or export.direct:
            continue
        if export.target:
            r = cu.cuMemcpyDtoDAsync(export.target, s.out + export.offset, export.nbytes, q.compute)
        else:
            r = cu.cuMemcpyDtoHAsync(run.output + export.offset, s.out + export.offset, export.nbytes, q.compute)
        if r:
            return r
    return 0


cdef int wait_done(DeviceWork* w, DeviceRun* run, Slot* s) noexcept nogil:
    """Waits for the run's last event by asking for it. Returns a CUresult; when it takes longer than it may, the
    context is given up (rule 6)."""
    cdef Queue* q = w.queue
    cdef int64_t waited, pause, expected = <int64_t>run.plan.wait_ns
    cdef int r
    w.doing = "executing"
    while True:
        r = cu.cuEventQuery(s.done)
        if r != cu.CUDA_ERROR_NOT_READY:
            return r
        if q.memory.broken:
            return q.memory.broken
        waited = now_ns() - run.launched
        if q.limit_ns and waited > q.limit_ns:
            w.late = True
            q.memory.broken = cu.CUDA_ERROR_LAUNCH_TIMEOUT
            return q.memory.broken
        if q.busy_wait:
            continue
        pause = nap_after(waited)
        if expected > LONG_NS and waited < expected // 4 * 3:
            pause = min(expected // 4 * 3 - waited, <int64_t>LONG_NAP_NS)
        if pause:
            nap(pause)


cdef int finish(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Waits for the run and reads its event times. Returns a CUresult."""
    cdef Queue* q = w.queue
    cdef Plan* plan = run.plan
    cdef Slot* s = &q.slots[run.slot]
    cdef float ms = 0
    cdef double took
    cdef int r = wait_done(w, run, s)
    if r:
        return r
    took = <double>(now_ns() - run.launched)
    plan.wait_ns = took if plan.wait_ns == 0 else plan.wait_ns + (took - plan.wait_ns) / 8
    if run.small and plan.output_bytes:
        memcpy(run.output, s.pinned + plan.input_bytes, plan.output_bytes)
    if run.timed:
        if cu.cuEventElapsedTime(&ms, s.begin, s.staged) == 0:
            plan.input_ms = ms
        if cu.cuEventElapsedTime(&ms, s.started, s.ran) == 0:
            plan.infer_ms = ms
        if cu.cuEventElapsedTime(&ms, s.ran, s.timed) == 0:
            plan.output_ms = ms
    w.input_ms += plan.input_ms
    w.infer_ms += plan.infer_ms
    w.output_ms += plan.output_ms
    return 0


cdef void run_device(Work* work) noexcept nogil:
    cdef DeviceWork* w = &(<DeviceBatch>work.owner).c
    cdef DeviceWork* following
    cdef Work* ahead
    cdef Queue* q = w.queue
    cdef Memory* memory = q.memory
    cdef int i, r = 0
    if not w.staged:
        w.times[0] = now_ns()
    if memory.broken:
        w.status = memory.broken
        w.doing = "executing"
    else:
        if w.status == 0:
            r = cu.cuCtxSetCurrent(memory.context)
        else:
            r = w.status  # staging it in advance has failed
        for i in range(w.n_runs):
            if r:
                break
            if not (i == 0 and w.staged):
                r = stage(w, &w.runs[i], False)
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
                        following.status = stage(following, &following.runs[0], True)
                        following.staged = True
                        q.staged_ahead += 1
            r = finish(w, &w.runs[i])
        w.status = judged(memory, r)
        if r and not memory.broken:  # until nothing of the failed batch uses its memory any more
            r = wait_stream(memory, q.copy, 5.0) or wait_stream(memory, q.compute, 5.0)
            if r:
                memory.broken = r
    w.times[3] = now_ns()
    w.times[2] = w.times[3] - <int64_t>(w.output_ms * 1e6)
    w.times[1] = w.times[2] - <int64_t>(w.infer_ms * 1e6)
    if w.times[1] < w.times[0]:  # times of events and of the host's clock may differ by some microseconds
        w.times[1] = w.times[0]
    if w.times[2] < w.times[1]:
        w.times[2] = w.times[1]


cdef class DeviceBatch(Batch):
    """A prepared batch of a kernel model on a GPU."""

    def __dealloc__(self):
        free(self.c.runs)
        free(self.c.pieces)
        free(self.c.exports)
        free(self.c.addresses)

    def times(self) -> tuple:
        """Start, end of input, start of output and end of the execution, in nanoseconds."""
        return tuple(self.c.times)

    def settle(self):
        """After the batch has run: sets the addresses of its tensors in device memory."""
        cdef Tensor tensor
        cdef DeviceBlock block
        for tensor, block in self.kept:
            tensor.ptr = <const char*><uintptr_t>block.address

    cpdef object deliver(self):
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
