"""Hands requests of one model to another, and copies before that what another process could still write to.

The problem: what request.foreign_memory finds must be copied before anybody checks it. A hundred megabytes take the loop
70 ms, in which nobody is served, and are memory that no client's body accounts for. The choice: up to ON_LOOP bytes are
copied at once, more by the workers, and all copies count among the held bytes (service.held_bytes).

Rules:
 1. Copied, then checked: a request is submitted after all of its inputs were copied.
 2. Requests for one model are submitted in the order in which they were handed over: those behind one that is being copied
    wait in line.
 3. One that is cancelled meanwhile is not submitted.
 4. A copy counts as long as it lives, which is until its request was answered unless a model keeps it. One that would be too
    much is refused before it is made.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from neptrio.errors import Cancelled, TritonError
from neptrio.loop.workers import Workers
from neptrio.request import foreign_memory
from neptrio.request.file_part import LargeFiles
from neptrio.request.infer_request import InferRequest, Tensor
from neptrio.request.own_copy import OwnCopy

log = logging.getLogger("neptrio.batcher")

ON_LOOP = 512 << 10  # bytes; handing fewer to a worker takes the loop as long as copying them

Refused = Callable[[Exception], None]


class Budget(Protocol):
    """What bounds the bytes that are held (service.held_bytes.HeldBytes)."""

    def take(self, size: int) -> None:
        """Raises Overloaded when there is no room for so many more."""

    def add(self, source: Callable[[], int]) -> None:
        """Counts what `source` says."""


class Gate(Protocol):
    """What accepts requests (execution.admission.Admission)."""

    def lookup(self, name: str, version: str) -> Any:
        """The model of that name."""

    def submit(self, request: InferRequest) -> None:
        """Accepts a request."""


@dataclass(eq=False)
class _Waiting:
    """A request in line."""

    request: InferRequest
    admission: Gate
    refused: Refused
    size: int = 0  # bytes to be copied that take() has let in


class ForeignInputs:
    """The way from one model to another. Trio thread only."""

    def __init__(self, workers: Workers | None = None, held: Budget | None = None) -> None:
        self._workers = workers or Workers()
        self._held = held
        self._lines: dict[str, deque[_Waiting]] = {}  # by the name of the model; the first is being copied
        self._coming = 0  # bytes that will be copied
        self._copies = LargeFiles()
        if held is not None:
            held.add(lambda: self._coming + self._copies.held)

    def submit(self, admission: Gate, request: InferRequest, refused: Refused) -> None:
        """Submits a request to `admission`, now or when its inputs are copied. Raises what admission raises, and Overloaded;
        what goes wrong after it has returned is told to `refused`."""
        if self._lines and (line := self._lines.get(request.model_name)) is not None:
            line.append(_Waiting(request, admission, refused))
            return
        if foreign_memory.among(request.inputs):
            foreign = _foreign(admission, request)
            size = sum([tensor.nbytes for tensor in foreign])
            if size > ON_LOOP:
                if self._held is not None:
                    self._held.take(size)
                self._coming += size
                self._lines[request.model_name] = deque([_Waiting(request, admission, refused, size)])
                trio.lowlevel.spawn_system_task(self._serve, request.model_name)
                return
            copies = {tensor: OwnCopy(tensor, self._copies) for tensor in foreign}
            for copy in copies.values():
                copy.step()
            _replace(request, copies)
        admission.submit(request)

    async def _serve(self, name: str) -> None:
        """Copies for the first in line, hands it over and goes on until nobody is left. Must not raise."""
        line = self._lines[name]
        while line:
            first = line[0]
            error: Exception | None = None
            try:
                await self._copy(first, line)
            except Exception as caught:
                error = caught
            line.popleft()
            try:
                if error is None:
                    first.admission.submit(first.request)
            except Exception as caught:
                error = caught
            if error is not None:
                _tell(first.refused, error)
            del first, error
        del self._lines[name]

    async def _copy(self, waiting: _Waiting, whose: object) -> None:
        """Copies what is foreign of a request, whose turn it is. Raises Cancelled, Overloaded, NoThread, MemoryError."""
        request = waiting.request
        self._coming -= waiting.size
        if not request.cancelled:
            foreign = _foreign(waiting.admission, request)
            if not waiting.size and self._held is not None:
                size = sum([tensor.nbytes for tensor in foreign])
                if size > ON_LOOP:
                    self._held.take(size)
            copies = {tensor: OwnCopy(tensor, self._copies) for tensor in foreign}
            for copy in copies.values():
                await self._workers.finish(copy.step, lambda: request.cancelled, whose)
            if not request.cancelled:
                _replace(request, copies)
        if request.cancelled:
            raise Cancelled


def _foreign(admission: Gate, request: InferRequest) -> list[Tensor]:
    """The inputs to be copied: all that are foreign, unless the model is known to run elsewhere."""
    try:
        model = request.model or admission.lookup(request.model_name, request.model_version)
    except TritonError:  # submit() knows more of models that are about to go
        model = None
    if model is not None and not foreign_memory.runs_here(model):
        return []
    return [tensor for tensor in request.inputs if foreign_memory.is_foreign(tensor)]


def _replace(request: InferRequest, copies: dict[Tensor, OwnCopy]) -> None:
    if copies:
        request.inputs = [copies[t].tensor() if t in copies else t for t in request.inputs]


def _tell(refused: Refused, error: Exception) -> None:
    try:
        refused(error)
    except Exception:
        log.exception("that a request could not be handed to a model could not be told")
