"""Both ends of an isolated model's rings in one process: without a child process, loop or sleeping."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

import triton_python_backend_utils as utils
from neptrio.backends.python.process_session import PLAIN_LIBRARY
from neptrio.backends.python.ring_sender import Layout
from neptrio.backends.python.ring_server import ServerSide
from neptrio.errors import Internal, Reason
from neptrio.execution.batch import Batch
from neptrio.observe.counters import ModelCounters
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Responder
from neptrio.rings import model_side
from neptrio.rings.ring import Segment
from tests.support.requests import request_of
from triton_python_backend_utils._process import kinds, plain_side
from triton_python_backend_utils._process.reserved import sealed_memory

AREA = 1 << 20


def channel_of(request: utils.InferenceRequest) -> Any:
    """The way of a request's responses; a model does not see it."""
    return request._channel


class Model(ModelCore):
    """The part of a model that a batch uses."""

    state_outputs = ()


class Answers(Responder):
    """Collects (request, response, final)."""

    def __init__(self) -> None:
        self.got: list[tuple[InferRequest, InferResponse, bool]] = []

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.got.append((request, response, final))


class Back:
    """The way back of a received request; drops what is sent on it."""

    taken = False

    def __init__(self, id: int, names: Any) -> None:
        self.id = id
        self.names = names


class Mailbox:
    """Copies immediately what an instance's thread would copy later, and counts it."""

    submitted = 0

    def submit(self, copy: Any) -> None:
        self.submitted += 1
        copy.execute()
        copy.deliver()


class Pair:
    """A ServerSide with its host, and a ModelSide with its links; `model` answers batches."""

    def __init__(
        self,
        area: int = AREA,
        decoupled: bool = False,
        plain: bool = False,
        spin_ns: int = 0,
        entries: int | None = None,
    ) -> None:
        """`plain`: the model's end is that of other interpreters. `entries`: of the rings to the model, where not as
        many as usual."""
        self.model = Model("m", "1")
        self.model.counters = ModelCounters()
        self.model.decoupled = decoupled
        self.mailbox = Mailbox()
        self.owed = 0
        self.finished_batches: list[Batch] = []
        self.answers = Answers()
        self.violations: list[str] = []
        self.lags = 0  # how often the server's end asked to be called again
        self.calls: list[tuple[int, InferRequest, bool, bool]] = []
        self.segments: dict[int, int] = {}
        self.layout = Layout(area)
        if entries is not None:
            self.layout.work_entries = self.layout.control_entries = entries
        memory = sealed_memory("test", self.layout.size)
        self.shared = Segment(memory, self.layout.size)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK)
        self.server = ServerSide(self.shared, self.layout, self, decoupled)
        common = (os.dup(memory), self.bell, vars(self.layout), self, Back, "m", 1, ["OUT"], False)
        self.child: Any = (
            plain_side.PlainSide(PLAIN_LIBRARY, *common) if plain else model_side.ModelSide(*common, spin_ns)
        )

    # the interface of a ServerSide's host and a ModelSide's links
    def called(
        self, key: int, request: InferRequest, decoupled: bool, blocking: bool, timed: bool, batch: Any
    ) -> None:
        self.calls.append((key, request, decoupled, blocking))

    def took(self, key: int) -> None:
        pass

    def call_cancelled(self, key: int, dropped: bool) -> None:
        pass

    def dropped(self, request: InferRequest) -> Any:
        return Internal("dropped", reason=Reason.BACKEND)

    def reschedule(self, request: InferRequest) -> None:
        pass

    def violated(self, text: str) -> None:
        self.violations.append(text)

    def lag(self) -> None:
        self.lags += 1

    def send_segment(self, *given: Any) -> None:
        if isinstance(given[0], Segment):  # the server's
            self.segments[given[1]] = os.dup(given[0].fd)
        else:
            descriptor, number, size = given
            self.server.segment_came(number, Segment(os.dup(descriptor), size))

    def segment(self, number: int) -> int:
        return self.segments.pop(number)

    def catch_up(self) -> None:
        self.child.take_returns()

    # the interface of an instance that a batch uses
    def finished(self, batch: Batch) -> None:
        self.finished_batches.append(batch)

    def answered(self) -> None:
        pass

    def close(self) -> None:
        self.server.end()
        self.child.end()
        del self.child, self.shared
        os.close(self.bell)
        while self.segments:
            os.close(self.segments.popitem()[1])

    # ------------------------------------------------------------ for tests

    def request(self, **arrays: np.ndarray) -> InferRequest:
        """A request to the model."""
        request = request_of(**arrays)
        request.model, request.model_name = self.model, "m"
        request.responder = self.answers
        return request

    def begin(self, *requests: InferRequest) -> Batch:
        """Sends a batch."""
        batch = Batch(self.model, list(requests))
        batch.instance = self
        for request in requests:
            self.model.inflight += 1
            request.batch = batch
        self.server.begin(batch)
        return batch

    def execute(self, function: Callable[[list[utils.InferenceRequest]], list[Any]]) -> None:
        """Plays the model's process: takes a batch, calls `function` like execute(), and answers."""
        kind, number, message, _ = self.child.take()
        assert kind == kinds.BATCH
        given = self.child.requests(number, message)
        names = [channel_of(request).names for request in given]
        responses = function(given)
        given = None
        answers = [
            (response, wanted) if isinstance(response, utils.InferenceResponse) else response
            for response, wanted in zip(responses, names, strict=True)
        ]
        responses = None
        self.child.result(number, 1, 2, 3, 4, answers, lambda text: text, message)

    def outputs(self, function: Callable[[list[utils.InferenceRequest]], list[Any]], **arrays: Any) -> Any:
        """Sends one request through and returns the output tensors that the server receives."""
        self.answers.got.clear()
        self.begin(self.request(**arrays))
        self.execute(function)
        self.server.drain()
        assert not self.violations
        ((_, response, final),) = self.answers.got
        assert final
        if response.error is not None:
            raise response.error
        return response.outputs

    def place(self, address: int) -> str:
        """The part of the server's mapping of the shared memory that contains an address, "" when none does."""
        offset = address - self.shared.address
        if self.layout.inputs <= offset < self.layout.outputs:
            return "inputs"
        return "outputs" if self.layout.outputs <= offset < self.layout.size else ""
