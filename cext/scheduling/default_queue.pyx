"""The compiled part of the default scheduler (neptrio/scheduling/default.py): enqueue() and dispatch()."""
from libc.stdint cimport int64_t

from neptrio.execution.instance_core cimport InstanceCore, PoolCore
from neptrio.request.infer_request cimport QUEUE_START, QUEUED, TAKEN, InferRequest, now_ns

from collections import deque


cdef class DefaultQueue:
    """Requests in order of arrival. A cancelled request leaves a gap, which dispatch() skips."""

    cdef readonly PoolCore pool
    cdef readonly object loop_pass
    cdef public object queue       # deque of requests, cancelled ones included
    cdef public Py_ssize_t gaps    # how many of them are cancelled
    cdef bint marked               # in this pass already
    cdef bint dispatching          # dispatch() looks for room itself

    def __init__(self, PoolCore pool, loop_pass):
        self.pool = pool
        self.loop_pass = loop_pass
        self.queue = deque()

    cpdef enqueue(self, InferRequest request):
        """Queues a validated request."""
        request.timestamps[<int>QUEUE_START] = now_ns()
        request.state = QUEUED
        request.scheduler = self
        self.queue.append(request)
        if not self.marked:
            self.marked = True
            self.loop_pass.mark(self)

    cpdef dispatch(self, int64_t now):
        """Submits requests while instances have room; PoolCore.depth() says how much room an instance has."""
        cdef InferRequest request
        cdef InstanceCore instance
        cdef int64_t depth
        self.marked = False
        queue = self.queue
        depth = self.pool.depth()
        self.dispatching = True
        try:
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
                instance = self.pool.nearest(instance, request)
                instance.submit([request], "single", now - request.timestamps[<int>QUEUE_START])
        finally:
            self.dispatching = False
        if self.pool.limiter is not None:
            self.pool.settle(bool(queue))

    def freed(self):
        """An instance may take another request."""
        if self.pool.limiter is None and (self.dispatching or not self.queue):
            return
        if not self.marked:  # with a rate limiter also to give back a grant that is not wanted
            self.marked = True
            self.loop_pass.mark(self)
