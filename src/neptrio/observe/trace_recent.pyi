# The types of cext/observe/trace_recent.pyx, which says what everything does; written by tools/make_stubs.py.
from collections.abc import Iterator

RECENT: int

class Recent:
    def __len__(self) -> int: ...
    def last(self, count: int) -> Iterator[bytes]: ...
