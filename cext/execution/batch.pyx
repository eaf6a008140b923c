"""Batches, and the only place where requests are answered.

Rules:
 1. Every accepted request gets exactly one final response, through complete(), unless it is given back before it has begun;
    nothing else calls a responder.
 2. complete() runs on the trio thread. Models' threads reach it through a work item.
 3. A request's error concerns that request only; an error of the whole batch is copied to each of its requests.
 4. Statistics are written before the responder is called, so a client that has its answer finds it counted.
 5. A request that was cancelled during its execution ends as cancelled, whatever the model answered, unless its
    responses are still read (`still_read`: a model called cancel() and goes on iterating).
 6. A responder that raises fails its own request only: it is given an error instead, and the rest of the batch is
    answered as usual (hand_over).
 7. A failed execution is logged here under its model's name, for every backend (neptrio/logs.py limits how often).
    An error that the request itself caused is told to its client and not logged.
"""
import logging

from libc.stdint cimport int64_t

from neptrio.observe.counters cimport ModelCounters
from neptrio.request.device_memory cimport fetch_inputs, in_use
from neptrio.loop.mailbox cimport WorkItem
from neptrio.request.infer_request cimport (
    CACHE_LOOKUP_END,
    CACHE_LOOKUP_START,
    COMPUTE_END,
    COMPUTE_INPUT_END,
    COMPUTE_OUTPUT_START,
    COMPUTE_START,
    DONE,
    NO_PROTOCOL,
    QUEUE_START,
    RECV_START,
    REQUEST_END,
    InferRequest,
    InferResponse,
    ModelCore,
    Owner,
    Responder,
    Tensor,
    now_ns,
)
from neptrio.observe.timing cimport tell
from neptrio.observe.trace cimport Trace

from neptrio.errors import Cancelled, Code, NotBegun, Reason, TritonError, settled
from neptrio.foreign import summary

cdef object CANCELED = Reason.CANCELED
cdef object BACKEND = Reason.BACKEND
cdef object log = logging.getLogger("neptrio.batch")

cdef enum:
    RESCHEDULE = 2  # TRITONSERVER_REQUEST_RELEASE_RESCHEDULE


cpdef accept(InferRequest request):
    """Counts a validated request as accepted by its model; complete() or refuse() ends that."""
    cdef ModelCore model = request.model
    cdef ModelCounters counters = model.counters
    cdef Tensor tensor
    cdef int64_t nbytes = 0
    if request.inputs is not None:
        for tensor in request.inputs:
            nbytes += tensor.nbytes
    model.inflight += 1
    request.input_bytes = nbytes
    counters.accepted += 1
    counters.inflight_bytes += nbytes


cdef int count_for_owner(InferRequest request) except -1:
    """Counts a request from the network as one of its owner's, until leave(). Raises TritonError beyond its limit."""
    cdef Owner owner = request.owner
    if request.parent is not None or request.responder is None or request.responder.protocol == NO_PROTOCOL:
        return 0
    if owner.most and owner.open >= owner.most:
        raise owner.too_many()
    owner.open += 1
    request.counted = True
    return 0


cpdef refuse(InferRequest request):
    """Undoes accept() for a request that the scheduler refused: it is not counted at all."""
    cdef ModelCounters counters = request.model.counters
    counters.accepted -= 1
    counters.refused += 1
    leave(request, request.model)


def give_back(InferRequest request not None):
    """Undoes accept(), and what followed it, for a request that its model will not execute and that is not answered: it waits
    elsewhere from now on. It goes on counting as its owner's, and a trace of it goes on."""
    cdef bint counted = request.counted
    request.counted = False
    (<ModelCounters>request.model.counters).accepted -= 1
    leave(request, request.model)
    request.counted = counted
    request.batch = request.scheduler_data = request.on_cancel = None
    request.timestamps[<int>QUEUE_START] = 0
    request.timestamps[<int>CACHE_LOOKUP_START] = request.timestamps[<int>CACHE_LOOKUP_END] = 0
    if request.trace is None:  # it was not chosen to be traced, and is not asked about again
        request.timestamps[<int>RECV_START] = 0


cdef int uncount(InferRequest request) except -1:
    """Undoes count_for_owner()."""
    if request.counted:
        request.counted = False
        request.owner.open -= 1
    return 0


