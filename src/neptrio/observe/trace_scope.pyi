# The types of cext/observe/trace_scope.pyx, which says what everything does.

from neptrio.observe.trace_block import TraceBlock

class Sampling:
    @property
    def timestamps(self) -> bool: ...
    @property
    def with_tensors(self) -> bool: ...
    rate: int
    left: int
    tail_us: int
    seen: int
    open: int
    retired: bool
    to_file: bool
    block: TraceBlock | None
    @property
    def level(self) -> tuple[str, ...]: ...
    @level.setter
    def level(self, levels: tuple[str, ...]) -> tuple[str, ...]: ...
    def sample(self) -> bool: ...
    def take_block(self) -> TraceBlock | None: ...
    def keep(self, slow_or_failed: bool) -> bool: ...
