"""The hot half of the default scheduler (neptrio/scheduling/default.py): in at one end, out at the other."""
from libc.stdint cimport int64_t

from neptrio._cext.instance cimport InstanceCore, PoolCore
from neptrio._cext.request cimport PREPARED, QUEUE_START, QUEUED, InferRequest, now_ns

from collections import deque


cdef class DefaultQueue:
    """Requests in arrival order. A cancelled one leaves a gap that dispatch() steps over."""

    cdef readonly PoolCore pool
    cdef readonly object turn
    cdef public object queue       # deque of requests, those that are gone included
    cdef public Py_ssize_t gaps    # of those, the ones that are gone

    def __init__(self, PoolCore pool, turn):
        self.pool = pool
        self.turn = turn
        self.queue = deque()

    cpdef enqueue(self, InferRequest request):
        """Takes a validated request."""
        request.stamps[<int>QUEUE_START] = now_ns()
        request.state = QUEUED
        request.scheduler = self
        self.queue.append(request)
        self.turn.mark(self)

    cpdef dispatch(self, int64_t now):
        """Hands requests to instances while both are there: one runs, more wait in line (PoolCore.depth)."""
        cdef InferRequest request
        cdef InstanceCore instance
        cdef int64_t depth
        queue = self.queue
        depth = self.pool.depth()
        while queue:
            request = queue.popleft()
            if request.state != QUEUED:
                self.gaps -= 1
                continue
            instance = self.pool.available(depth)
            if instance is None:
                queue.appendleft(request)
                break
            request.state = PREPARED
            instance.submit([request], "single", now - request.stamps[<int>QUEUE_START])
        if self.pool.limiter is not None:
            self.pool.settle(bool(queue))

    def freed(self):
        """An instance has room again."""
        if self.pool.limiter is not None or self.queue:  # a turn that is not wanted is given back
            self.turn.mark(self)