cdef int leave(InferRequest request, ModelCore model) except -1:
    uncount(request)
    if request.input_bytes:
        (<ModelCounters>model.counters).inflight_bytes -= request.input_bytes
        request.input_bytes = 0
    model.inflight -= 1
    if model.inflight == 0 and model.on_idle is not None:
        model.on_idle()
    return 0


cdef int take_timestamps(InferRequest r, Batch batch, int64_t end) except -1:
    """Copies the timestamps that the batch has to a request that ends at `end` (0 = when the batch ends)."""
    cdef int64_t start = batch.compute_start
    cdef int64_t stop = batch.compute_end
    if not start:
        return 0
    if end and (not stop or stop > end):
        stop = end
    r.timestamps[<int>COMPUTE_START] = start
    r.timestamps[<int>COMPUTE_INPUT_END] = min(batch.input_end or start, stop)
    r.timestamps[<int>COMPUTE_OUTPUT_START] = min(batch.output_start or stop, stop)
    r.timestamps[<int>COMPUTE_END] = stop
    return 0


cpdef hand_over(Responder responder, InferRequest request, InferResponse response, bint final):
    """Passes a response to a responder. A responder that raises is given an error instead.

    Never raises what a responder raised, because the caller has other requests to answer.
    """
    try:
        responder.respond(request, response, final)
        return
    except Exception as error:
        log.exception("a response of model '%s' could not be sent", response.model_name)
        failure = InferResponse(None, TritonError(
            f"the response of model '{response.model_name}' could not be sent: {summary(error)}",
            Code.INTERNAL, Reason.OTHER))
    failure.model_name, failure.model_version, failure.id = response.model_name, response.model_version, response.id
    try:
        responder.respond(request, failure, final)
    except Exception:
        log.exception("nor could that be told")


cpdef complete(InferRequest request, InferResponse response, bint final):
    """Delivers a response. With `final` the request is done and no longer counted as accepted.

    Does nothing for a request that is already done, so late answers to a cancelled or expired request are
    dropped here.
    """
    cdef ModelCore model = request.model
    cdef Trace trace
    if request.state == DONE:
        return
    if final and request.cancelled and not request.still_read and (
            response.error is None or response.error.reason is not CANCELED):
        response = InferResponse(None, Cancelled())
    cdef int64_t now = now_ns() if final or model.decoupled else 0
    if final:
        request.state = DONE
        request.timestamps[<int>REQUEST_END] = now
    try:
        account(request, response, final, now)
    except Exception as error:  # rule 1: it is answered all the same
        log.exception("a response of model '%s' could not be made", model.name)
        response = InferResponse(None, TritonError(
            f"the response of model '{model.name}' could not be made: {summary(error)}",
            Code.INTERNAL, Reason.OTHER))
        name_response(request, model, response)
        if final and request.cache_key is not None:  # those who follow it would wait for ever
            try:
                model.scheduler.offer(request, response)
            except Exception:
                log.exception("the requests that follow one of model '%s' could not be told", model.name)
    if request.trace is not None:
        trace = <Trace>request.trace
        trace.answering(response, final, now)
        hand_over(request.responder, request, response, final)
        trace.answered(final)
    else:
        hand_over(request.responder, request, response, final)
    if final:
        if request.owed:
            request.owed = False
            request.batch.instance.answered()
        request.scheduler_data = None
        request.batch = None
        leave(request, model)


cdef inline int name_response(InferRequest request, ModelCore model, InferResponse response) except -1:
    response.model_name = model.name
    response.model_version = model.version
    response.id = request.id
    return 0


cdef int account(InferRequest request, InferResponse response, bint final, int64_t now) except -1:
    """What comes before a response is handed over: its name and shapes, the statistics, the cache, the client's wishes."""
    cdef ModelCore model = request.model
    name_response(request, model, response)
    # what the cache holds, and what followers get, was given clients' shapes before
    if model.reshape_outputs is not None and response.outputs and not request.cache_hit:
        response.outputs = model.reshape_outputs(response.outputs)
    if (final or model.decoupled) and request.collect_statistics:
        if request.batch is not None and (model.decoupled or request.timestamps[<int>COMPUTE_START] == 0):
            # a decoupled model has answered before its batch is back
            take_timestamps(request, request.batch, now)
        if model.decoupled:
            (<ModelCounters>model.counters).responded(request, response, now)
        if final:
            (<ModelCounters>model.counters).answered(request, response)
        if request.cache_key is not None:
            model.scheduler.offer(request, response)
    if request.timing is not None:
        tell(request, response, now)
    if not response.null:
        request.responses += 1
    return 0


