"""Admission: every request passes through here on its way in, whichever transport or model sends it.

The problem: requests come in many ways (two protocols, their fast paths, streams, calls by models), and in each of
them the model must be found, a model refused that this way cannot serve, timestamps taken for tracing, and the
request validated, counted and queued. The choice: one object that all of them call, in this order: find(), then
received() if the request came over the network, then submit(); and cancel() when its client is gone.

A model that is loaded on demand (repository.demand) may not be there: an Absent stands in for it. find() returns that, and
submit() parks the request with it, until it comes back to submit() when the model serves. So no way in knows of such models,
and nothing of this is on the way of a request whose model serves.

Rules:
 1. When submit() returns, the request is accepted and will be answered exactly once, through its responder.
 2. When submit() raises, the request is in none of the model's counts except that of refusals; why is in the table of
    its last errors.
 3. A model may be replaced between find() and submit(); the request then goes to the version that serves.
"""
from neptrio.execution.batch cimport accept, count_for_owner, refuse, uncount
from neptrio.observe.counters cimport ModelCounters
from neptrio.observe.timing cimport take_wish
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

from neptrio.errors import TritonError, Unavailable, Unsupported
from neptrio.request.reshape import reshape_inputs

# the text that refuses a decoupled model where a transport can carry only one response (docs/protocol/features.md A1)
# a Triton server's texts, and the calls that serve such models
HTTP_ONE_RESPONSE = (
    "HTTP end point doesn't support models with decoupled transaction policy; infer_stream, generate_stream and gRPC's "
    "ModelStreamInfer do")
GRPC_ONE_RESPONSE = "ModelInfer RPC doesn't support models with decoupled transaction policy; ModelStreamInfer does"


cdef class RequestQueue:
    """A scheduler whose enqueue() is compiled: it is called without looking the method up."""

    cdef int queue(self, InferRequest request) except -1:
        """Queues a validated request."""
        raise NotImplementedError(f"{type(self).__name__}.queue")

    def enqueue(self, InferRequest request not None):
        """The same for callers in Python."""
        self.queue(request)


cdef class Absent(ModelCore):
    """Stands in for a model that is not loaded, and is when it is asked for. It is never ready.

    `one_response` is what find() was told: a model may turn out to be decoupled only when it is loaded.
    """

    def __init__(self, str name, str version, str one_response):
        # type: (..., ..., str | None) -> None
        super().__init__(name, version)
        self.one_response = one_response

    def park(self, InferRequest request not None):
        """Keeps a request until the model serves or cannot be loaded. Raises TritonError to refuse it."""
        raise NotImplementedError(f"{type(self).__name__}.park")


