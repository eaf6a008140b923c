# The types of cext/backends/accumulate.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.execution.batch import Batch
from neptrio.request.infer_request import Tensor

class AccumulateBatch(Batch):
    @staticmethod
    def of(batch: Batch, delay_ns: int, fail_value: float | None) -> AccumulateBatch: ...
    def job(
        self,
        i: int,
        tensor: Tensor,
        before: Tensor | bytearray | None,
        after: bytearray,
        output: bytearray,
        whole: bool = False,
    ) -> None: ...
    def deliver(self) -> None: ...