cdef class Executor:
    """Who executes batches, as they see it (execution.instance_core)."""

    cdef int back(self, Batch batch) except -1:
        """Called on the trio thread when a batch is back, before its requests are answered."""
        raise NotImplementedError(f"{type(self).__name__}.back")

    def finished(self, Batch batch not None):
        """The same for callers in Python."""
        self.back(batch)


cdef class Batch(WorkItem):
    """Requests that are executed together. Subclasses replace `work.run` to execute without the GIL."""

    def __init__(self, ModelCore model, list requests, str close_reason="", int64_t oldest_wait_ns=0):
        # type: (..., list[InferRequest], ..., ...) -> None
        self.set_up(model, requests, close_reason, oldest_wait_ns)

    cdef int set_up(self, ModelCore model, list requests, str close_reason, int64_t oldest_wait_ns) except -1:
        """What __init__ does, for callers that make many."""
        cdef InferRequest r
        self.model = model
        self.requests = self.submitted = requests
        self.responses = [None] * len(requests)
        self.size = 0
        for r in requests:
            self.size += r.batch_size
        self.close_reason = close_reason
        self.oldest_wait_ns = oldest_wait_ns
        self.count_execution = True
        return 0

    cpdef object execute(self):
        """Runs the backend on the instance's thread; what it raises becomes the batch's error."""
        self.compute_start = now_ns()
        try:
            if in_use() and not self.instance.backend.takes_device_memory:
                fetch_inputs(self.requests)
            self.instance.backend.execute(self)
        except TritonError as error:
            self.error = settled(error)
        except BaseException as error:
            self.error = self.instance.backend.describe_failure(error)
        self.compute_end = now_ns()

    def mark_input_end(self):
        """To be called when the inputs are ready for the model: compute_input ends, compute_infer begins."""
        self.input_end = now_ns()

    def mark_output_start(self):
        """To be called when the model has computed: compute_infer ends, compute_output begins."""
        self.output_start = now_ns()

    cpdef object deliver(self):
        """Counts the execution, frees the instance and answers every request. On the trio thread."""
        cdef InferRequest r
        cdef InferResponse response
        cdef ModelCounters counters
        cdef Py_ssize_t i
        if not self.input_end:
            self.input_end = self.compute_start
        if not self.output_start:
            self.output_start = self.compute_end
        if self.count_execution:
            counters = <ModelCounters>self.model.counters
            if self.executions is not None:
                for row in self.executions:
                    counters.execution_reported(row, None)
            else:
                counters.executed(self.size, self.compute_start, self.input_end, self.output_start, self.compute_end)
            (<ModelCounters>self.model.counters).closed(self.close_reason, self.size, self.oldest_wait_ns)
        instance = self.instance
        if self.part:
            pass
        elif isinstance(instance, Executor):
            (<Executor>instance).back(self)
        else:
            instance.finished(self)
        if self.error is not None:
            if self.error.reason is BACKEND and not self.error.logged:
                log.error("%s", self.error, extra={"subject": self.model.name})
            # its traceback refers to the batch: this breaks the cycle, so that both are freed at once
            self.error.__traceback__ = self.error.__cause__ = self.error.__context__ = None
        for i in range(len(self.requests)):
            r = self.requests[i]
            if r.state == DONE:
                continue
            take_timestamps(r, self, 0)
            # one that the model wants to execute again is cancelled by its scheduler, whose sequence it is
            if (r.cancelled and not self.model.decoupled
                    and (self.error is not None or not r.release_flags & RESCHEDULE)):
                complete(r, InferResponse(None, Cancelled()), True)
                continue
            if self.error is not None:
                if not isinstance(self.error, NotBegun) or not self.model.take_back(r):
                    complete(r, InferResponse(None, self.error), True)
                continue
            response = self.responses[i]
            if response is not None:
                complete(r, response, True)
            elif r.release_flags & RESCHEDULE:
                self.model.scheduler.reschedule(r)
            elif not self.model.decoupled:
                complete(r, InferResponse(None, TritonError(
                    f"model '{self.model.name}' returned no response for a request",
                    Code.INTERNAL, Reason.BACKEND)), True)
        if self.model.decoupled or self.requests is not self.submitted:
            for r in self.submitted:  # the model answers them later through response senders
                if r.state != DONE and r.batch is self and not r.owed:
                    r.owed = True
                    self.instance.owed += 1
