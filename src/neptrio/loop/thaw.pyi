# The types of cext/loop/thaw.pyx, which says what everything does.

from typing import Any

FOREIGN: frozenset[str]

def thaw(roots: list[Any], package: str, most: int) -> int: ...
