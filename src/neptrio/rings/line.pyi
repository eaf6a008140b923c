# The types of cext/rings/line.pyx, which says what everything does; written by tools/make_stubs.py.
from typing import Any

from neptrio.rings.body_area import BodyArea

class Queued: ...
class Lease: ...

class Line:
    def __init__(
        self, area: BodyArea, lent: dict[Any, Any], at: int, entries: int, late: Any, late_return: Any
    ) -> None: ...
