# The types of cext/observe/traced_tensors.pyx, which says what everything does.

from neptrio.observe.tensor_copy import TensorCopy

class TracedTensors:
    @property
    def rows(self) -> list[tuple[str, int, TensorCopy]]: ...
    @property
    def size(self) -> int: ...
    def drop(self) -> None: ...
