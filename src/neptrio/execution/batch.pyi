# The types of cext/execution/batch.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.errors import TritonError
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import InferRequest, InferResponse, ModelCore, Responder

def accept(request: InferRequest) -> None: ...
def refuse(request: InferRequest) -> None: ...
def give_back(request: InferRequest) -> None: ...
def hand_over(responder: Responder, request: InferRequest, response: InferResponse, final: bool) -> None: ...
def complete(request: InferRequest, response: InferResponse, final: bool) -> None: ...

class Executor:
    def finished(self, batch: Batch) -> None: ...

class Batch(WorkItem):
    model: ModelCore
    requests: list[InferRequest]
    @property
    def submitted(self) -> list[InferRequest]: ...
    instance: Any
    responses: list[InferResponse | None]
    error: TritonError | None
    size: int
    close_reason: str
    oldest_wait_ns: int
    count_execution: bool
    executions: list[tuple[int, ...]] | None
    fetching: bool
    copying: bool
    part: bool
    off_loop: bool
    compute_start: int
    input_end: int
    output_start: int
    compute_end: int
    def __init__(
        self, model: ModelCore, requests: list[InferRequest], close_reason: str = "", oldest_wait_ns: int = 0
    ) -> None: ...
    def execute(self) -> None: ...
    def mark_input_end(self) -> None: ...
    def mark_output_start(self) -> None: ...
    def deliver(self) -> None: ...
