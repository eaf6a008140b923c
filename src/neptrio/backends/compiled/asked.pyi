# The types of cext/backends/compiled/asked.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

LEVELS: int
MEMORY: tuple[Any, ...]
MOST_BYTES: Any
SUBJECTS: tuple[Any, ...]

class Asking: ...
