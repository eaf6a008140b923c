# What every batch passes through between its scheduler and its instance. Trio thread only.
from libc.stdint cimport int64_t
from neptrio.execution.batch cimport Batch, Executor
from neptrio.loop.mailbox cimport Mailbox
from neptrio.request.infer_request cimport InferRequest, ModelCore

cdef class PoolCore:
    cdef public list instances       # [InstanceCore]
    cdef public object on_free       # called when an instance may take another batch  # type: Callable[[], object]
    cdef public object on_finished   # called with every batch that is back, before it is answered  # type: Callable[[Batch], object] | None
    cdef public object limiter       # the RateLimiter that grants executions, or None  # type: RateLimiter | None
    cdef int64_t depth(self)
    cpdef available(self, int64_t limit)
    cpdef nearest(self, found, InferRequest request)
    cpdef freed(self)

cdef class InstanceCore(Executor):
    cdef public str name
    cdef readonly object backend     # BackendInstance  # type: BackendInstance
    cdef readonly ModelCore model
    cdef readonly PoolCore pool
    cdef readonly Mailbox mailbox
    cdef public object claim     # its Claim with the rate limiter, or None  # type: Claim | None
    cdef public list under_way       # batches submitted and not back, in order of submission  # type: list[Batch]
    cdef public object awaiting_grant  # deque of batches that wait for the rate limiter  # type: deque[Batch]
    cdef public object line          # batches behind one that waits for copies of its inputs  # type: deque[Batch] | None
    cdef public int64_t outstanding
    cdef public int64_t owed         # requests it must still answer though their batch is back
    cdef public bint away            # cannot execute now, and another can, or itself will: gets no batches meanwhile
    cdef public bint retired         # gets no new batches; the pool is told when it has less left to do
    cdef readonly int64_t executions
    cdef readonly int64_t inline_executions
    cdef double busy_ns              # running mean of executions that run Python, each clipped
    cdef readonly double mean_ns     # of native executions not marked off_loop (cext/execution/inline_policy)
    cdef bint native
    cdef int64_t in_advance          # so many batches more than the one that executes (execution/backend.py)
    cdef object batch_type
    cdef object prepare              # the backend's, None where it returns the batch as it is
    cdef bint plain_batch            # batch_type has no __init__ of its own
    cpdef submit(self, list requests, str close_reason, int64_t oldest_wait_ns)
    cpdef begin(self, Batch batch)
    cpdef start_batch(self, Batch batch)
    cdef int not_begun(self, Batch batch, error) except -1
    cpdef make_batch(self, list requests, str close_reason, int64_t oldest_wait_ns)
    cpdef give_back(self)
    cpdef answered(self)
