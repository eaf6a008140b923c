# distutils: language = c++
"""The resources of one instance on a GPU: two streams, two slots, and the slots' growing memory.

A slot has a page-locked staging buffer, a device block for inputs and scratch buffers, a device block for outputs,
events, and the graphs recorded with these addresses. There are two, because one batch is staged while the other
executes (cuda_launch).

Rules:
 1. Memory grows to powers of two and never shrinks while the instance lives. Its bytes are counted; any thread may
    read them.
 2. To grow, the old block is freed in the compute stream, after the work that used it, and the copy stream waits for
    that, because it may use the new block at once. The slot's graphs become invalid. Outgrown page-locked buffers
    are kept until the end, because freeing one may wait for the whole device.
 3. A queue is made and closed on its instance's thread, without the GIL. With a broken context, or when its streams do
    not come to an end, close() passes nothing to the driver: what was taken is lost until the process ends.
"""
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_error cimport check
from neptrio.backends.kernel.cuda_memory cimport DevicePool, PinnedPool, allocate, judged, rounded, wait_stream
from neptrio.backends.kernel.plan cimport Plan


cdef enum:
    PATIENCE = 5  # seconds that close() waits for a stream's end


cdef int ensure(Queue* q, Slot* s, Plan* plan, bint small) noexcept nogil:
    """Grows a slot's memory to the sizes that the plan needs; `small`: the outputs arrive here too. Returns a
    CUresult."""
    cdef int r
    cdef size_t size = plan.input_bytes + (plan.output_bytes if small else 0)
    cdef bint grew = False, changed = False
    if s.pinned_size < size:
        if s.pinned != NULL:
            if s.n_outgrown < OUTGROWN:
                s.outgrown[s.n_outgrown] = s.pinned
                s.n_outgrown += 1
            else:
                cu.cuMemFreeHost(s.pinned)
                q.pinned_bytes -= s.pinned_size
        s.pinned = NULL
        s.pinned_size = 0
        changed = True
        q.grown += 1
        size = rounded(size)
        r = cu.cuMemHostAlloc(<void**>&s.pinned, size, 0)
        if r:
            s.pinned = NULL
            s.generation += 1
            return r
        s.pinned_size = size
        q.pinned_bytes += size
    if s.work_size < plan.work_bytes:
        grew = True
        r = regrow(q, &s.work, &s.work_size, plan.work_bytes)
        if r:
            s.generation += 1
            return r
    if s.out_size < plan.output_bytes:
        grew = True
        r = regrow(q, &s.out, &s.out_size, plan.output_bytes)
        if r:
            s.generation += 1
            return r
    if grew or changed:
        s.generation += 1
    if grew:
        r = cu.cuEventRecord(s.grown, q.compute)
        return r or cu.cuStreamWaitEvent(q.copy, s.grown, 0)
    return 0


cdef int regrow(Queue* q, cu.CUdeviceptr* pointer, size_t* size, size_t wanted) noexcept nogil:
    cdef int r
    cdef size_t want = rounded(wanted)
    q.grown += 1
    if size[0]:
        r = cu.cuMemFreeAsync(pointer[0], q.compute)
        q.device_bytes -= size[0]
        pointer[0] = 0
        size[0] = 0
        if r:
            return r
    r = allocate(q.memory, pointer, want, q.compute)
    if r:
        return r
    size[0] = want
    q.device_bytes += want
    return 0


