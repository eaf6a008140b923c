# distutils: language = c++
"""The resources of one instance on a GPU: two streams, two slots, and the slots' growing memory.

A slot has a page-locked staging buffer, a device block for inputs and scratch buffers, a device block for outputs,
events, and the graphs recorded with these addresses. There are two, because one batch is staged while the other
executes (cuda_launch).

Rules:
 1. Memory grows to powers of two and never shrinks while the instance lives. Its bytes are counted; any thread may
    read them.
 2. To grow, the old block is freed in the compute stream, after the work that used it, and that is waited for,
    because the copy stream may use the new block at once. The slot's graphs become invalid.
 3. A queue is made and closed on its instance's thread. With a broken context, close() passes nothing to the
    driver: the reset frees everything.
"""
from libc.stdint cimport uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

cimport cuda.bindings.cydriver as cu

from neptrio.backends.kernel.cuda_error cimport check
from neptrio.backends.kernel.cuda_memory cimport (
    DevicePool,
    PinnedPool,
    pthread_rwlock_rdlock,
    pthread_rwlock_unlock,
    rounded,
)
from neptrio.backends.kernel.plan cimport Plan


cdef int ensure(Queue* q, Slot* s, Plan* plan) noexcept nogil:
    """Grows a slot's memory to the sizes that the plan needs. Returns a CUresult."""
    cdef int r
    cdef size_t size
    cdef bint grew = False
    if s.pinned_size < plan.input_bytes:
        if s.pinned != NULL:
            cu.cuMemFreeHost(s.pinned)
            q.pinned_bytes -= s.pinned_size
        s.pinned = NULL
        s.pinned_size = 0
        q.grown += 1
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
    r = cu.cuMemAllocFromPoolAsync(pointer, want, q.memory.pool, q.compute)
    if r:
        pointer[0] = 0
        return r
    size[0] = want
    q.device_bytes += want
    return 0


cdef class DeviceQueue:
    """One instance's streams, slots and functions. Made, used and closed on the instance's thread."""

    def __init__(self, DevicePool pool not None, PinnedPool pinned not None, list functions, bint busy_wait,
                 bint use_graphs, owner):
        """`functions` are CUfunction addresses in the order that plans use (0: not used); `owner` keeps context
        and module alive. Raises Internal after freeing what was already allocated."""
        cdef int i
        cdef uintptr_t function
        self.owner = owner
        self.pool = pool
        self.pinned = pinned
        self.c.memory = &pool.c
        self.c.busy_wait = busy_wait
        self.c.use_graphs = use_graphs
        self.c.n_functions = len(functions)
        self.c.functions = <cu.CUfunction*>calloc(max(len(functions), 1), sizeof(cu.CUfunction))
        if self.c.functions == NULL:
            raise MemoryError
        for i in range(len(functions)):
            function = functions[i]
            self.c.functions[i] = <cu.CUfunction>function
        try:
            self.make(0 if busy_wait else 1)  # CU_EVENT_BLOCKING_SYNC
        except BaseException:
            self.close()
            raise

    cdef object make(self, unsigned int flags):
        cdef int i
        cdef Slot* s
        check(cu.cuCtxSetCurrent(self.c.memory.context), "making the context current")
        check(cu.cuStreamCreate(&self.c.compute, 1), "creating a stream")  # non-blocking
        check(cu.cuStreamCreate(&self.c.copy, 1), "creating a stream")
        for i in range(2):
            s = &self.c.slots[i]
            check(cu.cuEventCreate(&s.begin, 0), "creating an event")
            check(cu.cuEventCreate(&s.staged, 0), "creating an event")
            check(cu.cuEventCreate(&s.started, 0), "creating an event")
            check(cu.cuEventCreate(&s.ran, 0), "creating an event")
            check(cu.cuEventCreate(&s.done, flags), "creating an event")

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
            pthread_rwlock_rdlock(&self.c.memory.alive)
            if self.c.memory.broken == 0 and cu.cuCtxSetCurrent(self.c.memory.context) == 0:
                self.give_back()
            pthread_rwlock_unlock(&self.c.memory.alive)
        free(self.c.functions)
        memset(&self.c, 0, sizeof(Queue))
        self.owner = None

    cdef void give_back(self) noexcept nogil:
        cdef int i, k
        cdef Slot* s
        if self.c.copy != NULL:
            cu.cuStreamSynchronize(self.c.copy)
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
            if s.begin != NULL:
                cu.cuEventDestroy(s.begin)
            if s.staged != NULL:
                cu.cuEventDestroy(s.staged)
            if s.started != NULL:
                cu.cuEventDestroy(s.started)
            if s.ran != NULL:
                cu.cuEventDestroy(s.ran)
            if s.done != NULL:
                cu.cuEventDestroy(s.done)
        if self.c.compute != NULL:
            cu.cuStreamSynchronize(self.c.compute)
            cu.cuStreamDestroy(self.c.compute)
        if self.c.copy != NULL:
            cu.cuStreamDestroy(self.c.copy)
