# distutils: language = c++
"""The resources of one instance on a GPU: streams, slots, and the slots' growing memory.

A slot has a page-locked staging buffer, a device block for inputs and scratch buffers, a device block for outputs,
events, and the graphs recorded with these addresses. There are SLOTS of them, because while one batch computes, the
next is copied to the device and the one before it is copied back (cuda_pipeline). For the same reason there is a stream
for each of the three; a copy engine works on each direction.

Rules:
 1. Memory grows to powers of two and never shrinks while the instance lives. Its bytes are counted; any thread may
    read them.
 2. A slot grows while nothing uses it, so the old block is freed, and the new one allocated, in the stream in which
    its run begins. The slot's graphs become invalid. Outgrown page-locked buffers are kept until the end, and then left
    to the device's thread with the others (DevicePool.free_pinned), because freeing one may wait for the whole device.
 3. A queue is made and closed on its instance's thread, without the GIL. With a broken context, or when its streams do
    not come to an end, close() passes nothing to the driver: what was taken is lost until the process ends.
"""
from libc.stdint cimport int64_t, uintptr_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memset

cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_error cimport check
from neptrio.backends.kernel.cuda_memory cimport DevicePool, allocate, enter, judged, leave, rounded, wait_stream
from neptrio.backends.kernel.cuda_pinned cimport PinnedPool
from neptrio.backends.kernel.plan cimport Plan


cdef enum:
    PATIENCE = 5    # seconds that close() waits for a stream's end
    EVENTS = 8      # of a slot
    UNTIMED = 3     # so many of them have no times, which makes them cheaper


cdef void list_events(Slot* s, cu.CUevent** events) noexcept nogil:
    """The addresses of a slot's events, those without times first."""
    events[0], events[1], events[2] = &s.ready, &s.computed, &s.done
    events[3], events[4], events[5], events[6], events[7] = &s.begin, &s.staged, &s.started, &s.ran, &s.ended


cdef int ensure(Queue* q, Slot* s, Plan* plan, bint small, cu.CUstream stream) noexcept nogil:
    """Grows a slot's memory to the sizes that the plan needs; `small`: the outputs arrive here too; `stream`: where the
    run begins. Returns a CUresult."""
    cdef int r
    cdef char** grown
    cdef size_t size = plan.input_bytes + (plan.output_bytes if small else 0)
    if s.pinned_size < size:
        if s.pinned != NULL:
            grown = <char**>realloc(s.outgrown, (s.n_outgrown + 1) * sizeof(char*))
            if grown == NULL:
                return cu.CUDA_ERROR_OUT_OF_MEMORY
            s.outgrown = grown
            s.outgrown[s.n_outgrown] = s.pinned
            s.n_outgrown += 1
        s.pinned = NULL
        s.pinned_size = 0
        s.generation += 1
        q.grown += 1
        size = rounded(size)
        r = cu.cuMemHostAlloc(<void**>&s.pinned, size, 0)
        if r:
            s.pinned = NULL
            return r
        s.pinned_size = size
        q.pinned_bytes += size
    if s.work_size < plan.work_bytes:
        s.generation += 1
        r = regrow(q, &s.work, &s.work_size, plan.work_bytes, stream)
        if r:
            return r
    if s.out_size < plan.output_bytes:
        s.generation += 1
        return regrow(q, &s.out, &s.out_size, plan.output_bytes, stream)
    return 0


cdef int regrow(Queue* q, cu.CUdeviceptr* pointer, size_t* size, size_t wanted, cu.CUstream stream) noexcept nogil:
    cdef int r
    cdef size_t want = rounded(wanted)
    q.grown += 1
    if size[0]:
        r = cu.cuMemFreeAsync(pointer[0], stream)
        q.device_bytes -= size[0]
        pointer[0] = 0
        size[0] = 0
        if r:
            return r
    r = allocate(q.memory, pointer, want, stream)
    if r:
        return r
    size[0] = want
    q.device_bytes += want
    return 0


