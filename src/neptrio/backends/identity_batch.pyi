# The types of cext/backends/identity_batch.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Callable
from typing import Any

from neptrio.execution.batch import Batch
from neptrio.request.infer_request import Tensor

class DelayBatch(Batch):
    def deliver(self) -> None: ...

class IdentityBuilder:
    def __init__(
        self, pairs: list[Any], delay_ns: int, absent: list[Callable[[int], Tensor] | None] | None = None
    ) -> None: ...
    def prepare(self, batch: DelayBatch) -> Batch: ...

def run_inline(batch: Batch) -> None: ...
