"""The compiled part of the default scheduler (neptrio/scheduling/default.py): enqueue() and dispatch()."""
from libc.stdint cimport int64_t

from neptrio.execution.admission cimport RequestQueue
from neptrio.execution.instance_core cimport InstanceCore, PoolCore
from neptrio.request.infer_request cimport QUEUE_START, QUEUED, TAKEN, InferRequest, now_ns

cdef enum:
    SPARSE = 64      # so many places may be free in front before those behind move up
    KEPT = 1024      # an empty queue keeps as many places


cdef class DefaultQueue(RequestQueue):
    """Requests in order of arrival. A cancelled request leaves a gap, which dispatch() skips.

    They lie in `places[head:tail]`; what is before and behind holds None. An empty queue begins anew at its first place,
    so that most of the time nothing is allocated.
    """

    cdef readonly PoolCore pool   # type: neptrio.execution.instance.InstancePool
    cdef readonly object loop_pass  # type: LoopPass
    cdef list places
    cdef Py_ssize_t head
    cdef Py_ssize_t tail
    cdef public Py_ssize_t gaps    # how many of them are cancelled
    cdef bint marked               # in this pass already
    cdef bint dispatching          # dispatch() looks for room itself

    def __init__(self, PoolCore pool, loop_pass):
        # type: (..., LoopPass) -> None
        self.pool = pool
        self.loop_pass = loop_pass
        self.places = []

    @property
    def size(self) -> int:
        """How many requests the queue holds, cancelled ones included."""
        return self.tail - self.head

    def close_gaps(self):
        """Removes the cancelled requests."""
        cdef InferRequest request
        self.places = [request for request in self.places[self.head:self.tail] if request.state == QUEUED]
        self.head = self.gaps = 0
        self.tail = len(self.places)

    cdef int queue(self, InferRequest request) except -1:
        request.timestamps[<int>QUEUE_START] = now_ns()
        request.state = QUEUED
        request.scheduler = self
        if self.tail < len(self.places):
            self.places[self.tail] = request
        else:
            if self.head >= SPARSE and self.head * 2 >= self.tail:
                del self.places[:self.head]
                self.tail -= self.head
                self.head = 0
            self.places.append(request)
        self.tail += 1
        if not self.marked:
            self.marked = True
            self.loop_pass.mark(self)
        return 0

    cdef InferRequest leave(self):
        """Takes the first request out."""
        cdef InferRequest request = self.places[self.head]
        self.places[self.head] = None
        self.head += 1
        if self.head == self.tail:
            self.head = self.tail = 0
            if len(self.places) > KEPT:
                self.places = []
        return request

    cpdef dispatch(self, int64_t now):
        """Submits requests while instances have room; PoolCore.depth() says how much room an instance has."""
        cdef InferRequest request
        cdef InstanceCore instance
        cdef int64_t depth
        self.marked = False
        depth = self.pool.depth()
        self.dispatching = True
        try:
            while self.head < self.tail:
                request = self.places[self.head]
                if request.state != QUEUED:
                    self.gaps -= 1
                    self.leave()
                    continue
                instance = PoolCore.available(self.pool, depth)
                if instance is None:
                    break
                if (self.head == self.tail or self.places[self.head] is not request
                        or request.state != QUEUED):  # a grant of the rate limiter has answered somebody who cancelled it
                    continue
                self.leave()
                request.state = TAKEN
                instance = PoolCore.nearest(self.pool, instance, request)
                InstanceCore.submit(instance, [request], "single", now - request.timestamps[<int>QUEUE_START])
        finally:
            self.dispatching = False
        if self.pool.limiter is not None:
            self.pool.settle(self.head < self.tail)

    def freed(self):
        """An instance may take another request."""
        if self.pool.limiter is None and (self.dispatching or self.head == self.tail):
            return
        if not self.marked:  # with a rate limiter also to give back a grant that is not wanted
            self.marked = True
            self.loop_pass.mark(self)
