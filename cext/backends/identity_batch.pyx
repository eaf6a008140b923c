"""Batches of the identity backend, which execute without the GIL."""
cimport cython
from libc.stdint cimport int64_t
from posix.time cimport nanosleep, timespec

from neptrio.execution.batch cimport Batch
from neptrio.loop.mailbox cimport Work
from neptrio.request.infer_request cimport InferRequest, InferResponse, Tensor, alias, now_ns, same_name

from sys import intern


cdef struct Delay:
    int64_t ns
    int64_t start
    int64_t end


@cython.freelist(16)
cdef class DelayBatch(Batch):
    """A batch whose responses are known in advance; executing it takes `delay` nanoseconds."""

    cdef Delay delay

    cpdef object deliver(self):
        # type: () -> None
        self.compute_start = self.delay.start
        self.compute_end = self.delay.end
        return Batch.deliver(self)


cdef class IdentityBuilder:
    """Makes the responses of batches before they are executed: for each of `pairs` [(input, output)] the output is the
    input's memory."""

    cdef list inputs
    cdef list outputs
    cdef list absent     # of each pair: what makes the output for a batch size where its input is left out, or None
    cdef int64_t delay_ns

    def __init__(self, list pairs not None, int64_t delay_ns, list absent=None):
        # type: (..., ..., list[Callable[[int], Tensor] | None] | None) -> None
        self.absent = absent or [None] * len(pairs)
        self.inputs = [intern(name) for name, _ in pairs]
        self.outputs = [intern(name) for _, name in pairs]
        self.delay_ns = delay_ns

    @cython.boundscheck(False)  # every index is below a length that was asked for
    @cython.wraparound(False)
    def prepare(self, DelayBatch batch not None) -> Batch:
        """BackendInstance.prepare()."""
        cdef InferRequest request
        cdef InferResponse response
        cdef Tensor tensor
        cdef Py_ssize_t i, k, found, n = len(self.inputs)
        cdef str name
        cdef list outputs, inputs
        batch.delay.ns = self.delay_ns
        batch.work.run = run_delay
        for i in range(len(batch.requests)):
            request = <InferRequest>batch.requests[i]
            inputs = request.inputs
            outputs = [None] * n
            found = 0
            for k in range(n):
                name = <str>self.inputs[k]
                if k < len(inputs):  # most clients send them in the order of the configuration
                    tensor = <Tensor>inputs[k]
                    if same_name(tensor.name, name):
                        outputs[found] = alias(tensor, <str>self.outputs[k], tensor.shape)
                        found += 1
                        continue
                for tensor in inputs:
                    if same_name(tensor.name, name):
                        outputs[found] = alias(tensor, <str>self.outputs[k], tensor.shape)
                        found += 1
                        break
                else:
                    if self.absent[k] is not None:
                        outputs[found] = self.absent[k](request.batch_size)
                        found += 1
            if found < n:
                del outputs[found:]
            response = InferResponse.__new__(InferResponse)
            response.outputs = outputs
            batch.responses[i] = response
        return batch


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
