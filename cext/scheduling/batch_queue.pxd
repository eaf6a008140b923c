# The waiting requests of one dynamic batcher. Trio thread only.
#   While its request is QUEUED, an Entry is in exactly one list of one Level, and it is the request's scheduler_data.
#   The heap holds the entries with a deadline; each remembers its index there. So leaving takes O(1) in the list
#   and O(log n) in the heap.
from libc.stdint cimport int64_t, uint64_t
from neptrio.request.infer_request cimport InferRequest

cdef class Entry:
    cdef InferRequest request
    cdef Entry prev
    cdef Entry next
    cdef Level level
    cdef bint delayed              # it is in the level's `late` list
    cdef Py_ssize_t at             # index in the heap, -1 when not in it
    cdef int64_t order             # order of arrival, which decides between equal deadlines
    cdef object signature          # must be equal for all requests of a batch; None = fits all

cdef class Level:
    cdef readonly int64_t number
    cdef readonly int64_t max_size         # 0 = no limit
    cdef readonly int64_t timeout_ns       # 0 = none
    cdef readonly bint override
    cdef readonly bint delay               # timeout_action is DELAY
    cdef readonly int64_t size             # requests in both lists
    cdef Entry head                        # list of requests that are not past their timeout
    cdef Entry tail
    cdef Entry late_head                   # list of requests past their timeout, with action DELAY
    cdef Entry late_tail

cdef class BatchQueue:
    cdef list busy                  # those of the levels that hold requests, in order; the only one where there is one
    cdef bint bounded               # each level has a limit
    cdef list levels
    cdef list heap
    cdef int64_t arrivals
    cdef readonly int64_t size             # requests waiting
    cdef readonly int64_t weight           # sum of their batch sizes
    cdef readonly int64_t max_batch_size
    cdef readonly int64_t max_preferred
    cdef readonly int64_t delay_ns
    cdef readonly int64_t default_level
    cdef set preferred
    cdef list varying                      # InputSpecs whose shape or presence may differ between requests
    cdef set shape_tensors
    # the result of the last decide()
    cdef readonly int64_t count
    cdef readonly str reason
    cdef readonly bint saturated
    cdef readonly int64_t wake_ns
    cdef readonly int64_t oldest_wait_ns
    cdef Level level_of(self, InferRequest request)
    cdef int64_t due(self, Level level, InferRequest request)
    cdef object signature(self, InferRequest request)
    cdef void link(self, Entry e, bint late)
    cdef void unlink(self, Entry e)
    cdef bint sooner(self, Entry a, Entry b)
    cdef void sift(self, Py_ssize_t at)
    cdef void heap_add(self, Entry e)
    cdef void heap_remove(self, Entry e)
    cpdef bint push(self, InferRequest request) except -1
    cpdef bint remove(self, InferRequest request) except -1
    cpdef int64_t decide(self, int64_t now_ns, bint flush=*) except -1
    cpdef list take(self)
