# The types of cext/backends/identity_batch.pyx, which says what everything does.

from typing import Any

from neptrio.execution.batch import Batch

class DelayBatch(Batch):
    def deliver(self) -> None: ...

def identity(batch: DelayBatch, pairs: list[Any], delay_ns: int) -> None: ...
def run_inline(batch: Batch) -> None: ...
