"""Batches of the identity backend, which execute without the GIL."""
from libc.stdint cimport int64_t
from posix.time cimport nanosleep, timespec

from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport Work
from neptrio.request.infer_request cimport InferRequest, InferResponse, Tensor, alias, now_ns


cdef struct Delay:
    int64_t ns
    int64_t start
    int64_t end


cdef class DelayBatch(Batch):
    """A batch whose responses are known in advance; executing it takes `delay` nanoseconds."""

    cdef Delay delay

    cpdef object deliver(self):
        self.compute_start = self.delay.start
        self.compute_end = self.delay.end
        return Batch.deliver(self)


def identity(DelayBatch batch not None, list pairs, int64_t delay_ns):
    """Makes the responses: for each of `pairs` [(input, output)] the output is the input's memory."""
    cdef InferRequest request
    cdef Tensor tensor
    cdef Py_ssize_t i
    cdef list outputs
    batch.delay.ns = delay_ns
    batch.work.run = run_delay
    for i in range(len(batch.requests)):
        request = batch.requests[i]
        outputs = []
        for name, output in pairs:
            for tensor in request.inputs:
                if tensor.name == name:
                    outputs.append(alias(tensor, output, tensor.shape))
                    break
        batch.responses[i] = InferResponse(outputs)


cdef void run_delay(Work* work) noexcept nogil:
    cdef Delay* delay = &(<DelayBatch>work.owner).delay
    cdef timespec ts
    delay.start = now_ns()
    if delay.ns > 0:
        ts.tv_sec = delay.ns // 1000000000
        ts.tv_nsec = delay.ns % 1000000000
        nanosleep(&ts, NULL)
    delay.end = now_ns()


def run_inline(Batch batch not None):
    """Executes a native batch on the calling thread, with the GIL released."""
    batch.run_here()
