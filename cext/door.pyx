"""The door's hot half (neptrio/service/inference.py): look up, validate, accept, enqueue."""
from neptrio._cext.batch cimport accept, refuse
from neptrio._cext.request cimport REQUEST_START, InferRequest, ModelCore, now_ns
from neptrio._cext.trace_sampler cimport Sampler
from neptrio._cext.validate cimport validate

from neptrio.model.reshape import reshape_inputs


cdef class Door:
    """A request that submit() returns from is accepted and will be answered once."""

    def __init__(self, repository):
        self.repository = repository
        self.latest = repository.latest

    cpdef ModelCore lookup(self, str name, str version):
        """The ready model version. Raises NotFound, Unavailable or InvalidArgument."""
        cdef ModelCore model
        if not version:
            model = self.latest.get(name)
            if model is not None and model.ready:
                return model
        return self.repository.lookup(name, version)

    cpdef submit(self, InferRequest request):
        """Accepts a decoded request; its responder hears of the outcome. Raises TritonError if refused."""
        cdef ModelCore model = request.model
        if model is None or not model.ready:  # it may have been replaced while the request arrived
            if request.parent is not None and request.parent.composing:
                model = self.repository.lookup_step(request.model_name, request.model_version)
            else:
                model = self.lookup(request.model_name, request.model_version)
            request.model = model
        validate(request, model)
        if model.input_reshapes is not None:
            reshape_inputs(request, model.input_reshapes)
        request.stamps[<int>REQUEST_START] = now_ns()
        if self.tracing and self.tracer is not None:
            (<Sampler>self.tracer).begin(request)
        accept(request)
        try:
            model.scheduler.enqueue(request)
        except BaseException as error:
            refuse(request)
            if request.trace is not None:
                request.trace.refused(error)
            raise
