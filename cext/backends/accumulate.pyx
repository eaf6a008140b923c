"""Computes running sums of sequences without the GIL, for the `sequence` backend.

Every job adds its input to the sum of its sequence so far (with START, to nothing) and writes the sum to the output; where
that has one element for all of the input's, it is the sum of all of them.
Jobs own nothing: the batch keeps the tensors and buffers alive to which they point.

A tensor may start at any byte of a request's body, so elements are copied with memcpy, never read through a pointer to
integers; the compiler makes the same vector instructions of both.
"""
from libc.stdint cimport int32_t, int64_t, uint32_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.time cimport nanosleep, timespec

from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport Work
from neptrio.request.infer_request cimport InferResponse, Tensor, now_ns

from neptrio.errors import Internal, Reason


cdef struct Job:
    const char* input       # `count` elements; this and the other pointers may be unaligned
    const char* before      # NULL: the sequence starts here
    char* after             # where the sum is kept for the next request; may equal `before`
    char* output
    Py_ssize_t count
    bint whole              # the sum has one element
    bint failed


cdef struct Sums:
    Job* jobs
    Py_ssize_t count
    int64_t delay_ns
    int64_t start_ns
    int64_t end_ns
    int32_t fail_value
    bint may_fail


cdef class AccumulateBatch(Batch):
    """A batch of running sums. Prepared on the trio thread, executed on any thread."""

    cdef Sums sums
    cdef list held

    @staticmethod
    def of(Batch batch, int64_t delay_ns, fail_value):
        # type: (..., ..., float | None) -> AccumulateBatch
        """`batch` as an AccumulateBatch. A request whose input begins with `fail_value` fails."""
        cdef AccumulateBatch made = AccumulateBatch(
            batch.model, batch.requests, batch.close_reason, batch.oldest_wait_ns)
        made.instance = batch.instance
        made.sums.count = len(batch.requests)
        made.sums.delay_ns = delay_ns
        made.sums.may_fail = fail_value is not None
        made.sums.fail_value = fail_value or 0
        made.sums.jobs = <Job*>calloc(made.sums.count, sizeof(Job))
        if made.sums.jobs == NULL:
            raise MemoryError
        made.held = []
        made.work.run = run_jobs
        return made

    def __dealloc__(self):
        free(self.sums.jobs)

    def job(self, Py_ssize_t i, Tensor tensor not None, before, bytearray after not None,
            bytearray output not None, bint whole=False):
        # type: (..., ..., Tensor | bytearray | None, ..., ..., ...) -> None
        """Fills in job `i`. `before` is a Tensor, a bytearray or None; all buffers have the size of the input, or with `whole`
        of one element."""
        cdef Job* job
        cdef Tensor state
        cdef Py_ssize_t size = 4 if whole else tensor.nbytes
        if not 0 <= i < len(self.requests):
            raise IndexError(i)
        if len(after) < size or len(output) < size:
            raise ValueError("the buffers must be as large as the input")
        job = &self.sums.jobs[i]
        job.input = tensor.ptr
        job.count = tensor.nbytes // 4
        job.whole = whole
        if isinstance(before, Tensor):
            state = before
            if state.nbytes < size:
                raise ValueError("the state must be as large as the input")
            job.before = state.ptr
        elif before is not None:
            if len(before) < size:
                raise ValueError("the state must be as large as the input")
            job.before = <char*>(<bytearray>before)
        job.after = <char*>after
        job.output = <char*>output
        self.held.append((tensor, before, after, output))

    cpdef object deliver(self):
        # type: () -> None
        cdef Py_ssize_t i
        self.compute_start = self.sums.start_ns
        self.compute_end = self.sums.end_ns
        for i in range(len(self.requests)):
            if self.sums.jobs[i].failed:
                self.responses[i] = InferResponse(
                    None, Internal(f"the input begins with {self.sums.fail_value}, which fails", reason=Reason.BACKEND))
        return Batch.deliver(self)


cdef void run_jobs(Work* work) noexcept nogil:
    cdef Sums* sums = &(<AccumulateBatch>work.owner).sums
    cdef Job* job
    cdef Py_ssize_t i, k
    cdef uint32_t sum, more      # unsigned, so that an overflowing sum wraps instead of being undefined
    cdef timespec ts
    sums.start_ns = now_ns()
    if sums.delay_ns > 0:
        ts.tv_sec = sums.delay_ns // 1000000000
        ts.tv_nsec = sums.delay_ns % 1000000000
        nanosleep(&ts, NULL)
    for i in range(sums.count):
        job = &sums.jobs[i]
        if job.input == NULL:
            continue
        if job.count == 0:
            continue
        memcpy(&sum, job.input, 4)
        if sums.may_fail and sum == <uint32_t>sums.fail_value:
            job.failed = True
            continue
        if job.whole:
            sum = 0
            for k in range(job.count):
                memcpy(&more, job.input + 4 * k, 4)
                sum += more
            if job.before != NULL:
                memcpy(&more, job.before, 4)
                sum += more
            memcpy(job.after, &sum, 4)
            memcpy(job.output, &sum, 4)
            continue
        for k in range(job.count):
            memcpy(&sum, job.input + 4 * k, 4)
            if job.before != NULL:
                memcpy(&more, job.before + 4 * k, 4)
                sum += more
            memcpy(job.after + 4 * k, &sum, 4)
        memcpy(job.output, job.after, job.count * 4)
    sums.end_ns = now_ns()
