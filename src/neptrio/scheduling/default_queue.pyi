# The types of cext/scheduling/default_queue.pyx, which says what everything does.

from collections import deque
from typing import Any

from neptrio.execution.instance_core import PoolCore
from neptrio.loop.loop_pass import LoopPass
from neptrio.request.infer_request import InferRequest

class DefaultQueue:
    @property
    def pool(self) -> Any: ...
    @property
    def loop_pass(self) -> LoopPass: ...
    queue: deque[InferRequest]
    gaps: int
    def __init__(self, pool: PoolCore, loop_pass: LoopPass) -> None: ...
    def enqueue(self, request: InferRequest) -> None: ...
    def dispatch(self, now: int) -> None: ...
    def freed(self) -> None: ...
