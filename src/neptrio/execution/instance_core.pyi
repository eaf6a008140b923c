# The types of cext/execution/instance_core.pyx, which says what everything does.

from collections import deque
from collections.abc import Callable
from typing import Any

from neptrio.execution.backend import BackendInstance
from neptrio.execution.batch import Batch
from neptrio.execution.rate_limiter import Claim, RateLimiter
from neptrio.loop.mailbox import CompletionQueue, Mailbox
from neptrio.request.infer_request import InferRequest, ModelCore

class PoolCore:
    instances: list[Any]
    on_free: Callable[[], object]
    on_finished: Callable[[Batch], object] | None
    limiter: RateLimiter | None
    def _granted(self) -> InstanceCore | None: ...
    def note_retired(self) -> None: ...
    def available(self, limit: int) -> Any: ...
    def freed(self) -> None: ...

class InstanceCore:
    name: str
    @property
    def backend(self) -> BackendInstance: ...
    @property
    def model(self) -> ModelCore: ...
    @property
    def pool(self) -> PoolCore: ...
    @property
    def mailbox(self) -> Mailbox: ...
    claim: Claim | None
    under_way: list[Batch]
    awaiting_grant: deque[Batch]
    outstanding: int
    owed: int
    retired: bool
    @property
    def executions(self) -> int: ...
    @property
    def inline_executions(self) -> int: ...
    @property
    def mean_ns(self) -> float: ...
    def __init__(
        self,
        name: str,
        model: ModelCore,
        backend: BackendInstance,
        completions: CompletionQueue,
        pool: PoolCore,
    ) -> None: ...
    def submit(self, requests: list[InferRequest], close_reason: str, oldest_wait_ns: int) -> None: ...
    def begin(self, batch: Batch) -> None: ...
    def make_batch(self, requests: list[InferRequest], close_reason: str, oldest_wait_ns: int) -> Batch: ...
    def finished(self, batch: Batch) -> None: ...
    def answered(self) -> None: ...
