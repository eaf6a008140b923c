"""Inference: look the model up, validate, accept, hand to the scheduler; and cancel."""

from __future__ import annotations

from neptrio._cext.door import Door
from neptrio._cext.request import InferRequest, monotonic_ns
from neptrio.repository.manager import RepositoryManager


class InferenceService(Door):
    """The door. A request that submit() returns from is accepted and will be answered once."""

    def __init__(self, repository: RepositoryManager) -> None:
        super().__init__(repository)
        self._repository = repository

    def inflight(self) -> int:
        """Accepted requests that are not answered, over all models that serve."""
        return sum(int(model.inflight) for model in self._repository.ready_models())

    def cancel(self, request: InferRequest) -> None:
        """The caller is gone. Nothing happens to requests that are done."""
        if not request.cancelled:
            request.cancelled = True
            request.cancelled_ns = monotonic_ns()
            if request.model is not None and request.scheduler is not None:
                request.model.scheduler.cancel(request)
            if request.on_cancel is not None:
                request.on_cancel()
