# distutils: language = c++
"""Runs kernel models on a GPU: staging, launching and waiting, all without the GIL.

A batch is executed in three steps:

    stage    gathers its inputs in a slot's page-locked buffer and copies them to the device (copy stream)
    launch   makes the device wait for that, launches the kernels, copies the outputs back
    finish   waits for one event

Between launch and finish the instance's thread takes the next batch out of its mailbox, if there is one, and stages it
into the other slot, so that its copies to the device overlap the kernels.

Rules:
 1. A slot belongs to one batch from stage to finish; batches alternate between the two slots.
 2. Outputs arrive in page-locked blocks, of which the responses are views. A block returns to its pool when the last
    of these responses was sent. Outputs are never copied on the host.
 3. Device memory of others (a registered region, a tensor of another step, a sequence's state) is read and written
    in place for a lone request, and copied on the device when several requests are gathered. cuda_batch decides
    which; the code here follows its arrays.
 4. Outputs that stay on the device get memory of their own from the pool, allocated in the compute stream. Their
    tensors know the address after the batch was delivered.
 5. A driver error fails the batch, with the error's name. Then both streams are waited for, so that nothing still
    uses the batch's memory. An error that breaks the context is noted in the pool, and from then on no batch of any
    instance on that GPU calls the driver.
 6. A batch runs with the pool's `alive` lock held for reading, so a context is reset only between batches.
"""
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport free
from libc.string cimport memcpy

cimport cuda.bindings.cydriver as cu

from neptrio.execution.batch cimport Batch
from neptrio.backends.kernel.cuda_error cimport sticky
from neptrio.backends.kernel.cuda_graph cimport end_recording, graph_of
from neptrio.backends.kernel.cuda_memory cimport (
    DeviceBlock,
    Memory,
    pthread_rwlock_rdlock,
    pthread_rwlock_unlock,
)
from neptrio.backends.kernel.cuda_queue cimport Graph, Queue, Slot, ensure
from neptrio.backends.kernel.plan cimport KernelArgument, KernelLaunch, Plan, PlanTensor
from neptrio.loop.mailbox cimport Mailbox, Work
from neptrio.request.infer_request cimport Tensor, now_ns

from neptrio.backends.kernel.cuda_error import error_name
from neptrio.errors import Internal, Reason

cdef enum:
    GRAPH_AFTER = 3
    MAX_ARGUMENTS = 256
    SPIN_NS = 30000


cdef int stage(DeviceWork* w, DeviceRun* run) noexcept nogil:
    """Copies the inputs to the device. Returns a CUresult."""
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
            if piece.nbytes:      # the pointer of an empty tensor may be NULL
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
            elif piece.peer != NULL:
                r = cu.cuMemcpyPeerAsync(s.work + piece.offset, q.memory.context,
                                         <cu.CUdeviceptr><uintptr_t>piece.source, piece.peer, piece.nbytes, q.copy)
            elif not piece.in_place:
                r = cu.cuMemcpyDtoDAsync(s.work + piece.offset, <cu.CUdeviceptr><uintptr_t>piece.source,
                                         piece.nbytes, q.copy)
            if r:
                return r
    return cu.cuEventRecord(s.staged, q.copy)


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
    cdef DevicePiece* piece
    cdef PlanTensor* t
    cdef int i, r
    for i in range(plan.n_slots):
        t = &plan.tensors[i]
        w.addresses[i] = (s.out if plan.n_inputs <= i < plan.n_inputs + plan.n_outputs else s.work) + t.offset
    for i in range(plan.n_inputs):
        w.addresses[i] = 0  # an optional input that no request has is a null pointer for the kernel
    for i in range(run.n_pieces):
        piece = &w.pieces[run.first_piece + i]
        if piece.in_place:
            w.addresses[piece.slot] = <cu.CUdeviceptr><uintptr_t>piece.source
        else:
            w.addresses[piece.slot] = s.work + plan.tensors[piece.slot].offset
    w.doing = "allocating outputs"
    for i in range(run.n_exports):
        export = &w.exports[run.first_export + i]
        if export.kept != NULL and export.nbytes:
            r = cu.cuMemAllocFromPoolAsync(export.kept, export.nbytes, q.memory.pool, q.compute)
            if r:
                export.kept[0] = 0
                return r
            export.target = export.kept[0]
        if export.direct and export.target:
            w.addresses[export.slot] = export.target
    w.doing = "waiting for the inputs"
    r = cu.cuStreamWaitEvent(q.compute, s.staged, 0)
    if r:
        return r
    r = cu.cuEventRecord(s.started, q.compute)
    if r:
        return r
    graph = NULL
    if q.use_graphs and plan.n_launches > 1 and not run.own_memory:
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
            if export.nbytes == 0 or export.direct:
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
    cdef Memory* memory = q.memory
    cdef int i, r = 0
    if not w.staged:
        w.times[0] = now_ns()
    pthread_rwlock_rdlock(&memory.alive)
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
            memory.broken = r
        elif r:
            cu.cuStreamSynchronize(q.copy)  # until nothing of the failed batch uses its memory any more
            cu.cuStreamSynchronize(q.compute)
    pthread_rwlock_unlock(&memory.alive)
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
            self.error = Internal(f"model '{self.model.name}': {name} while {doing}", reason=Reason.BACKEND)
            if sticky(self.c.status):
                self.host.broke(name)
        return Batch.deliver(self)