cdef class DeviceQueue:
    """One instance's streams, slots and functions. Made, used and closed on the instance's thread."""

    def __init__(self, DevicePool pool not None, PinnedPool pinned not None, list functions, bint busy_wait,
                 bint use_graphs, owner, double limit=0):
        # type: (..., ..., list[int], ..., ..., object, ...) -> None
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
        cdef int k
        cdef cu.CUstream* streams[4]
        cdef cu.CUevent* events[EVENTS]
        streams[0], streams[1] = &self.c.compute, &self.c.inward
        streams[2], streams[3] = &self.c.outward, &self.c.last
        for k in range(4):
            if r == 0:
                r = cu.cuStreamCreate(streams[k], 1)  # non-blocking
        for i in range(SLOTS):
            list_events(&self.c.slots[i], events)
            for k in range(EVENTS):
                if r == 0:
                    r = cu.cuEventCreate(events[k], 2 if k < UNTIMED else 0)
        return r

    def usage(self) -> dict:
        # type: () -> dict[str, int]
        """Bytes held on the device and page-locked on the host; how many graphs were launched, and how many batches
        while an earlier one was under way."""
        return {
            "device_bytes": self.c.device_bytes,
            "pinned_bytes": self.c.pinned_bytes,
            "graph_launches": self.c.graph_launches,
            "launched_ahead": self.c.launched_ahead,
        }

    def close(self):
        """Frees everything, unless the context is broken (rule 3)."""
        cdef cu.CUstreamCaptureMode mode
        cdef bint ended = False
        cdef int i
        if self.c.memory == NULL:
            return
        with nogil:
            if self.c.memory.broken == 0 and enter(self.c.memory, &mode) == 0:
                ended = self.give_back()
                leave(mode)
        if ended:
            self.leave_pinned()
        for i in range(SLOTS):
            free(self.c.slots[i].outgrown)
        free(self.c.functions)
        memset(&self.c, 0, sizeof(Queue))
        self.owner = None

    def progress(self) -> tuple:
        # type: () -> tuple[int, int]
        """(how many batches are under way, when the last one ended)."""
        return self.c.under_way, self.c.finished

    cdef object leave_pinned(self):
        cdef int i, k
        cdef Slot* s
        for i in range(SLOTS):
            s = &self.c.slots[i]
            if s.pinned != NULL:
                self.pool.outlived.append(<uintptr_t>s.pinned)
            for k in range(s.n_outgrown):
                self.pool.outlived.append(<uintptr_t>s.outgrown[k])

    cdef bint give_back(self) noexcept nogil:
        """All but page-locked memory; False where something has not ended."""
        cdef int i, k
        cdef Slot* s
        cdef cu.CUevent* events[EVENTS]
        cdef cu.CUstream[4] streams = [self.c.inward, self.c.compute, self.c.outward, self.c.last]
        for k in range(4):
            if streams[k] != NULL and judged(self.c.memory, wait_stream(self.c.memory, streams[k], PATIENCE)):
                return False
        for i in range(SLOTS):
            s = &self.c.slots[i]
            for k in range(GRAPHS):
                if s.graphs[k].executable != NULL:
                    cu.cuGraphExecDestroy(s.graphs[k].executable)
            if s.work_size:
                cu.cuMemFreeAsync(s.work, self.c.compute)
            if s.out_size:
                cu.cuMemFreeAsync(s.out, self.c.compute)
            list_events(s, events)
            for k in range(EVENTS):
                if events[k][0] != NULL:
                    cu.cuEventDestroy(events[k][0])
        if self.c.compute != NULL and judged(
                self.c.memory, wait_stream(self.c.memory, self.c.compute, PATIENCE)):
            return False  # the frees
        for k in range(4):
            if streams[k] != NULL:
                cu.cuStreamDestroy(streams[k])
        return True
