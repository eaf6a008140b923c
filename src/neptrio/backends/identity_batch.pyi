# The types of cext/backends/identity_batch.pyx, which says what everything does.

from typing import Any

from neptrio.execution.batch import Batch

class DelayBatch(Batch):
    def deliver(self) -> None: ...

class IdentityBuilder:
    def __init__(self, pairs: list[Any], delay_ns: int) -> None: ...
    def prepare(self, batch: DelayBatch) -> Batch: ...

def run_inline(batch: Batch) -> None: ...
