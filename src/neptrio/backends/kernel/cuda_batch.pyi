# The types of cext/backends/kernel/cuda_batch.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.backends.kernel.cuda_launch import DeviceBatch
from neptrio.backends.kernel.cuda_queue import DeviceQueue
from neptrio.execution.batch import Batch
from neptrio.loop.mailbox import Mailbox

class DeviceBuilder:
    def __init__(
        self, names: list[str], optional: list[bool], batching: bool, device: int, host: Any, regions: Any
    ) -> None: ...
    def use(self, queue: DeviceQueue | None) -> None: ...
    def prepare(self, batch: Batch, mailbox: Mailbox) -> DeviceBatch: ...

def time_bare(batch: DeviceBatch, rounds: int, copies: bool) -> list[int]: ...
