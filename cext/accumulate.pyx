"""The running sum of a sequence, without the GIL: what the `sequence` backend executes.

Every job adds its input to what the sequence has so far (START: to nothing) and writes the sum to the
output. Jobs own nothing: the batch keeps the tensors and buffers behind their pointers alive.
"""
from libc.stdint cimport int32_t, int64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.time cimport nanosleep, timespec

from neptrio._cext.batch cimport Batch
from neptrio._cext.mailbox cimport Work
from neptrio._cext.request cimport InferResponse, Tensor, now_ns

from neptrio.errors import Internal, Reason


cdef struct Job:
    const int32_t* input
    const int32_t* before   # NULL: the sequence starts
    int32_t* after          # where the sum is kept for the next request, may equal `before`
    int32_t* output
    Py_ssize_t count
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
    """A batch of running sums; prepared on the trio thread, executed anywhere."""

    cdef Sums sums
    cdef list held

    @staticmethod
    def of(Batch batch, int64_t delay_ns, fail_value):
        """`batch` as an AccumulateBatch; an input that begins with `fail_value` fails its request."""
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
            bytearray output not None):
        """Fills in job `i`; `before` is a Tensor, a bytearray or None, buffers are as large as the input."""
        cdef Job* job
        cdef Tensor state
        if not 0 <= i < len(self.requests):
            raise IndexError(i)
        if len(after) < tensor.nbytes or len(output) < tensor.nbytes:
            raise ValueError("the buffers must be as large as the input")
        job = &self.sums.jobs[i]
        job.input = <const int32_t*>tensor.ptr
        job.count = tensor.nbytes // 4
        if isinstance(before, Tensor):
            state = before
            if state.nbytes < tensor.nbytes:
                raise ValueError("the state must be as large as the input")
            job.before = <const int32_t*>state.ptr
        elif before is not None:
            if len(before) < tensor.nbytes:
                raise ValueError("the state must be as large as the input")
            job.before = <const int32_t*><char*>(<bytearray>before)
        job.after = <int32_t*><char*>after
        job.output = <int32_t*><char*>output
        self.held.append((tensor, before, after, output))

    cpdef object deliver(self):
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
        if sums.may_fail and job.count and job.input[0] == sums.fail_value:
            job.failed = True
            continue
        for k in range(job.count):
            # unsigned, so that an overflowing sum wraps instead of being undefined
            job.after[k] = <int32_t>(<unsigned int>job.input[k]
                                     + (<unsigned int>job.before[k] if job.before != NULL else 0))
        memcpy(job.output, job.after, job.count * 4)
    sums.end_ns = now_ns()
