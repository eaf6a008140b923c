# The types of cext/observe/executions.pyx, which says what everything does; written by tools/make_stubs.py.

MOST_SIZES: int

class BatchCounters:
    @property
    def batch_size(self) -> int: ...

class ExecutionCounters:
    @property
    def execution_count(self) -> int: ...
    @property
    def last_inference_ms(self) -> int: ...
    @property
    def changes(self) -> int: ...
    def execution_reported(
        self, row: tuple[int, int, int, int, int], instead_of: tuple[int, int, int, int] | None
    ) -> None: ...
