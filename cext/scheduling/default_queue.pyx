"""The compiled half of the default scheduler (neptrio/scheduling/default.py): enqueue() and dispatch()."""
from libc.stdint cimport int64_t

from neptrio.execution.instance_core cimport InstanceCore, PoolCore
from neptrio.request.infer_request cimport QUEUE_START, QUEUED, TAKEN, InferRequest, now_ns

from collections import deque


cdef class DefaultQueue:
    """Requests in arrival order. A cancelled one leaves a gap that dispatch() steps over."""

    cdef readonly PoolCore pool
    cdef readonly object loop_pass
    cdef public object queue       # deque of requests, cancelled ones included
    cdef public Py_ssize_t gaps    # how many of them are cancelled

    def __init__(self, PoolCore pool, loop_pass):
        self.pool = pool
        self.loop_pass = loop_pass
        self.queue = deque()

    cpdef enqueue(self, InferRequest request):
        """Takes a validated request."""
        request.timestamps[<int>QUEUE_START] = now_ns()
        request.state = QUEUED
        request.scheduler = self
        self.queue.append(request)
        self.loop_pass.mark(self)

    cpdef dispatch(self, int64_t now):
        """Hands requests to instances that have room; how many one may have in line is PoolCore.depth()."""
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
            request.state = TAKEN
            instance.submit([request], "single", now - request.timestamps[<int>QUEUE_START])
        if self.pool.limiter is not None:
            self.pool.settle(bool(queue))

    def freed(self):
        """An instance has room again."""
        if self.pool.limiter is not None or self.queue:  # a grant that is not wanted is given back
            self.loop_pass.mark(self)
