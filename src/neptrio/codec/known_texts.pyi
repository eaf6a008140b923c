# The types of cext/codec/known_texts.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

LONGEST: Any

class Known:
    @property
    def binary_default(self) -> bool: ...

class KnownTexts:
    @property
    def found(self) -> int: ...
    def __init__(self) -> None: ...
