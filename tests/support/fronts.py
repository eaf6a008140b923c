"""Both ends of the way between the engine and a front end, in one process, with a model that answers when told."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from neptrio.errors import NotFound
from neptrio.execution.admission import Admission
from neptrio.execution.batch import complete
from neptrio.frontend.channel import Layout
from neptrio.frontend.engine_side import EngineSide
from neptrio.frontend.front_side import FrontSide, RemoteAdmission
from neptrio.loop.loop_pass import LoopPass
from neptrio.observe.counters import ModelCounters
from neptrio.observe.trace_sampler import Sampler
from neptrio.request.infer_request import (
    DataType,
    InferRequest,
    InferResponse,
    InputSpec,
    ModelCore,
    Responder,
)
from neptrio.rings.ring import Segment
from triton_python_backend_utils._process.reserved import sealed_memory

AREA = 1 << 20


class Keeping:
    """A scheduler that keeps requests until answer()."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.cancelled: list[InferRequest] = []

    def enqueue(self, request: InferRequest) -> None:
        request.scheduler = self
        self.requests.append(request)

    def cancel(self, request: InferRequest) -> None:
        self.cancelled.append(request)

    def answer(self) -> None:
        """Answers each request with its inputs."""
        requests, self.requests = self.requests, []
        for request in requests:
            outputs = [tensor.renamed(tensor.name.replace("IN", "OUT")) for tensor in request.inputs]
            complete(request, InferResponse(outputs), True)


class Directory:
    """One model, `echo`: an input IN of numbers and an input TEXT of strings, both optional."""

    def __init__(self) -> None:
        self.scheduler = Keeping()
        model = ModelCore("echo", "1")
        model.set_inputs(
            [
                InputSpec("IN", int(DataType.DT_INT32), (-1,), True),
                InputSpec("TEXT", int(DataType.DT_BYTES), (-1,), True),
            ]
        )
        model.output_names = {"OUT", "TEXT"}
        model.scheduler = self.scheduler
        model.counters = ModelCounters()
        model.ready = True
        self.latest = {"echo": model}

    def lookup(self, name: str, version: str) -> ModelCore:
        if name != "echo" or version not in ("", "1"):
            raise NotFound(f"Request for unknown model: '{name}' is not found")
        return self.latest["echo"]

    def ready_models(self) -> list[ModelCore]:
        return list(self.latest.values())


class Answers(Responder):
    """What a transport was told: (response, final)."""

    def __init__(self) -> None:
        self.got: list[tuple[InferResponse, bool]] = []
        self.full = False
        self.callbacks: list[Any] = []

    def respond(self, request: InferRequest, response: InferResponse, final: bool) -> None:
        self.got.append((response, final))

    def wait_for_room(self, request: InferRequest, callback: Any) -> bool:
        if self.full:
            self.callbacks.append(callback)
        return self.full


class FrontPair:
    """An engine's end and a front end's."""

    def __init__(self, area: int = AREA, tracer: Callable[[LoopPass], Sampler] | None = None) -> None:
        self.layout = Layout(area)
        fd = sealed_memory("test", self.layout.size)
        self.directory = Directory()
        self.violations: list[str] = []
        self.bells: list[str] = []
        self.late: list[str] = []
        self.loop_pass = LoopPass()  # the engine's
        self.front_pass = LoopPass()
        services = SimpleNamespace(
            admission=Admission(self.directory, Sampler() if tracer is None else tracer(self.loop_pass)),
            shared_memory=None,
            loop=SimpleNamespace(loop_pass=self.loop_pass),
        )
        self.engine_host = host = SimpleNamespace(violated=self.violations.append)
        self.shared = Segment(os.dup(fd), self.layout.size)
        self.engine = EngineSide(
            Segment(fd, self.layout.size),
            self.layout,
            lambda: self.bells.append("front"),
            lambda: self.late.append("engine"),
            services,
            host,
        )
        self.front = FrontSide(
            self.shared,
            self.layout,
            lambda: self.bells.append("engine"),
            lambda: self.late.append("front"),
        )
        self.admission = RemoteAdmission(self.front)
        self.admission.tracer.tracing = tracer is not None
        self.answers = Answers()

    def request(self, *inputs: Any, model: str = "echo", **more: Any) -> InferRequest:
        """Submits a request as a transport does."""
        request = InferRequest()
        request.model_name = model
        request.inputs = list(inputs)
        for name, value in more.items():
            setattr(request, name, value)
        self.admission.find(request, None)
        request.responder = self.answers
        self.admission.received(request, 0)
        self.admission.submit(request)
        return request

    def turn(self) -> None:
        """Both ends take what has come, until nothing is left, as their loops do."""
        for _ in range(8):
            for end, loop_pass in ((self.engine, self.loop_pass), (self.front, self.front_pass)):
                while end.drain():
                    pass
                end.look()
                loop_pass.end()