cdef class Admission:
    """Finds models and accepts requests. `directory` looks models up (repository.catalog.Catalog)."""

    def __init__(self, directory, Sampler tracer not None):
        self.directory = directory
        self.latest = directory.latest
        self.tracer = tracer
        self.demand = None

    def wait_with(self, demand):
        """From now on models that `demand` knows are loaded when they are asked for (repository.demand.Demand)."""
        self.demand = demand

    cpdef ModelCore lookup(self, str name, str version):
        """The ready model version of that name. Raises NotFound, Unavailable or InvalidArgument."""
        cdef ModelCore model
        if not version:
            model = self.latest.get(name)
            if model is not None and model.ready:
                return model
        return self.directory.lookup(name, version)

    cpdef ModelCore sought(self, str name, str version, str one_response=None):
        # type: (..., ..., str | None) -> ModelCore
        """As lookup(), but for a model that is loaded on demand and does not serve, or a version whose process is being started
        again, it is its Absent. Raises Unavailable where its last load has failed a moment ago."""
        cdef ModelCore model
        if not version:
            model = self.latest.get(name)
            if model is not None and model.ready:
                return model
        if self.demand is not None and name not in self.latest:
            model = self.demand.absent(name, version, one_response)
            if model is not None:
                return model
        try:
            return self.lookup(name, version)
        except Unavailable:
            model = None if self.demand is None else self.demand.unready(name, version, one_response)
            if model is None:
                raise
            return model

    def ready(self, str name, str version) -> bool:
        """Whether a request for the model would be taken and served. Raises as sought() does."""
        cdef ModelCore model = self.sought(name, version)
        if isinstance(model, Absent):
            return self.demand.would_serve(model)
        return model.ready

    def present(self, str name, str version):
        # type: (..., ...) -> Callable[[], Any] | None
        """What to call and await before a model is looked up that has to be loaded on demand first; None: nothing. For callers
        that need to know the model itself before they can make their request."""
        cdef ModelCore model
        if self.demand is None:
            return None
        if not version:
            model = self.latest.get(name)
            if model is not None and model.ready:
                return None
        return self.demand.present(name, version)

    def body_source(self, str name, str version):
        # type: (..., ...) -> Callable[[int], Any] | None
        """What makes memory for the tensors of a request that is being received: a function of a number of bytes, which
        may return None; None if that model has no such memory, or cannot be asked."""
        try:
            return self.lookup(name, version).body_source()
        except TritonError:  # the request is refused when it is complete
            return None

    cpdef ModelCore find(self, InferRequest request, str one_response):
        # type: (..., str | None) -> ModelCore
        """Looks up the model that a request names and sets it as the request's model.

        `one_response` is the text of the error for a decoupled model where only one response can be carried,
        None where any number can. Raises NotFound, Unavailable, InvalidArgument or Unsupported.
        """
        cdef ModelCore model = self.sought(request.model_name, request.model_version, one_response)
        if one_response is not None and model.decoupled:
            raise Unsupported(one_response)
        request.model = model
        return model

    def reads(self, str name, str version):
        # type: (..., ...) -> bool
        """Whether this process reads HTTP infer requests of that model. Where `forwards` is set it passes others on."""
        return True

    cpdef int received(self, InferRequest request, int64_t began) except -1:
        """Takes the first timestamps, if anything is traced: the whole request is there. `began` is when its first
        byte came (0 = now)."""
        cdef int64_t now
        if self.tracer.tracing:
            now = now_ns()
            request.timestamps[<int>RECV_START] = began or now
            request.timestamps[<int>RECV_END] = now
        return 0

    def received_at(self, InferRequest request not None, int64_t began, int64_t whole):
        """As received(), of a request that was whole at that moment."""
        if self.tracer.tracing:
            request.timestamps[<int>RECV_START] = began
            request.timestamps[<int>RECV_END] = whole

    cpdef submit(self, InferRequest request):
        """Accepts a decoded request; its responder gets the answer. Raises TritonError to refuse it."""
        cdef ModelCore model = request.model
        cdef bint accepted = False
        if model is None or not model.ready:  # it may have been replaced while the request came in
            if request.parent is not None and request.parent.composing:
                model = self.step(request)
            else:
                model = self.arrived(request)
            if model is None:
                return
            request.model = model
        try:
            if request.parameters is not None:
                take_wish(request)
            if model.tells_times and request.timing is None and request.parent is None:
                request.timing = True
            validate(request, model)
            if model.input_reshapes is not None:
                reshape_inputs(request, model.input_reshapes)
            if request.owner is not None:
                count_for_owner(request)
            request.timestamps[<int>REQUEST_START] = now_ns()
            if self.tracer.tracing and request.trace is None:
                self.tracer.begin(request)  # it may refuse a wish, such as a trace id that cannot be
            accept(request)
            accepted = True
            if isinstance(model.scheduler, RequestQueue):
                (<RequestQueue>model.scheduler).queue(request)
            else:
                model.scheduler.enqueue(request)
        except BaseException as error:
            if accepted:
                refuse(request)
                if request.trace is not None:
                    request.trace.refused(error)
            else:
                uncount(request)
            if isinstance(error, TritonError):
                (<ModelCounters>model.counters).note_error(error, True)
            raise

    cdef ModelCore arrived(self, InferRequest request):
        """The model of a request that was found before there was one, or before another one replaced it. None: the request
        is parked until it is loaded."""
        cdef ModelCore model
        cdef str one_response = (<Absent>request.model).one_response if isinstance(request.model, Absent) else None
        model = self.sought(request.model_name, request.model_version, one_response)
        if not isinstance(model, Absent):
            if one_response is not None and model.decoupled:
                raise Unsupported(one_response)
            return model
        self.park(request, model)
        return None

    cdef ModelCore step(self, InferRequest request):
        """The model of a step of an ensemble. None: the request is parked until the model's process is started again."""
        cdef ModelCore model
        try:
            return self.directory.lookup_step(request.model_name, request.model_version)
        except Unavailable:
            model = None
            if self.demand is not None:
                model = self.demand.unready(request.model_name, request.model_version, None)
            if model is None:
                raise
        self.park(request, model)
        return None

    cdef int park(self, InferRequest request, ModelCore model) except -1:
        """Lets a request wait with its model's Absent."""
        if request.owner is not None:
            count_for_owner(request)
        try:
            (<Absent>model).park(request)
        except BaseException:
            uncount(request)
            raise
        return 0

    def cancel(self, InferRequest request not None):
        """Cancels a request whose client is gone. Does nothing when it is done."""
        cdef ModelCore model = request.model
        if not request.cancelled:
            request.cancelled = True
            request.cancelled_ns = now_ns()
            if model is not None and request.scheduler is not None:
                model.scheduler.cancel(request)
            if request.on_cancel is not None:
                request.on_cancel()

    def inflight(self) -> int:
        """The number of accepted requests without a final response, of all models that serve."""
        cdef ModelCore model
        cdef int64_t found = 0
        for model in self.directory.ready_models():
            found += model.inflight
        return found
