# The types of cext/frontend/slow_inputs.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

class SlowInputs: ...

class LentStrings:
    def __call__(self) -> Any: ...
