"""What a backend says of a request's statistics itself (Triton's compiled backends do).

The problem: such a backend may report a request before or after its answer went out, from any of its threads. The choice: the
request carries what was said, and who counts it (cext/observe/counters) looks there; where the answer is first, what is needed to
count it is kept here.

Rules:
 1. Times are believed as far as they can be: in their order, not before the request was queued and not in the future.
 2. Nothing that a client sent, and no connection, is kept here.
"""
from libc.stdint cimport int64_t

from neptrio.request.infer_request cimport (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    QUEUE_START,
    InferRequest,
    InferResponse,
    now_ns,
)


cdef class Stated:
    """See stated.pxd."""

    def __init__(self, int how, times=None):
        # type: (..., Sequence[int] | None) -> None
        self.how = how
        self.set(times)

    def set(self, times):
        # type: (Sequence[int] | None) -> None
        """Sets when the execution began, its inputs were there, its outputs were there, and it ended."""
        cdef int i
        if times is not None:
            for i in range(4):
                self.times[i] = times[i]

    @property
    def awaited(self) -> bool:
        """The request was answered and is not counted yet."""
        return self.request is not None

    cdef int apply(self, InferRequest r) except -1:
        """Sets the request's timestamps to the times that were reported, as far as they can be."""
        cdef int64_t floor = r.timestamps[<int>QUEUE_START], now = now_ns()
        cdef int i
        for i in range(4):
            floor = min(max(self.times[i], floor), now)
            r.timestamps[<int>COMPUTE_START + i] = floor
        return 0

    cdef int put_off(self, InferRequest r, InferResponse response, object error) except -1:
        """Keeps what is needed to count an answered request."""
        cdef InferRequest kept = InferRequest.__new__(InferRequest)
        kept.model = r.model
        kept.batch_size = r.batch_size
        kept.timestamps = r.timestamps
        kept.stated = self
        self.response = InferResponse.__new__(InferResponse)
        self.response.error = error
        self.request = kept
        return 0


cdef int add_to_ensemble(InferRequest r, int64_t end) except -1:
    """Adds a step's durations to its ensemble's, which is not answered later for it."""
    cdef InferRequest above = r.parent
    cdef int64_t* s = r.timestamps
    if above is None or not above.composing:
        return 0
    above.steps_queue_ns += (s[<int>COMPUTE_START] or end) - s[<int>QUEUE_START]
    above.steps_input_ns += s[<int>COMPUTE_INPUT_END] - s[<int>COMPUTE_START]
    above.steps_infer_ns += s[<int>COMPUTE_OUTPUT_START] - s[<int>COMPUTE_INPUT_END]
    above.steps_output_ns += s[<int>COMPUTE_END] - s[<int>COMPUTE_OUTPUT_START]
    return 0
