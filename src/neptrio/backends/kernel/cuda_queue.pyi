# The types of cext/backends/kernel/cuda_queue.pyx, which says what everything does; written by tools/make_stubs.py.
from neptrio.backends.kernel.cuda_memory import DevicePool
from neptrio.backends.kernel.cuda_pinned import PinnedPool

class DeviceQueue:
    @property
    def pool(self) -> DevicePool: ...
    @property
    def pinned(self) -> PinnedPool: ...
    def __init__(
        self,
        pool: DevicePool,
        pinned: PinnedPool,
        functions: list[int],
        busy_wait: bool,
        use_graphs: bool,
        owner: object,
        limit: float = 0,
    ) -> None: ...
    def usage(self) -> dict[str, int]: ...
    def close(self) -> None: ...
    def progress(self) -> tuple[int, int]: ...
