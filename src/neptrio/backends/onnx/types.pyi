# The types of cext/backends/onnx/types.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

class ValueInfo:
    name: str
    type: str
    shape: list[int | str]
    def __init__(self, name: str, type: str, shape: list[Any]) -> None: ...
