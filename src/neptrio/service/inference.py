"""Inference: look the model up, validate, accept, hand to the scheduler; and cancel."""

from __future__ import annotations

from typing import Any

from neptrio._cext.batch import accept, refuse
from neptrio._cext.request import InferRequest, monotonic_ns
from neptrio._cext.validate import validate
from neptrio.model.reshape import reshape_inputs
from neptrio.observe.tracer import Tracer
from neptrio.repository.manager import RepositoryManager
from neptrio.stamps import Stamp

REQUEST_START = int(Stamp.REQUEST_START)


class InferenceService:
    """The door. A request that submit() returns from is accepted and will be answered once."""

    def __init__(self, repository: RepositoryManager) -> None:
        self._repository = repository
        self.tracing = False  # kept by the tracer: True while a request may have to be traced
        self.trace_headers = False  # kept by the tracer: True while headers may ask for a trace
        self.tracer: Tracer | None = None

    def lookup(self, name: str, version: str) -> Any:
        """The ready model version. Raises NotFound, Unavailable or InvalidArgument."""
        return self._repository.lookup(name, version)

    def inflight(self) -> int:
        """Accepted requests that are not answered, over all models that serve."""
        return sum(int(model.inflight) for model in self._repository.ready_models())

    def submit(self, request: InferRequest) -> None:
        """Accepts a decoded request; its responder hears of the outcome. Raises TritonError if refused."""
        model = request.model
        if model is None or not model.ready:  # it may have been replaced while the request arrived
            step = request.parent is not None and request.parent.composing
            lookup = self._repository.lookup_step if step else self._repository.lookup
            model = request.model = lookup(request.model_name, request.model_version)
        validate(request, model)
        if model.input_reshapes is not None:
            reshape_inputs(request, model.input_reshapes)
        request.stamp(REQUEST_START)
        if self.tracing and self.tracer is not None:
            self.tracer.begin(request)
        accept(request)
        try:
            model.scheduler.enqueue(request)
        except BaseException as error:
            refuse(request)
            if request.trace is not None:
                request.trace.refused(error)
            raise

    def cancel(self, request: InferRequest) -> None:
        """The caller is gone. Nothing happens to requests that are done."""
        if not request.cancelled:
            request.cancelled = True
            request.cancelled_ns = monotonic_ns()
            if request.model is not None and request.scheduler is not None:
                request.model.scheduler.cancel(request)
            if request.on_cancel is not None:
                request.on_cancel()
