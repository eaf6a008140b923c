"""Admission: what every request passes on its way in, whichever transport or model it comes from.

The problem: a request comes in on many ways (two protocols, their fast paths, streams, calls of
models), and on each of them somebody has to find the model, refuse what that way cannot carry, take
the timestamps of tracing, validate, count and queue. The choice: one object that all of them call, in this
order: find(), received() where a network was involved, submit(); and cancel() when the caller is gone.

Rules:
 1. A request that submit() returns from is accepted and will be answered once, by its responder.
 2. What submit() raises has left no trace in the model's accounts but a count of refusals.
 3. A model may be replaced between find() and submit(): the request then goes to the one that serves.
"""
from neptrio.execution.batch cimport accept, refuse
from neptrio.observe.trace_sampler cimport Sampler
from neptrio.request.infer_request cimport (
    RECV_END,
    RECV_START,
    REQUEST_START,
    InferRequest,
    ModelCore,
    now_ns,
)
from neptrio.request.validate cimport validate

from neptrio.errors import Unsupported
from neptrio.request.reshape import reshape_inputs

# why a transport that carries one response refuses a decoupled model (docs/protocol/features.md A1)
HTTP_ONE_RESPONSE = "HTTP end point doesn't support models with decoupled transaction policy"
GRPC_ONE_RESPONSE = "ModelInfer RPC doesn't support models with decoupled transaction policy"


cdef class Admission:
    """Finds models and takes requests in. `directory` knows what serves (repository.catalog.Catalog)."""

    def __init__(self, directory, Sampler tracer not None):
        self.directory = directory
        self.latest = directory.latest
        self.tracer = tracer

    cpdef ModelCore lookup(self, str name, str version):
        """The ready model version. Raises NotFound, Unavailable or InvalidArgument."""
        cdef ModelCore model
        if not version:
            model = self.latest.get(name)
            if model is not None and model.ready:
                return model
        return self.directory.lookup(name, version)

    cpdef ModelCore find(self, InferRequest request, str one_response):
        """The model that a request names, which becomes its model.

        `one_response` is the text that refuses a decoupled model where only one response can be
        carried, or None. Raises NotFound, Unavailable, InvalidArgument or Unsupported.
        """
        cdef ModelCore model = self.lookup(request.model_name, request.model_version)
        if one_response is not None and model.decoupled:
            raise Unsupported(one_response)
        request.model = model
        return model

    cpdef int received(self, InferRequest request, int64_t began) except -1:
        """While anything is traced: a request has arrived whole, its first byte at `began` (0 = just now)."""
        cdef int64_t now
        if self.tracer.tracing:
            now = now_ns()
            request.timestamps[<int>RECV_START] = began or now
            request.timestamps[<int>RECV_END] = now
        return 0

    cpdef submit(self, InferRequest request):
        """Accepts a decoded request; its responder hears of the outcome. Raises TritonError if refused."""
        cdef ModelCore model = request.model
        if model is None or not model.ready:  # it may have been replaced while the request arrived
            if request.parent is not None and request.parent.composing:
                model = self.directory.lookup_step(request.model_name, request.model_version)
            else:
                model = self.lookup(request.model_name, request.model_version)
            request.model = model
        validate(request, model)
        if model.input_reshapes is not None:
            reshape_inputs(request, model.input_reshapes)
        request.timestamps[<int>REQUEST_START] = now_ns()
        if self.tracer.tracing:
            self.tracer.begin(request)
        accept(request)
        try:
            model.scheduler.enqueue(request)
        except BaseException as error:
            refuse(request)
            if request.trace is not None:
                request.trace.refused(error)
            raise

    def cancel(self, InferRequest request not None):
        """The caller is gone. Nothing happens to requests that are done."""
        cdef ModelCore model = request.model
        if not request.cancelled:
            request.cancelled = True
            request.cancelled_ns = now_ns()
            if model is not None and request.scheduler is not None:
                model.scheduler.cancel(request)
            if request.on_cancel is not None:
                request.on_cancel()

    def inflight(self) -> int:
        """Accepted requests that are not answered, over all models that serve."""
        cdef ModelCore model
        cdef int64_t found = 0
        for model in self.directory.ready_models():
            found += model.inflight
        return found
