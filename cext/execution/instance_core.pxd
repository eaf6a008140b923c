# What every batch passes through between a scheduler and a model instance. Trio thread only.
from libc.stdint cimport int64_t
from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport Mailbox
from neptrio.request.infer_request cimport ModelCore

cdef class PoolCore:
    cdef public list instances       # [InstanceCore]
    cdef public object on_free       # called when an instance has room again
    cdef public object on_finished   # called with every batch that is back, before it is answered; or None
    cdef public object limiter       # the RateLimiter that grants the instances their executions, or None
    cdef int64_t depth(self)
    cpdef available(self, int64_t limit)
    cpdef freed(self)

cdef class InstanceCore:
    cdef public str name
    cdef readonly object backend     # BackendInstance
    cdef readonly ModelCore model
    cdef readonly PoolCore pool
    cdef readonly Mailbox mailbox
    cdef public object claim     # of the rate limiter, or None
    cdef public list under_way       # batches submitted and not back, in the order of submission
    cdef public object awaiting_grant  # deque of batches that wait for the rate limiter
    cdef public int64_t outstanding
    cdef public int64_t owed         # requests that it still answers though their batch is back
    cdef public bint retired         # it gets nothing new; its pool is told when it has less to do
    cdef readonly int64_t executions
    cdef readonly int64_t inline_executions
    cdef double busy_ns              # running mean of an execution that runs Python, clipped
    cdef readonly double mean_ns     # of native executions that no backend marked off_loop (cext/execution/inline_policy)
    cdef bint native
    cdef object batch_type
    cpdef submit(self, list requests, str close_reason, int64_t oldest_wait_ns)
    cpdef begin(self, Batch batch)
    cpdef make_batch(self, list requests, str close_reason, int64_t oldest_wait_ns)
    cpdef finished(self, Batch batch)
    cpdef answered(self)
