# The types of cext/rings/answers.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.rings.ring import Segment

class OutputBytes:
    def __buffer__(self, flags: int, /) -> memoryview: ...

class WireStrings:
    @property
    def memory(self) -> Any: ...
    @property
    def size(self) -> int: ...
    @property
    def shape(self) -> tuple[Any, ...]: ...

class AnswerPacker:
    def __init__(self, segment: Segment, outputs_first: int, output_names: list[Any]) -> None: ...
