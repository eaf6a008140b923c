"""Batches and the one place where a request is answered.

Rules:
 1. Every accepted request gets exactly one final response, through complete(); nothing else
    calls a responder.
 2. complete() runs on the trio thread. Model threads reach it through a work item.
 3. A request's failure is its own: a batch-level error is copied to each of its requests, a
    per-request error touches only that request.
 4. Statistics are written before the responder is called, so a client that has its answer
    finds it counted.
"""
from libc.stdint cimport int64_t

from neptrio._cext.counters cimport ModelCounters
from neptrio._cext.mailbox cimport Work, WorkItem
from neptrio._cext.request cimport (
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    DONE,
    REQUEST_END,
    InferRequest,
    InferResponse,
    ModelCore,
    now_ns,
)

import traceback

from neptrio.errors import Code, Reason, TritonError

observer = None  # called as observer(request, response, final); neptrio.observe sets it


def set_observer(callback):
    """Installs the one observer of responses (None removes it). It must not raise."""
    global observer
    observer = callback


cpdef complete(InferRequest request, InferResponse response, bint final):
    """Delivers a response. With `final` the request is done and leaves its model's accounts.

    A request that is already done is left alone: late answers of a cancelled or timed-out
    request are dropped here.
    """
    cdef ModelCore model = request.model
    if request.state == DONE:
        return
    response.model_name = model.name
    response.model_version = model.version
    response.id = request.id
    if final:
        request.state = DONE
        request.stamps[<int>REQUEST_END] = now_ns()
        if request.collect_statistics:
            (<ModelCounters>model.counters).answered(request, response)
    if observer is not None:
        observer(request, response, final)
    if not response.null:
        request.responses += 1
    request.responder.respond(request, response, final)
    if final:
        request.scheduler_data = None
        request.batch = None
        model.inflight -= 1
        if model.inflight == 0 and model.on_idle is not None:
            model.on_idle()


cdef class Batch(WorkItem):
    """Requests executed together. Subclasses replace `work.run` to execute without the GIL."""

    def __init__(self, ModelCore model, list requests, str close_reason="", int64_t oldest_wait_ns=0):
        cdef InferRequest r
        self.model = model
        self.requests = requests
        self.responses = [None] * len(requests)
        self.size = 0
        for r in requests:
            self.size += r.batch_size
        self.close_reason = close_reason
        self.oldest_wait_ns = oldest_wait_ns
        self.count_execution = True

    cpdef object execute(self):
        """Runs the backend on the instance thread; errors become the batch's error."""
        self.compute_start = now_ns()
        try:
            self.instance.backend.execute(self)
        except TritonError as error:
            self.error = error
        except BaseException as error:
            self.error = self.instance.backend.describe_failure(error)
        self.compute_end = now_ns()

    def mark_input_end(self):
        """The inputs are where the model wants them: compute_input ends, compute_infer starts."""
        self.input_end = now_ns()

    def mark_output_start(self):
        """The model has run: compute_infer ends, compute_output starts."""
        self.output_start = now_ns()

    cpdef object deliver(self):
        """On the trio thread: counts the execution, answers every request, frees the instance."""
        cdef InferRequest r
        cdef InferResponse response
        cdef Py_ssize_t i
        if not self.input_end:
            self.input_end = self.compute_start
        if not self.output_start:
            self.output_start = self.compute_end
        if self.count_execution:
            (<ModelCounters>self.model.counters).executed(
                self.size, self.compute_start, self.input_end, self.output_start, self.compute_end
            )
        self.instance.finished(self)
        for i in range(len(self.requests)):
            r = self.requests[i]
            r.stamps[<int>COMPUTE_START] = self.compute_start
            r.stamps[<int>COMPUTE_INPUT_END] = self.input_end
            r.stamps[<int>COMPUTE_OUTPUT_START] = self.output_start
            r.stamps[<int>COMPUTE_END] = self.compute_end
            if self.error is not None:
                complete(r, InferResponse(None, self.error), True)
                continue
            response = self.responses[i]
            if response is not None:
                complete(r, response, True)
            elif not self.model.decoupled:
                complete(r, InferResponse(None, TritonError(
                    f"model '{self.model.name}' returned no response for a request",
                    Code.INTERNAL, Reason.BACKEND)), True)


cdef class ResponsePost(WorkItem):
    """A response on its way from a model's thread to the trio thread (decoupled models)."""

    cdef InferRequest request
    cdef InferResponse response
    cdef bint final

    def __init__(self, InferRequest request, InferResponse response, bint final):
        self.request = request
        self.response = response
        self.final = final

    cpdef object deliver(self):
        complete(self.request, self.response, self.final)
