# The types of cext/codec/json_writer.pyx, which says what everything does.

from typing import Any

class Writer: ...

def dump(value: Any) -> bytes: ...