cdef class DeviceQueue:
    """One instance's streams, slots and functions. Made, used and closed on the instance's thread."""

    def __init__(self, DevicePool pool not None, PinnedPool pinned not None, list functions, bint busy_wait,
                 bint use_graphs, owner, double limit=0):
        """`functions` are CUfunction addresses in the order that plans use (0: not used); `owner` keeps context
        and module alive; `limit` is how many seconds an execution may take, 0 for no limit. Raises Internal after
        freeing what was already allocated."""
        cdef int i
        cdef uintptr_t function
        self.owner = owner
        self.pool = pool
        self.pinned = pinned
        self.c.memory = &pool.c
        self.c.busy_wait = busy_wait
        self.c.use_graphs = use_graphs
        self.c.limit_ns = <int64_t>(limit * 1e9)
        self.c.n_functions = len(functions)
        self.c.functions = <cu.CUfunction*>calloc(max(len(functions), 1), sizeof(cu.CUfunction))
        if self.c.functions == NULL:
            raise MemoryError
        for i in range(len(functions)):
            function = functions[i]
            self.c.functions[i] = <cu.CUfunction>function
        try:
            self.make()
        except BaseException:
            self.close()
            raise

    cdef object make(self):
        cdef int r
        with nogil:
            r = self.create()
        check(r, "creating streams and events")

    cdef int create(self) noexcept nogil:
        cdef int i
        cdef Slot* s
        cdef int r = cu.cuCtxSetCurrent(self.c.memory.context)
        if r == 0:
            r = cu.cuStreamCreate(&self.c.compute, 1)  # non-blocking
        if r == 0:
            r = cu.cuStreamCreate(&self.c.copy, 1)
        for i in range(2):
            s = &self.c.slots[i]
            if r == 0:
                r = cu.cuEventCreate(&s.begin, 0)
            if r == 0:
                r = cu.cuEventCreate(&s.staged, 0)
            if r == 0:
                r = cu.cuEventCreate(&s.started, 0)
            if r == 0:
                r = cu.cuEventCreate(&s.ran, 0)
            if r == 0:
                r = cu.cuEventCreate(&s.timed, 0)
            if r == 0:
                r = cu.cuEventCreate(&s.grown, 2)  # without times
            if r == 0:
                r = cu.cuEventCreate(&s.done, 2)
        return r

    def usage(self) -> dict:
        """Bytes held on the device and page-locked on the host; how many graphs were launched and batches staged
        in advance."""
        return {
            "device_bytes": self.c.device_bytes,
            "pinned_bytes": self.c.pinned_bytes,
            "graph_launches": self.c.graph_launches,
            "staged_ahead": self.c.staged_ahead,
        }

    def close(self):
        """Frees everything, unless the context is broken (rule 3)."""
        if self.c.memory == NULL:
            return
        with nogil:
            if self.c.memory.broken == 0 and cu.cuCtxSetCurrent(self.c.memory.context) == 0:
                self.give_back()
        free(self.c.functions)
        memset(&self.c, 0, sizeof(Queue))
        self.owner = None

    cdef void give_back(self) noexcept nogil:
        cdef int i, k
        cdef Slot* s
        cdef cu.CUevent events[7]
        if self.c.copy != NULL and judged(self.c.memory, wait_stream(self.c.memory, self.c.copy, PATIENCE)):
            return
        if self.c.compute != NULL and judged(self.c.memory, wait_stream(self.c.memory, self.c.compute, PATIENCE)):
            return
        for i in range(2):
            s = &self.c.slots[i]
            for k in range(GRAPHS):
                if s.graphs[k].executable != NULL:
                    cu.cuGraphExecDestroy(s.graphs[k].executable)
            if s.pinned != NULL:
                cu.cuMemFreeHost(s.pinned)
            for k in range(s.n_outgrown):
                cu.cuMemFreeHost(s.outgrown[k])
            if s.work_size:
                cu.cuMemFreeAsync(s.work, self.c.compute)
            if s.out_size:
                cu.cuMemFreeAsync(s.out, self.c.compute)
            events[0], events[1], events[2], events[3] = s.begin, s.staged, s.started, s.ran
            events[4], events[5], events[6] = s.timed, s.grown, s.done
            for k in range(7):
                if events[k] != NULL:
                    cu.cuEventDestroy(events[k])
        if self.c.compute != NULL:
            wait_stream(self.c.memory, self.c.compute, PATIENCE)
            cu.cuStreamDestroy(self.c.compute)
        if self.c.copy != NULL:
            cu.cuStreamDestroy(self.c.copy)
