# The types of cext/backends/python/ring_sender.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.backends.python.ring_reader import AnswerReader
from neptrio.execution.batch import Batch
from neptrio.loop.mailbox import WorkItem
from neptrio.request.infer_request import InferRequest, InferResponse, Tensor
from neptrio.rings.ring import Segment

class Layout:
    area: int
    work: int
    work_entries: int
    control: int
    control_entries: int
    done: int
    done_entries: int
    inputs: int
    bodies: int
    outputs: int
    size: int
    def __init__(self, area: int, bodies: int = 0) -> None: ...

class BatchUnderWay: ...

class MessageCopy(WorkItem):
    def execute(self) -> None: ...
    def deliver(self) -> None: ...

class RingSender(AnswerReader):
    @property
    def batches(self) -> dict[int, BatchUnderWay]: ...
    def __init__(self, segment: Segment, layout: Any, host: Any) -> None: ...
    def violated(self, why: str) -> None: ...
    def body_memory(self, size: int) -> Any: ...
    @property
    def body_bytes(self) -> int: ...
    def holds_body(self, tensor: Tensor) -> bool: ...
    def received_here(self, batch: Batch) -> bool: ...
    def sequence_ended(self, sequence_id: Any, reason: str) -> None: ...
    def look_at_socket(self) -> None: ...
    def respond(
        self,
        key: int,
        response: InferResponse | None,
        final: bool,
        waits: bool,
        numbers: dict[Any, Any],
        timed: InferRequest | None = None,
    ) -> None: ...
    def return_memory(self, offset: int) -> None: ...
