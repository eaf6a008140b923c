# The types of cext/observe/trace_recent.pyx, which says what everything does.

from typing import Any

RECENT: int

class Recent:
    def __len__(self) -> int: ...
    def last(self, count: int) -> list[dict[str, Any]]: ...
